"""signSGD: votes against a slow count, ties, momentum, bytes, and ranks that lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_compress.collectives import Collective, LocalCollective, World, run_threads
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.contrib.reducers.signsgd import SignSGD, Tally
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.engine.group import Group
from lightning_compress.settings.run_state import RunState
from tests.reducers.helpers import CPU, trips
from tests.reference import ternary as reference

LAYOUT = Layout.of([("a", (41, 37)), ("b", (7,)), ("c", (500,))])
RANKS = [1, 2, 3, 4, 5]
ALL = [SignSGD(), SignSGD(momentum=0.0), SignSGD("tally"), SignSGD("tally", 0.0), SignSGD(momentum=0.5, scale=0.25)]


def vectors(rank: int) -> list[torch.Tensor]:
    """Four steps; small whole numbers, so that there are zeros of either sign, and ties between momenta."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-2, 3, (LAYOUT.numel,), generator=generator) * torch.tensor(-1.0) for _ in range(4)]


@pytest.mark.parametrize("method", ALL, ids=repr)
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_the_reference(ranks: int, method: SignSGD) -> None:
    everyone = trips(method, LAYOUT, vectors, ranks)
    gradients = [[each.before.numpy() for each in done] for done in everyone]
    wanted = reference.signsgd(gradients, method.momentum, method.vote == "tally", [0, 1, 2, 3])
    for done in everyone:
        for each, first, outcome in zip(done, everyone[0], wanted, strict=True):
            expected = np.array(outcome, np.float64) * method.scale
            np.testing.assert_allclose(each.mean.numpy(), expected, rtol=1e-6 if method.vote == "tally" else 0)
            assert torch.equal(each.mean, first.mean)
            assert not each.after.any()  # as declared: nothing is left that could be fed back
            assert (each.carried == sum(rank + 0.5 for rank in range(ranks))).all()
    assert not method.conserves
    assert not method.contractive


