"""The count-sketch's linearity, error and finds; sketched SGD against its paper's rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_compress.collectives import LocalCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.reducers.sketch import RUN, CountSketch, Sketch
from lightning_compress.core.layout import Layout
from tests.reducers.ranks import CARRIED, CPU, gradient, train
from tests.reference import sketch as reference

LAYOUT = Layout.of([("a", (40, 30)), ("b", (37, 25))])


def integers(numel: int, seed: int) -> torch.Tensor:
    """Heavy-tailed whole numbers, whose sums are exact in any order, with many equal ones."""
    return torch.from_numpy(np.random.default_rng(seed).standard_cauchy(numel).clip(-999, 999).round()).float()


def table(vector: torch.Tensor, rows: int, columns: int, key: int) -> torch.Tensor:
    sums = torch.full((rows, columns), torch.nan)
    CountSketch(len(vector), rows, columns, CPU).fill(vector, sums, key)
    return sums


def estimate(vector: torch.Tensor, rows: int, columns: int, key: int) -> torch.Tensor:
    out = torch.full_like(vector, torch.nan)
    CountSketch(len(vector), rows, columns, CPU).estimate(table(vector, rows, columns, key), out, key)
    return out


@pytest.mark.parametrize(("numel", "rows", "columns"), [(1000, 5, 64), (999, 1, 1000), (70, 3, 8), (1, 7, 8)])
def test_tables_and_estimates_equal_the_reference(numel: int, rows: int, columns: int) -> None:
    vector = integers(numel, 0)
    hashes = reference.Hashes(numel, rows, columns, 11)
    expected = reference.table(vector.double().numpy(), hashes)
    np.testing.assert_array_equal(table(vector, rows, columns, 11), expected)
    np.testing.assert_array_equal(estimate(vector, rows, columns, 11), reference.estimates(expected, numel, hashes))


def test_accelerators_do_the_same_by_torch() -> None:
    vector, sums, out = integers(1000, 0), torch.empty(5, 64), torch.empty(1000)
    sketch = CountSketch(1000, 5, 64, CPU)
    sketch._module = torch
    sketch.fill(vector, sums, 11)
    sketch.estimate(sums, out, 11)
    assert sums.equal(table(vector, 5, 64, 11))
    assert out.equal(estimate(vector, 5, 64, 11))


def test_stretches_longer_than_a_run() -> None:
    numel, columns = 5 * RUN + 77, 2 * RUN + 24
    vector = integers(numel, 1)
    hashes = reference.Hashes(numel, 3, columns, 5)
    np.testing.assert_array_equal(table(vector, 3, columns, 5), reference.table(vector.double().numpy(), hashes))


@pytest.mark.parametrize("numel", [100, 5000])
def test_the_table_of_a_sum_is_the_sum_of_tables(numel: int) -> None:
    one, other = integers(numel, 1), integers(numel, 2)
    assert table(one + other, 5, 88, 3).equal(table(one, 5, 88, 3) + table(other, 5, 88, 3))
    assert not table(one, 5, 88, 3).equal(table(one, 5, 88, 4))


@pytest.mark.parametrize("kind", ["normal", "even", "band", "stripes"])
def test_a_rows_error_has_mean_zero_and_no_more_than_the_sketchs_variance(kind: str) -> None:
    """Also where large elements lie side by side, or at equal distances, or all are alike."""
    numel, columns, draws = 2000, 80, 1000
    vector = gradient(Layout.of([("w", (numel,))]), 0, 0) * 0.1
    vector[{"even": slice(None), "band": slice(300, 340), "stripes": slice(3, None, 80)}.get(kind, slice(0))] = 2.0
    total, squares = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    sketch, sums, out = CountSketch(numel, 1, columns, CPU), torch.empty(1, columns), torch.empty(numel)
    for key in range(draws):
        sketch.fill(vector, sums, key)
        sketch.estimate(sums, out, key)
        error = (out - vector).double()
        total += error
        squares += error.square()
    bound = float(vector.double().square().sum()) / columns
    assert squares.mean() / draws <= 1.05 * bound
    assert squares.max() / draws <= 2 * bound
    assert (total / draws).abs().max() <= 5 * math.sqrt(bound / draws)


def test_the_medians_error_is_small_with_high_probability() -> None:
    numel, columns = 50_000, 2000
    vector = gradient(Layout.of([("w", (numel,))]), 0, 0)
    error = (estimate(vector, 5, columns, 1) - vector).abs()
    deviation = float(vector.norm()) / math.sqrt(columns)
    assert (error > deviation).float().mean() <= 0.2
    assert (error > 3 * deviation).float().mean() <= 0.005


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_the_reference(size: int) -> None:
    numel = LAYOUT.numel
    reducer = Sketch(density=0.01, rows=3, width=1.5, candidates=3.0)
    k = math.ceil(0.01 * numel)
    ranks = train(reducer, LAYOUT, size, 3, lambda rank, step: integers(numel, 10 * rank + step))
    residuals = [np.zeros(numel)] * size
    for step in range(3):
        vectors = [residual + integers(numel, 10 * rank + step).numpy() for rank, residual in enumerate(residuals)]
        hashes = reference.Hashes(numel, 3, math.ceil(1.5 * k / 8) * 8, 1000 + step)
        mean, residuals = reference.step(vectors, k, 3 * k, hashes)
        for seen, residual in zip(ranks, residuals, strict=True):
            np.testing.assert_allclose(seen.means[step], mean, rtol=1e-7)
            np.testing.assert_array_equal(seen.residuals[step], residual)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_laws(size: int) -> None:
    ranks = train(Sketch(density=0.02), LAYOUT, size, 4)
    before = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for step in range(4):
        total = before + sum(gradient(LAYOUT, rank, step).double() for rank in range(size))
        before = sum(seen.residuals[step].double() for seen in ranks)
        error = size * ranks[0].means[step].double() + before - total
        assert error.abs().max() <= 1e-6 * total.abs().max()
        for seen in ranks:
            assert seen.means[step].equal(ranks[0].means[step])
            assert seen.carried[step].equal(size * torch.arange(CARRIED) + sum(range(size)))
            assert seen.means[step].count_nonzero() == math.ceil(0.02 * LAYOUT.numel)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_two_collectives_and_bytes_by_the_formula(size: int) -> None:
    k = math.ceil(0.01 * LAYOUT.numel)
    columns = -(-3 * k // 8) * 8
    for seen in train(Sketch(density=0.01, rows=7, width=3.0, candidates=2.5), LAYOUT, size):
        assert seen.collectives == 2
        assert seen.bytes_counted == seen.bytes_promised
        counts = (CARRIED + 7 * columns, math.ceil(2.5 * k))
        assert seen.bytes_promised == sum(round(2 * (size - 1) / size * 4 * count) for count in counts)


@pytest.mark.parametrize("reducer", [Sketch(1.0), Sketch(0.1), Sketch(0.02, width=20.0), Sketch(0.02, candidates=60)])
def test_what_would_send_as_much_is_the_exact_mean(reducer: Sketch) -> None:
    ranks = train(reducer, LAYOUT, 3)
    mean = sum(gradient(LAYOUT, rank, 0).double() for rank in range(3)) / 3
    assert (ranks[0].means[0] - mean).abs().max() <= 1e-6
    assert all(seen.bytes_promised == round(4 / 3 * 4 * (CARRIED + LAYOUT.numel)) for seen in ranks)
    assert all(not seen.residuals[0].any() for seen in ranks)


@pytest.mark.parametrize("places", [range(17, 5000, 131), range(2000, 2030)])
def test_what_is_large_in_the_mean_is_found(places: range) -> None:
    """It is small on each rank beside what the ranks have against each other, which a local top-k would send."""
    layout = Layout.of([("w", (50, 100))])
    opposite = torch.zeros(5000)
    opposite[torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:500]] = 100.0

    def given(rank: int, step: int) -> torch.Tensor:
        vector = gradient(layout, rank, step) * 0.1 + opposite * (1 if rank else -1)
        vector[list(places)] += 5.0
        return vector

    mean = train(Sketch(density=0.01, rows=5, width=6.0), layout, 2, 1, given)[0].means[0]
    assert set(places) <= set(mean.nonzero().flatten().tolist())
    top = torch.stack([given(rank, 0) for rank in range(2)]).abs().topk(50).indices
    assert len(set(places) - set(top.flatten().tolist())) >= 0.8 * len(places)


def test_no_step_forgets_an_element_for_good() -> None:
    """Buckets are drawn anew, so that what is hidden once is found later: all of a constant gradient gets through."""
    layout = Layout.of([("w", (20, 50))])
    seen = train(Sketch(density=0.02), layout, 1, 200, lambda *_: gradient(layout, 0, 0))[0]
    through = sum(mean.double() for mean in seen.means) / 200
    assert (through - gradient(layout, 0, 0)).norm() <= 0.3 * gradient(layout, 0, 0).norm()
    early, late = (float(seen.residuals[step].norm()) for step in (99, 199))
    assert late <= 1.3 * early


@pytest.mark.parametrize("scale", [0.0, 1e-42, 3e38])
def test_extreme_values(scale: float) -> None:
    ranks = train(Sketch(density=0.01), LAYOUT, 1, 1, lambda *_: gradient(LAYOUT, 0, 0).sign() * scale)
    assert (ranks[0].means[0] + ranks[0].residuals[0]).equal(gradient(LAYOUT, 0, 0).sign() * scale)


def test_steady_state_allocates_nothing_large() -> None:
    layout = Layout.of([("w", (1024, 2048))])
    plan = Sketch().plan(layout, 10, World(LocalCollective(), CPU, Meter(CPU)), {})
    vector, out = gradient(layout, 0, 0), torch.zeros(layout.numel)
    plan.mean(vector, out, torch.zeros(10), 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        plan.mean(vector, out, torch.zeros(10), 2)
    assert max(event.cpu_memory_usage for event in profiler.events()) <= 1 << 20


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"density": 0.0},
            {"density": 1.1},
            {"density": "1"},
            {"rows": 2},
            {"rows": 17},
            {"rows": 0},
            {"rows": True},
            {"rows": 3.0},
        ),
        *({"width": 0}, {"width": math.inf}, {"candidates": 0.5}, {"candidates": math.nan}),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=rf"Sketch\({name}=.*must be"):
        Sketch(**settings)
