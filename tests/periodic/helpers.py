"""Local steps that have begun."""

from lightning_compress.periodic import LocalSGD


def begun(model, ranks, rounds, outer="average", optimizers=(), compressor="none", **settings):
    """Over these ranks."""
    given = {"fragments": rounds.fragments, "delay": rounds.delay, "alpha": rounds.alpha}
    local = LocalSGD(rounds.sync_every, outer, compressor, **given, **settings)
    local.start(model, optimizers, ranks)
    return local


def after(local, steps):
    """So many steps, which something else than an optimizer made."""
    for _ in range(steps):
        local.after_step()
