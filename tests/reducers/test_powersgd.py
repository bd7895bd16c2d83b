"""PowerSGD keeps its paper's rules, and the house's laws where means are taken in its middle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_compress.collectives import LocalCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.reducers import powersgd
from lightning_compress.reducers.powersgd import PowerSGD, normal
from tests.reducers.ranks import CARRIED, CPU, gradient, train
from tests.reference import lowrank
from tests.reference.codecs import random16

# Of each kind: alone, side by side, at equal distances, at unequal ones, and too small both ways.
LAYOUT = Layout.of(
    [
        ("conv", (16, 8, 3, 3)),
        ("first.a", (40, 30)),
        ("first.b", (48, 72)),
        ("second.a", (40, 30)),
        ("second.b", (48, 72)),
        ("thin", (300, 2)),
        ("third.a", (40, 30)),
        ("bias", (50,)),
        ("twin", (48, 72)),
        ("other twin", (48, 72)),
        ("scalar", ()),
    ]
)
FACTORED = [segment for segment in LAYOUT.segments if segment.name not in ("thin", "bias", "scalar")]
DENSE = [segment for segment in LAYOUT.segments if segment not in FACTORED]


def matrix(vector: torch.Tensor, segment) -> np.ndarray:
    return vector[segment.offset : segment.end].view(segment.shape[0], -1).double().numpy()


def dense(vector: torch.Tensor, segment) -> np.ndarray:
    return vector[segment.offset : segment.end].numpy()


def factor(seen, segment) -> np.ndarray:
    """Q ``[m, r]`` of a parameter."""
    place = next(each for each in seen.states["q"].layout.segments if each.name == segment.name)
    return seen.committed[-1]["q"][place.offset : place.end].view(place.shape).double().numpy().T


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [1, 3])
def test_equals_the_reference(rank: int, size: int) -> None:
    ranks = train(PowerSGD(rank), LAYOUT, size, steps=3)
    starts = {s.name: factor(train(PowerSGD(rank), LAYOUT, 1, skipped=(0,))[0], s) for s in FACTORED}
    for segment in FACTORED:
        q, residuals = starts[segment.name], [0.0] * size
        for step in range(3):
            matrices = [matrix(gradient(LAYOUT, r, step), segment) + residuals[r] for r in range(size)]
            mean, q, residuals = lowrank.powersgd(matrices, q)
            for seen, residual in zip(ranks, residuals, strict=True):
                np.testing.assert_allclose(matrix(seen.means[step], segment), mean, atol=3e-6)
                np.testing.assert_allclose(matrix(seen.residuals[step], segment), residual, atol=3e-6)
        np.testing.assert_allclose(abs(factor(ranks[0], segment)), abs(q), atol=1e-5)  # P's signs are its own
    exact = sum(gradient(LAYOUT, r, 2).double() for r in range(size)) / size
    for segment in DENSE:
        np.testing.assert_allclose(dense(ranks[0].means[2], segment), dense(exact, segment), atol=1e-6)


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_laws(size: int, warm_start: bool) -> None:
    ranks = train(PowerSGD(2, warm_start), LAYOUT, size, steps=4)
    before = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for step in range(4):
        total = before + sum(gradient(LAYOUT, rank, step).double() for rank in range(size))
        before = sum(seen.residuals[step].double() for seen in ranks)
        error = size * ranks[0].means[step].double() + before - total
        assert error.abs().max() <= 1e-6 * size * total.abs().max()
        for seen in ranks:
            assert seen.means[step].equal(ranks[0].means[step])
            assert seen.carried[step].equal(size * torch.arange(CARRIED) + sum(range(size)))
            assert all(seen.committed[step][name].equal(q) for name, q in ranks[0].committed[step].items())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_two_collectives_and_bytes_by_the_formula(size: int) -> None:
    sums = CARRIED + sum(segment.numel for segment in DENSE) + sum(3 * s.shape[0] for s in FACTORED)
    factors = sum(3 * math.prod(s.shape[1:]) for s in FACTORED)
    for seen in train(PowerSGD(3), LAYOUT, size):
        assert seen.collectives == 2
        assert seen.bytes_counted == seen.bytes_promised
        assert seen.bytes_promised == sum(round(2 * (size - 1) / size * 4 * count) for count in (sums, factors))


def test_nothing_to_factor_is_the_exact_mean_in_one_collective() -> None:
    parts = LAYOUT.cut(100, LAYOUT.numel - 3551)  # the first and the last of them are not whole
    assert PowerSGD(10**6).state(LAYOUT) == {}
    assert {s.name for s in PowerSGD().state(parts)["q"].layout.segments} == {s.name for s in FACTORED[1:-2]}
    ranks = train(PowerSGD(10**6), LAYOUT, 3)
    mean = sum(gradient(LAYOUT, rank, 0).double() for rank in range(3)) / 3
    assert (ranks[0].means[0] - mean).abs().max() <= 1e-6
    assert all(seen.collectives == 1 and not seen.residuals[0].any() for seen in ranks)


@pytest.mark.parametrize(
    ("shape", "rank", "rate", "factored"),
    [((12, 12), 3, 2.0, True), ((12, 12), 4, 2.0, False), ((12, 12), 6, 1.0, True), ((11, 13), 3, 2.0, False)],
)
def test_what_is_worth_factors(shape: tuple[int, int], rank: int, rate: float, factored: bool) -> None:
    layout = Layout.of([("w", shape)])
    assert bool(PowerSGD(rank, min_compression_rate=rate).state(layout)) is factored


@pytest.mark.parametrize("size", [1, 3])
def test_a_mean_of_the_rank_is_exact_in_the_second_step(size: int) -> None:
    """Each rank's gradient is of full rank; only their mean is not."""
    random = np.random.default_rng(0)
    low = torch.from_numpy((random.standard_normal((50, 2)) @ random.standard_normal((2, 70))).astype(np.float32))
    noise = torch.from_numpy(random.standard_normal((size, 50, 70)).astype(np.float32))
    noise -= noise.mean(dim=0)
    ranks = train(PowerSGD(2), Layout.of([("w", (50, 70))]), size, 2, lambda rank, _: (low + noise[rank]).view(-1))
    assert (ranks[0].means[1].view(50, 70) - low).abs().max() <= 1e-5 * low.abs().max()
    assert (train(PowerSGD(1), Layout.of([("w", (50, 70))]), 1, 2)[0].residuals[1]).abs().max() > 0.1


