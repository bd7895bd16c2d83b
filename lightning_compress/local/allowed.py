"""Settings of compression that rounds can have."""

from __future__ import annotations

from lightning_compress.settings.settings import Settings


def check(settings: Settings) -> None:
    """Refuse what gives the outer optimizer anything else than a mean, or looks at the inner optimizer.

    Raises:
        ValueError: it is chosen.
    """
    if (by := settings.steps_by) is not None:
        raise ValueError(
            f"local steps cannot be combined with {by}, which does a part of the optimizer's work, or votes: the outer "
            "optimizer needs a mean of what the ranks have learned; use 'rotated', 'topk' or another compressor"
        )
    if settings.schedule.by_rate:
        raise ValueError(
            "local steps cannot be combined with a schedule by learning rate: the outer one does not change; give "
            "values by rounds, such as {'density': {0: 0.25, 10: 0.01}}"
        )


def alone(settings: Settings) -> Settings:
    """The same on one rank, where there is nothing to compress."""
    return Settings.of("none", on_nonfinite=settings.on_nonfinite, check_drift_every=0)
