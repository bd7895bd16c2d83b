"""1-bit Adam: AdamW at first, then Adam with a variance that stands still and a momentum of one bit an element."""

import re

import numpy as np
import pytest
import torch

from lightning_compress.codecs import Dense, EFSign, Rotated
from lightning_compress.corrections import OneBitAdam
from lightning_compress.settings.parsing import build_compressor
from lightning_compress.settings.run_state import RunState
from tests.corrections.helpers import COMPRESSED, LENGTHS, NAMES, Walker, gradient, named, on_ranks, walk
from tests.reference.onebit_adam import simulate_onebit_adam

FREEZE, STEPS = 6, 14
TOTAL = sum(LENGTHS)


def mean(size, step, gradients=gradient):
    """Of the ranks' gradients."""
    return sum(gradients(rank, step).double() for rank in range(size)) / size


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_phase_is_adamw(size, decay):
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, TOTAL)) for _ in range(2))
    sgd = torch.optim.SGD([ours], 1e-2, weight_decay=decay)
    adamw = torch.optim.AdamW([theirs], 1e-2, weight_decay=decay)
    for step, update in enumerate(walk(size, OneBitAdam(), 20, warmup_steps=20)[0]):
        ours.grad, theirs.grad = update, mean(size, step).float()
        sgd.step()
        adamw.step()
        assert (ours - theirs).abs().max() <= 1e-6
    assert (theirs - torch.linspace(-1, 1, TOTAL)).abs().max() > 0.01