@pytest.mark.parametrize("scale", [1e-36, 1e-22, 1e19, 1e35])
def test_every_scale_is_alike(scale: float) -> None:
    """P has the size of the gradient, and not of its square."""
    layout = Layout.of([("w", (64, 48))])
    scaled = 2.0 ** round(math.log2(scale))
    plain, other = (
        train(PowerSGD(1), layout, 2, 4, lambda rank, step, by=by: gradient(layout, rank, step) * by)[0]
        for by in (1.0, scaled)
    )
    for one, two in zip([*plain.means, *plain.residuals], [*other.means, *other.residuals], strict=True):
        torch.testing.assert_close(two / scaled, one, rtol=1e-5, atol=1e-5)


def test_residuals_stay_small_where_ranks_differ_for_ever() -> None:
    """What is left is a projection of what there was; with the mean subtracted in its place it would grow each step."""
    layout = Layout.of([("w", (12, 40))])
    apart = torch.randn(12 * 40, generator=torch.Generator().manual_seed(0))
    ranks = train(PowerSGD(2), layout, 2, 300, lambda rank, step: gradient(layout, rank, step) + apart * (2 * rank - 1))
    sizes = [float(residual.norm()) for residual in ranks[0].residuals]
    assert max(sizes[150:]) <= 1.2 * max(sizes[:150])