@pytest.mark.parametrize("method", ALL, ids=repr)
@pytest.mark.parametrize("ranks", RANKS)
def test_bytes(ranks: int, method: SignSGD) -> None:
    down = 1 if method.vote == "majority" else {1: 1, 2: 2, 3: 2, 4: 3, 5: 3}[ranks]
    share = math.ceil(math.ceil(LAYOUT.numel / 8) / ranks)
    for done in trips(method, LAYOUT, vectors, ranks):
        wanted = (ranks - 1) * share * (1 + down) + all_reduce_bytes(12, ranks)
        assert all(each.sent == each.promised == wanted for each in done)
    assert (ranks - 1) * share * 8 <= LAYOUT.numel + 8 * ranks  # below one bit per element, either way


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 16, 33])
def test_tally_counts(rows: int) -> None:
    votes = torch.randint(0, 256, (rows, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    votes[:, :8], votes[:, 8:16] = 255, 0  # all, and none
    votes[::2, 16:24], votes[1::2, 16:24] = 255, 0  # half of an even number
    tally, out = Tally(rows, 40, CPU), torch.zeros(40, dtype=torch.uint8)
    for _ in range(2):  # counts begin anew
        tally.count(votes)
    bits = np.unpackbits(votes.numpy(), axis=1, bitorder="little").astype(int).sum(0)
    planes = np.unpackbits(tally.planes.numpy(), axis=1, bitorder="little").astype(int)
    np.testing.assert_array_equal((planes * 2 ** np.arange(len(planes))[:, None]).sum(0), bits)
    for ties in (None, torch.full((40,), 0xAA, dtype=torch.uint8)):
        tally.majority(rows, ties, out)
        tied = 0 if ties is None else np.unpackbits(ties.numpy(), bitorder="little")
        wanted = np.where(2 * bits == rows, tied, 2 * bits > rows)
        np.testing.assert_array_equal(np.unpackbits(out.numpy(), bitorder="little"), wanted)


def test_ties_fall_either_way_and_change_with_the_step() -> None:
    def opposed(rank: int) -> list[torch.Tensor]:
        return [torch.full((LAYOUT.numel,), 1.0 - 2 * rank)] * 2

    first, second = trips(SignSGD(momentum=0.0), LAYOUT, opposed, 2)[0]
    for each in (first, second):
        assert abs(float(each.mean.mean())) <= 4 / LAYOUT.numel**0.5
    assert (first.mean != second.mean).float().mean() == pytest.approx(0.5, abs=0.1)


def test_momentum_is_in_the_state_and_a_second_backward_goes_on() -> None:
    method = SignSGD(momentum=0.75)
    declared = method.state(LAYOUT)
    assert set(declared) == {"momentum"}
    assert declared["momentum"].holder == "rank"
    assert not SignSGD(momentum=0.0).state(LAYOUT)
    state = State(LAYOUT, CPU)
    plan = method.plan(LAYOUT, 0, World(LocalCollective(), CPU, Meter(CPU)), {"momentum": state})
    out, none = torch.empty(LAYOUT.numel), torch.zeros(0)
    plan.mean(torch.full((LAYOUT.numel,), -4.0), out, none, 0)
    assert (state.pending == -1).all()
    assert not state.committed.any()
    state.touch()
    plan.mean(torch.full((LAYOUT.numel,), 2.0), out, none, 0)
    assert (state.pending == -0.25).all()
    assert (out == -1).all()
    state.roll_back()
    plan.mean(torch.full((LAYOUT.numel,), 2.0), out, none, 0)
    assert (state.pending == 0.5).all()
    assert (out == 1).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_loss_scale_does_not_reach_the_optimizer(momentum: float) -> None:
    settings = RunState.of({"name": "signsgd", "momentum": momentum})
    group = Group([("a", (4, 5))], settings, World(LocalCollective(), CPU, Meter(CPU)))
    gradient = torch.tensor([1.0, -2.0]).repeat(10).view(4, 5) * 1024
    group.reduce([gradient], 0, torch.tensor(1024.0))
    assert torch.equal(gradient / 1024, torch.tensor([1.0, -1.0]).repeat(10).view(4, 5))
    for state in group.states.values():
        assert state.pending.abs().max() == pytest.approx(0.2)


def test_error_feedback_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves nothing that could be fed back"):
        RunState.of("signsgd", error_feedback=True)
    assert not RunState.of("signsgd").error_feedback


@pytest.mark.parametrize(
    ("liars", "arrives"),
    [*(pytest.param(liars, True, marks=pytest.mark.thorough) for liars in (0, 1)), (2, True), (3, False)],
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fewer_than_half_cannot_turn_the_vote(momentum: float, liars: int, arrives: bool) -> None:
    """The first ``liars`` of 5 send the opposite of their gradient of a noisy quadratic; three lead it away."""
    target = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(99))
    method = SignSGD(momentum=momentum)

    def program(collective: Collective) -> float:
        generator = torch.Generator().manual_seed(collective.rank)
        states = {name: State(each.layout, CPU) for name, each in method.state(LAYOUT).items()}
        plan = method.plan(LAYOUT, 0, World(collective, CPU, Meter(CPU)), states)
        weights, out = torch.zeros(LAYOUT.numel), torch.empty(LAYOUT.numel)
        for step in range(300):
            gradient = weights - target + 0.5 * torch.randn(LAYOUT.numel, generator=generator)
            plan.mean(-gradient if collective.rank < liars else gradient, out, torch.zeros(0), step)
            weights.sub_(out, alpha=0.02)
            for state in states.values():
                state.touch()
                state.commit(torch.tensor(False), LAYOUT.names)
        return float((weights - target).square().mean() / target.square().mean())

    for error in run_threads(5, program):
        assert (error < 0.15) == arrives
        assert arrives or error > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"vote": "mean"}, "vote must be one of 'majority', 'tally'"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\); try 0\.9"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\)"),
        ({"scale": 0}, "scale must be a number above 0"),
        ({"scale": float("nan")}, "scale must be a number above 0"),
    ],
)
def test_bad_settings(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SignSGD(**arguments)  # type: ignore[arg-type]
