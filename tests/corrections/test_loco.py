"""LoCo: an average of errors is fed back, in 8 bits."""

import re
from functools import partial

import numpy as np
import pytest
import torch

from lightning_compress.core import blocks
from lightning_compress.corrections.loco import LoCo
from lightning_compress.exchanges.message import PRECISE
from lightning_compress.settings.run_state import RunState
from tests.corrections.helpers import COMPRESSED, LENGTHS, NAMES, Walker, gradient, named, on_ranks, walk
from tests.reference.loco import simulate_ecq, simulate_loco
from tests.strategies.test_resume import Net, fit, fit_only, interrupted

STEPS = 20


def errors(walker):
    """Committed errors by the parameter's name."""
    return {name: blocks.decode(each) for name, each in walker.state("loco").items()}


@pytest.mark.parametrize(("size", "decay"), [(3, 1.0), (4, 1.0), (3, 0.8)])
def test_it_is_the_papers(size, decay):
    loco = LoCo(beta=0.1, reset_every=8, decay=decay)
    out, walkers = walk(size, "onebit", STEPS, exchange="all_gather", error_feedback=loco)
    flat = lambda values: torch.cat([named(values)[name] for name in COMPRESSED]).numpy()  # noqa: E731
    gradients = [[flat(gradient(rank, step)) for rank in range(size)] for step in range(STEPS)]
    lengths = [length for name, length in zip(NAMES, LENGTHS, strict=True) if name in COMPRESSED]
    means, kept = simulate_loco(gradients, lengths, 0.1, 8, decay)
    for update, mean in zip(out, means, strict=True):
        assert np.quantile(np.abs(flat(update) - mean), 0.999) <= 1e-5 * np.abs(mean).max()
    for walker, own in zip(walkers, kept, strict=True):
        mine = torch.cat([errors(walker)[name] for name in COMPRESSED]).numpy()
        assert np.quantile(np.abs(mine - own), 0.999) <= 1e-5 * np.abs(own).max()
        assert np.abs(own).max() > 0.1


@pytest.mark.parametrize(("size", "decay"), [(3, 0.9), (2, 0.5)])
def test_with_a_decay_it_is_ecq_sgd(size, decay):
    """By that paper's own rule, to what 8 bits lose of the errors: little beside what the decay changes."""
    loco = LoCo(beta=0.2, decay=decay, reset_every=None)
    out, walkers = walk(size, "onebit", STEPS, exchange="all_gather", error_feedback=loco)
    flat = lambda values: torch.cat([named(values)[name] for name in COMPRESSED]).numpy()  # noqa: E731
    gradients = [[flat(gradient(rank, step)) for rank in range(size)] for step in range(STEPS)]
    means, kept = simulate_ecq(gradients, 0.2, decay)
    others, without = simulate_ecq(gradients, 0.2, 1.0)
    assert np.linalg.norm(flat(out[-1]) - means[-1]) <= 0.3 * np.linalg.norm(others[-1] - means[-1])
    for walker, own, other in zip(walkers, kept, without, strict=True):
        mine = torch.cat([errors(walker)[name] for name in COMPRESSED]).numpy()
        assert np.linalg.norm(mine - own) <= 0.25 * np.linalg.norm(other - own)


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("compressor", ["onebit", {"name": "topk", "density": 0.05}, {"name": "rotated", "bits": 2}])
@pytest.mark.parametrize("size", [2, 4])
def test_each_step_conserves(size, compressor, exchange):
    """``W * mean + sum((e_after - (1 - beta) e) / beta) == sum(g + e)``, to the rounding of e."""
    if exchange == "two_shot" and "topk" in str(compressor):
        exchange = "split_gather"

    def program(collective):
        walker = Walker(collective, compressor, exchange=exchange, error_feedback="loco")
        for step in range(6):
            before = errors(walker)
            mean = walker.reduce(gradient(collective.rank, step), step)
            walker.commit()
        return before, errors(walker), named(mean), named(gradient(collective.rank, 5))

    ranks = on_ranks(size, program)
    for name in COMPRESSED:
        left = sum((after[name] - 0.95 * before[name]) / 0.05 for before, after, _, _ in ranks)
        given = sum(before[name] + own[name] for before, _, _, own in ranks)
        assert (size * ranks[0][2][name] + left - given).norm() <= 0.03 * given.norm()
        assert left.norm() > 0.1 * given.norm()


def test_biased_sums_travel_in_more_bits():
    def sent(feedback):
        def program(collective):
            walker = Walker(collective, "onebit", exchange="two_shot", error_feedback=feedback)
            return walker.group.plan(0).cost.bytes_sent

        return on_ranks(4, program)[0]

    numel = sum(length for name, length in zip(NAMES, LENGTHS, strict=True) if name in COMPRESSED)
    assert 8 * (sent("loco") - sent(True)) == pytest.approx(3 / 4 * numel * (PRECISE.bits - 1), rel=0.2)  # filled up
    assert sent("loco") == sent(False)