@pytest.mark.parametrize("exchange", ["auto", "two_shot"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_second_phase_without_loss_is_adam_whose_variance_stands_still(size, exchange):
    method = OneBitAdam(quantiser="none")
    out, walkers = walk(size, method, STEPS, exchange=exchange, warmup_steps=FREEZE)
    m = v = torch.zeros(TOTAL, dtype=torch.float64)
    for step, update in enumerate(out):
        m = 0.9 * m + 0.1 * mean(size, step)
        if step < FREEZE:
            v = 0.999 * v + 0.001 * mean(size, step) ** 2
        settled = v / (1 - 0.999 ** min(step + 1, FREEZE))
        expected = m / (1 - 0.9 ** (step + 1)) / (settled.sqrt() + 1e-8)
        assert ((update - expected).abs() <= 1e-5 * expected.abs() + 1e-5).all()
    for name, value in walkers[0].state("variance").items():
        assert (value - named(v)[name]).abs().max() <= 1e-6 * v.max()


@pytest.mark.parametrize("size", [2, 3])
def test_it_is_the_papers(size):
    method = OneBitAdam(block=512)
    out, walkers = walk(size, method, STEPS, exchange="all_gather", warmup_steps=FREEZE)
    order = [*COMPRESSED, "bias", "tiny"]
    flat = lambda values: torch.cat([named(values)[name] for name in order]).double().numpy()  # noqa: E731
    gradients = [[flat(gradient(rank, step)) for rank in range(size)] for step in range(STEPS)]
    compressed = sum(length for name, length in zip(NAMES, LENGTHS, strict=True) if name in COMPRESSED)
    directions, residual = simulate_onebit_adam(gradients, FREEZE, compressed, 512)
    for update, direction in zip(out, directions, strict=True):
        assert np.median(np.abs(flat(update) - direction)) <= 1e-5
        assert np.abs(flat(update) - direction).max() <= 1e-2 * np.abs(direction).max()
    for walker, own in zip(walkers, residual, strict=True):
        kept = torch.cat([walker.state("residual")[name] for name in COMPRESSED]).numpy()
        assert np.abs(kept - own).max() <= 1e-5
        assert np.abs(own).max() > 0.1


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("size", [2, 4])
def test_no_momentum_is_lost(size, exchange):
    """After a frozen step: W m, and what stays, is the sum of the ranks' momenta and residuals before."""

    def program(collective):
        walker = Walker(collective, OneBitAdam(), exchange=exchange, warmup_steps=FREEZE)
        for step in range(FREEZE + 4):
            before = {kind: walker.state(kind) for kind in ("momentum", "residual")}
            walker.reduce(gradient(collective.rank, step), step)
            walker.commit()
        return before, walker, named(gradient(collective.rank, FREEZE + 3))

    ranks = on_ranks(size, program)
    for name in COMPRESSED:
        given = sum(
            0.9 * before["momentum"][name].double() + 0.1 * own[name].double() + before["residual"][name].double()
            for before, _, own in ranks
        )
        momentum = ranks[0][1].state("momentum")[name].double()
        kept = sum(walker.state("residual")[name].double() for _, walker, _ in ranks)
        assert (size * momentum + kept - given).abs().max() <= 1e-6 * given.abs().max() * size
        assert all(walker.state("momentum")[name].equal(momentum.float()) for _, walker, _ in ranks)
        assert kept.abs().max() > 0.1


def test_a_frozen_step_travels_in_a_bit_an_element():
    def program(collective):
        walker = Walker(collective, OneBitAdam(), exchange="all_gather", warmup_steps=1)
        return [walker.group.plan(step).cost.bytes_sent for step in (0, 1)]

    dense, frozen = on_ranks(2, program)[0]
    assert dense >= 4 * TOTAL
    assert dense / frozen > 20


def test_an_element_whose_variance_is_zero_does_not_move():
    def gradients(rank, step):
        values = gradient(rank, step)
        if step < FREEZE:
            named(values)["linear"][:100] = 0
        return values

    out, walkers = walk(2, OneBitAdam(), STEPS, gradients, exchange="all_gather", warmup_steps=FREEZE)
    for step, update in enumerate(out):
        assert update.isfinite().all()
        assert not named(update)["linear"][:100].any()
        assert step == 0 or named(update)["linear"][100:].all()
    assert walkers[0].state("momentum")["linear"][:100].any()


def test_a_rank_without_a_gradient_still_sends_the_momentum():
    def gradients(rank, step):
        values = gradient(rank, step)
        if step == FREEZE and rank == 0:
            named(values)["linear"].zero_()
        return values

    _, walkers = walk(2, OneBitAdam(quantiser="none"), FREEZE + 1, gradients, warmup_steps=FREEZE)
    _, lossy = walk(2, OneBitAdam(), FREEZE + 1, gradients, exchange="all_gather", warmup_steps=FREEZE)
    m = torch.zeros(TOTAL, dtype=torch.float64)
    for step in range(FREEZE + 1):
        m = 0.9 * m + 0.1 * mean(2, step, gradients)
    assert (walkers[0].state("momentum")["linear"] - named(m)["linear"]).abs().max() <= 1e-6
    total = 2 * lossy[0].state("momentum")["linear"] + sum(each.state("residual")["linear"] for each in lossy)
    assert (total - 2 * named(m)["linear"]).abs().max() <= 1e-5


def test_the_loss_scale_leaves_no_trace():
    def program(scales):
        def run(collective):
            walker = Walker(collective, OneBitAdam(), exchange="all_gather", warmup_steps=2)
            out = []
            for step, scale in enumerate(scales):
                values = gradient(collective.rank, step)
                out.append(walker.reduce(values * scale, step, None if scale == 1 else torch.tensor(scale)) / scale)
                walker.commit()
            return out

        return on_ranks(2, run)[0]

    assert torch.stack(program([1.0] * 5)).equal(torch.stack(program([1.0, 512.0, 256.0, 4.0, 2.0**16])))


@pytest.mark.parametrize("rejected", [2, 8])
def test_a_step_that_is_rolled_back_never_was_and_a_second_backward_begins_anew(rejected):
    def program(collective):
        walker = Walker(collective, OneBitAdam(), exchange="all_gather", warmup_steps=FREEZE)
        for step in range(10):
            if step == rejected:
                walker.reduce(gradient(collective.rank, 77), step)
                walker.roll_back()
            if step == 1:
                walker.reduce(gradient(collective.rank, 78), step)
            walker.reduce(gradient(collective.rank, step), step)
            walker.commit()
        return walker

    _, plain = walk(2, OneBitAdam(), 10, exchange="all_gather", warmup_steps=FREEZE)
    for walker, other in zip(on_ranks(2, program), plain, strict=True):
        for kind in ("momentum", "variance", "residual"):
            assert all(walker.state(kind)[name].equal(value) for name, value in other.state(kind).items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta1": 1.0}, "OneBitAdam(beta1=1.0): beta1 must be in [0, 1)"),
        ({"beta2": -0.1}, "beta2=-0.1"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"block": 100}, "block must be a multiple of 8"),
        ({"block": 512, "quantiser": "onebit"}, "give it to the quantiser"),
        ({"quantiser": "nosuch"}, "unknown quantiser 'nosuch'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_compressor({"name": "onebit_adam", **settings})


def test_dense_steps_are_a_setting_of_the_method():
    assert RunState.of("onebit_adam").dense_steps == 1000
    assert RunState.of("onebit_adam", warmup_steps=50).dense_steps == 50
    assert RunState.of("onebit_adam", warmup_steps=50).correction.freeze_steps == 50
    assert RunState.of("topk").dense_steps == 0
    assert RunState.of("dgc", warmup_steps=50).dense_steps == 50
    assert OneBitAdam().codec == EFSign()
    assert OneBitAdam(quantiser={"name": "rotated", "bits": 4}) == OneBitAdam(quantiser=Rotated(4))
    assert OneBitAdam(quantiser="none").codec == Dense()


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: torch.optim.AdamW(weight, 1e-3),
        lambda weight: torch.optim.SGD(weight, 1e-3, momentum=0.9),
        lambda weight: torch.optim.RMSprop(weight, 1e-3),
    ],
)
def test_other_optimizers_are_refused(make):
    weight = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match=re.escape("onebit_adam is Adam itself; use torch.optim.SGD(lr=..., weight")):
        OneBitAdam().correction.take_over(make(weight), ["weight"])
    assert OneBitAdam().correction.take_over(torch.optim.SGD(weight, 1e-3, weight_decay=0.1), ["weight"]) is None