@pytest.mark.parametrize("scale", [0.0, 1e-43, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("rank", [1, 4])
def test_left_factors_are_orthonormal(rank: int, scale: float) -> None:
    plan_of = PowerSGD(rank).plan
    layout = Layout.of([("a", (40, 64)), ("b", (40, 64)), ("c", (40, 50))])
    states = {name: State(each.layout, CPU, each.initial) for name, each in PowerSGD(rank).state(layout).items()}
    plan = plan_of(layout, 0, World(LocalCollective(), CPU, Meter(CPU)), states)
    vector = gradient(layout, 0, 0) * scale
    vector[: 40 * 64] = vector[:64].repeat(40)  # all rows alike: of rank 1
    out = torch.full_like(vector, torch.nan)
    plan.mean(vector, out, torch.zeros(0), 1)
    (base,) = plan._bases
    assert base.shape == (3, rank, 40)
    assert (base @ base.mT - torch.eye(rank)).abs().max() <= 1e-5
    assert out.isfinite().all()
    assert vector.isfinite().all()
    assert bool(out.any()) is (scale > 0)


def test_a_zero_gradient_does_not_stop_it_for_good() -> None:
    """The factor stays as it was then, and the power iteration goes on from it."""
    layout = Layout.of([("w", (30, 40))])
    low = torch.outer(torch.arange(1.0, 31), torch.arange(1.0, 41)).view(-1)
    seen = train(PowerSGD(1), layout, 1, 4, lambda _, step: low * (step > 1))[0]
    assert seen.committed[1]["q"].equal(seen.committed[0]["q"])
    assert seen.committed[1]["q"].any()
    assert not seen.means[1].any()
    torch.testing.assert_close(seen.means[3] + seen.means[2], 2 * low, rtol=1e-5, atol=0)


def test_the_start_is_random_normal_and_the_same_in_every_process() -> None:
    layout = Layout.of([("a", (200, 5000)), ("b", (200, 5000))])
    state, again = (train(PowerSGD(2), layout, 1, skipped=(0,))[0].committed[0]["q"] for _ in range(2))
    assert state.equal(again)
    first, second = state.view(2, -1)
    assert not first.equal(second)
    for part in (first, second):
        assert abs(part.mean()) < 0.05
        assert abs(part.std() - 1) < 0.05
        assert abs(part.pow(4).mean() - 3) < 0.4
    reordered = Layout.of([("b", (200, 5000)), ("a", (200, 5000))])
    assert train(PowerSGD(2), reordered, 1, skipped=(0,))[0].committed[0]["q"].equal(torch.cat([second, first]))
    u, v = np.array([(number + 32768.5) / 65536 for number in random16(7, 16)]).reshape(2, 8)
    np.testing.assert_allclose(normal(7, 8, CPU).numpy(), np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v), rtol=1e-5)


def test_a_skipped_step_leaves_the_factor_as_it_was() -> None:
    straight = train(PowerSGD(2), LAYOUT, 2, 3)
    gradients = [0, 1, 1, 2]
    stumbling = train(PowerSGD(2), LAYOUT, 2, 4, lambda rank, step: gradient(LAYOUT, rank, gradients[step]), (1,))
    for one, other in zip(straight, stumbling, strict=True):
        assert one.means[2].equal(other.means[3])
        assert one.committed[2]["q"].equal(other.committed[3]["q"])
        assert other.committed[0]["q"].equal(other.committed[1]["q"])


def test_a_cold_start_draws_anew() -> None:
    seen = train(PowerSGD(2, warm_start=False), LAYOUT, 1, 2, lambda *_: gradient(LAYOUT, 0, 0))[0]
    assert not seen.states
    again = train(PowerSGD(2, warm_start=False), LAYOUT, 1, 1, lambda *_: gradient(LAYOUT, 0, 0))[0]
    assert seen.means[0].equal(again.means[0])
    segment = FACTORED[2]
    first, second = (matrix(mean, segment) for mean in seen.means)
    assert np.linalg.matrix_rank(np.concatenate([first, second]), tol=1e-4) == 4


def test_steady_state_allocates_nothing_large() -> None:
    layout = Layout.of([("a", (1024, 1024)), ("b", (1024, 1024)), ("c", (9, 2**17))])
    states = {name: State(each.layout, CPU, each.initial) for name, each in PowerSGD().state(layout).items()}
    plan = PowerSGD().plan(layout, 10, World(LocalCollective(), CPU, Meter(CPU)), states)
    vector, out = gradient(layout, 0, 0), torch.zeros(layout.numel)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        plan.mean(vector, out, torch.zeros(10), 1)
    assert max(event.cpu_memory_usage for event in profiler.events()) <= 1 << 16


@pytest.mark.parametrize(
    "settings",
    [
        *({"rank": 0}, {"rank": 1.5}, {"rank": True}, {"warm_start": 1}),
        *({"min_compression_rate": 0.9}, {"min_compression_rate": math.nan}, {"min_compression_rate": "2"}),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=rf"PowerSGD\({name}=.*must be"):
        PowerSGD(**settings)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_gradient_of_zeros_costs_no_direction(rank: int) -> None:
    """The first rows never have a gradient, as those of padding: the QR of 0 would look there alone, for ever."""
    layout, reducer = Layout.of([("embedding", (64, 32))]), PowerSGD(rank)
    states = {name: State(each.layout, CPU, each.initial, each.holder) for name, each in reducer.state(layout).items()}
    plan = reducer.plan(layout, 1, World(LocalCollective(), CPU, Meter(CPU)), states)
    for step in range(3):
        gradient = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        gradient[:rank] = 0.0
        mean = torch.empty(layout.numel)
        plan.mean((gradient * (step > 0)).view(-1), mean, torch.zeros(1), step)
        states["q"].touch()
        states["q"].commit(torch.tensor(False), layout.names)
    assert torch.linalg.matrix_rank(mean.view(64, 32)) == rank


def test_products_are_of_float32_where_those_of_matrices_are_not(monkeypatch) -> None:
    """TensorFloat-32 has 10 bits of mantissa: of what is sent, a thousandth would be lost, or kept too."""
    cuda = torch.device("cuda")
    assert not powersgd._rounds_products(cuda)
    torch.set_float32_matmul_precision("high")
    try:
        assert powersgd._rounds_products(cuda)
        assert not powersgd._rounds_products(CPU)
    finally:
        torch.set_float32_matmul_precision("highest")
    expected = train(PowerSGD(3), LAYOUT, 2, steps=3)
    monkeypatch.setattr(powersgd, "_rounds_products", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "baddbmm_", None)
    for seen, wanted in zip(train(PowerSGD(3), LAYOUT, 2, steps=3), expected, strict=True):
        for found in ("means", "residuals"):
            for one, other in zip(getattr(seen, found), getattr(wanted, found), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=3e-6)