def test_a_step_that_is_rolled_back_never_was_and_a_second_backward_goes_on():
    def program(collective, strange):
        walker = Walker(collective, "onebit", exchange="all_gather", error_feedback=LoCo(reset_every=3))
        for step in range(7):
            if strange and step in (3, 5):
                walker.reduce(gradient(collective.rank, 77), step)
                walker.roll_back()
            walker.reduce(gradient(collective.rank, step), step)
            walker.commit()
        once = errors(walker)
        walker.reduce(gradient(collective.rank, 8), 7)
        walker.reduce(gradient(collective.rank, 9), 7)
        walker.commit()
        return once, errors(walker)

    plain, other = (on_ranks(2, lambda ranks, strange=strange: program(ranks, strange)) for strange in (False, True))
    for (once, twice), (again, _) in zip(plain, other, strict=True):
        assert all(once[name].equal(again[name]) and not once[name].equal(twice[name]) for name in COMPRESSED)


def test_the_error_begins_at_zero_again():
    def program(collective):
        walker = Walker(collective, "onebit", exchange="all_gather", error_feedback=LoCo(reset_every=4))
        fresh = Walker(collective, "onebit", exchange="all_gather", error_feedback=LoCo(reset_every=4))
        for step in range(4):
            walker.reduce(gradient(collective.rank, step), step)
            walker.commit()
        given = gradient(collective.rank, 9)
        return walker.reduce(given, 4).equal(fresh.reduce(given, 0))

    assert all(on_ranks(2, program))


def test_dense_steps_send_no_error_and_keep_it():
    def program(collective):
        walker = Walker(collective, "onebit", exchange="all_gather", error_feedback="loco", warmup_steps=2)
        out = []
        for step in range(3):
            out.append(walker.reduce(gradient(collective.rank, step), step))
            walker.commit()
            assert all(each.any() == (step == 2) for each in errors(walker).values())
        return out

    out = on_ranks(2, program)[0]
    for step in range(2):
        assert out[step].allclose((gradient(0, step) + gradient(1, step)) / 2, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"error_feedback": {"name": "loco", "beta": 0.0}}, "beta must be in (0, 1]"),
        ({"error_feedback": {"name": "loco", "reset_every": 0}}, "reset_every=0"),
        ({"error_feedback": {"name": "loco", "rate": 1}}, "no setting 'rate'"),
        ({"error_feedback": "locos"}, "error_feedback='locos' must be true, false, 'loco'"),
        (
            {"error_feedback": {"name": "loco", "beta": 0.2, "decay": 0.1}},
            "LoCo(beta=0.2, decay=0.1): decay must be in",
        ),
        ({"error_feedback": {"name": "loco", "decay": 0}}, "decay=0): decay must be in [beta, 1]"),
        ({"error_feedback": {"name": "loco", "decay": float("nan")}}, "decay=nan): decay must be in [beta, 1]"),
        ({"error_feedback": {"name": "loco", "decay": True}}, "decay=True): decay must be in [beta, 1]"),
        ({"error_feedback": {"name": "loco", "decay": 1.5}}, "decay=1.5): decay must be in [beta, 1]"),
        ({"error_feedback": "loco", "compressor": "dgc"}, "counts on a residual"),
        ({"error_feedback": "loco", "compressor": "signsgd"}, "nothing that could be fed back"),
        ({"error_feedback": "loco", "compressor": "auto"}, "chooses among methods that need none"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RunState.of(**{"compressor": "onebit"} | settings)


def test_state_takes_little_more_than_a_byte():
    layout = LoCo.state(RunState.of("onebit").rules.sections([("weight", (1000, 100))])[1][0].layout.segments).layout
    assert 2 * layout.numel <= 2.04 * 100_000


def _resumes(folder):
    return interrupted(folder, compressor="onebit", error_feedback=LoCo(reset_every=5))


@pytest.mark.parametrize("size", [2, 3])
def test_it_resumes_bit_for_bit(pools, tmp_path, size):
    assert all(same and not said for same, said in pools[size].run(_resumes, str(tmp_path)))
    shard = torch.load(next(tmp_path.glob("epoch=0.ckpt.lc/*.rank0.pt")), weights_only=True)
    kept = [group["states"]["loco"]["numbers"] for group in shard["tree"]["groups"]]
    assert {each.dtype for each in kept} == {torch.uint8}
    assert any(each.any() for each in kept)


class Watched(Net):
    """Looks at the restored errors before the first step."""

    def on_train_start(self):
        groups = self.trainer.strategy.compression.state_dict()["groups"]
        kept = [group["states"]["loco"] for group in groups]
        parts = [part for one in kept for part in one["numbers"].split(one["numels"])]
        Watched.seen = float(sum(blocks.decode(part).norm() for part in parts))


def _restored(folder, path, **settings):
    _, _, said = fit(folder, "onebit", path, make=partial(Watched), **settings)
    return Watched.seen, said


@pytest.mark.parametrize("state", ["sidecar", "mean"])
def test_another_world_goes_on_from_the_mean(pools, tmp_path, state):
    settings = {"error_feedback": "loco", "state": state}
    pools[2].run(partial(fit_only, **settings), str(tmp_path))
    for kept, said in pools[3].run(partial(_restored, **settings), f"{tmp_path}/again", f"{tmp_path}/epoch=0.ckpt"):
        assert kept > 0
        assert not said
