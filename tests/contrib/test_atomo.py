"""What is particular to ATOMO: probabilities, unbiasedness, variance, parts of matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_compress.collectives import Collective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.atomo import ATOMO, sample
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.exchanges import AllGather
from lightning_compress.exchanges.message import Section
from tests.codecs.helpers import CPU, KINDS, make
from tests.reference import lowrank

LAYOUT = Layout.of(
    [("bias", (30,)), ("wide", (12, 5, 8)), ("thin", (800, 1)), ("tall", (50, 20)), ("square", (16, 16))]
)
MATRICES = {"wide": (30, 12, 40), "tall": (1310, 50, 20), "square": (2310, 16, 16)}
SPECTRA = [[5.0, 3, 2, 1, 1], [100, 1, 1, 1, 1], [7, 6, 5, 0, 0], [1, 1, 1, 1, 1], [4, 0, 0, 0, 0], [9, 8, 1e-9, 0, 0]]


def trip(vector: torch.Tensor, rank: int, key: int, layout: Layout = LAYOUT) -> tuple[torch.Tensor, torch.Tensor]:
    """What is sent, and what stays."""
    plan = ATOMO(rank).plan(layout, CPU)
    residual, message = vector.clone(), torch.full((plan.message_size,), 0xAB, dtype=torch.uint8)
    plan.encode(residual, message, key)
    decoded = torch.full_like(vector, torch.nan)
    plan.decode(message[None], decoded, 1.0, False)
    return decoded, residual


def matrix(vector: torch.Tensor, name: str) -> np.ndarray:
    start, rows, columns = MATRICES[name]
    return vector[start : start + rows * columns].view(rows, columns).double().numpy()


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("values", [*SPECTRA, [*np.geomspace(1, 1e-6, 40)], [*np.linspace(2, 1, 60)]])
def test_atoms_are_kept_as_often_as_the_paper_says(values: list[float], rank: int) -> None:
    probabilities = lowrank.atomo_probabilities(values, rank)
    draws, counts = 2000, np.zeros(len(values))
    for i in range(draws):
        chosen, odds = sample(np.array(values, np.float64), rank, (i + 0.5) / draws)
        assert len(set(chosen)) == len(chosen) == min(rank, np.count_nonzero(values))
        np.testing.assert_allclose(odds, [probabilities[place] for place in chosen], rtol=1e-12)
        counts[chosen] += 1
    np.testing.assert_allclose(counts / draws, probabilities, atol=1.01 / draws)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_equals_the_reference(rank: int) -> None:
    random = np.random.default_rng(0)
    vector = make("normal", LAYOUT.numel)
    certain = {"wide": 0, "tall": 1, "square": 5}  # how strong one atom is
    for name, (start, rows, columns) in MATRICES.items():
        low = certain[name] * np.outer(random.standard_normal(rows), random.standard_normal(columns))
        vector[start : start + rows * columns] += torch.from_numpy(low.ravel().astype(np.float32))
    for key in range(10):  # neighbouring atoms are told apart by float32 only so well, and that is no matter
        decoded, residual = trip(vector, rank, key)
        for number, name in enumerate(MATRICES):
            sent = lowrank.atomo(matrix(vector, name), rank, mix(key, number) / 2**64)
            np.testing.assert_allclose(matrix(decoded, name), sent, atol=5e-3)
            np.testing.assert_allclose(matrix(residual, name), matrix(vector, name) - sent, atol=5e-3)
        dense = torch.cat([vector[:30], vector[510:1310]])
        assert torch.cat([decoded[:30], decoded[510:1310]]).equal(dense)


@pytest.mark.parametrize(("rank", "shape"), [(1, (12, 40)), (3, (40, 12))])
def test_right_on_average_with_the_papers_variance(rank: int, shape: tuple[int, int]) -> None:
    vector, draws = make("heavy", 480).clamp(-20, 20), 4000
    layout = Layout.of([("w", shape)])
    total, squares = torch.zeros(480, dtype=torch.float64), 0.0
    for key in range(draws):
        decoded, _ = trip(vector, rank, key, layout)
        total += decoded
        squares += float((decoded.double() - vector).square().sum())
    values = np.linalg.svd(vector.view(shape).double().numpy(), compute_uv=False)
    probabilities = np.array(lowrank.atomo_probabilities(list(values), rank))
    variance = float(np.sum(values**2 * (1 / probabilities - 1)))
    assert squares / draws == pytest.approx(variance, rel=0.1)
    assert (total / draws - vector).norm() <= 4 * np.sqrt(variance / draws)


def test_noise_of_several_ranks_averages_out() -> None:
    layout, draws = Layout.of([("w", (12, 40))]), 100
    vector = make("normal", 480)

    def error(collective: Collective) -> float:
        plan = AllGather().plan([Section(ATOMO(2), layout, 0)], World(collective, CPU, Meter(CPU)))
        mean, squares = torch.empty(480), 0.0
        for key in range(draws):
            plan.mean(vector.clone(), mean, key, torch.tensor(0.0))
            squares += float((mean - vector).square().sum())
        return squares / draws

    values = np.linalg.svd(vector.view(12, 40).double().numpy(), compute_uv=False)
    variance = np.sum(values**2 * (1 / np.array(lowrank.atomo_probabilities(list(values), 2)) - 1))
    assert run_threads(8, error)[0] == pytest.approx(variance / 8, rel=0.1)


@pytest.mark.parametrize("cut", [(0, LAYOUT.numel), (41, LAYOUT.numel - 3), (80, 270), (1320, 1325), (520, 1300)])
@pytest.mark.parametrize("kind", KINDS)
def test_conservation(kind: str, cut: tuple[int, int]) -> None:
    layout = LAYOUT.cut(*cut)
    vector = make(kind, layout.numel, 3)
    for key in range(3):
        decoded, residual = trip(vector, 2, key, layout)
        assert decoded.isfinite().all()
        assert residual.isfinite().all()
        largest = torch.stack([vector, decoded]).abs().max().double()
        assert (decoded.double() + residual - vector).abs().max() <= 2.0**-22 * largest


def test_whole_rows_of_a_part_are_a_matrix() -> None:
    layout = LAYOUT.cut(30 + 17, 30 + 443)  # 23 elements, 10 rows of 40, 3 elements
    vector = make("normal", layout.numel)
    plan = ATOMO(2).plan(layout, CPU)
    assert plan.message_size == 4 * (23 + 2 * (10 + 40) + 3)
    decoded, residual = trip(vector, 2, 0, layout)
    assert decoded[:23].equal(vector[:23])
    assert decoded[-3:].equal(vector[-3:])
    sent = lowrank.atomo(vector[23:-3].view(10, 40).double().numpy(), 2, mix(0, 0) / 2**64)
    np.testing.assert_allclose(decoded[23:-3].view(10, 40).numpy(), sent, atol=1e-4)
    assert not residual[:23].any()


@pytest.mark.parametrize("kind", ["zeros", "denormal", "one-hot"])
def test_few_or_no_atoms(kind: str) -> None:
    """Slots without an atom are zero, and a matrix of one atom is sent as it is, whatever is drawn."""
    layout = Layout.of([("w", (20, 30))])
    vector = make(kind, 600)
    decoded, residual = trip(vector, 3, 1, layout)
    torch.testing.assert_close(decoded, vector if kind == "one-hot" else torch.zeros(600), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(residual, torch.zeros(600) if kind == "one-hot" else vector, rtol=0, atol=1e-6)


def test_messages_are_summed() -> None:
    plan = ATOMO(2).plan(LAYOUT, CPU)
    wide = torch.zeros(3, plan.message_size + 24, dtype=torch.uint8)
    rows, singles = wide[:, 8 : 8 + plan.message_size], []
    for seed, row in enumerate(rows):
        plan.encode(make("normal", LAYOUT.numel, seed), row, seed)
        singles.append(torch.zeros(LAYOUT.numel))
        plan.decode(row[None], singles[-1], 1.0, False)
    out = torch.ones(LAYOUT.numel)
    plan.decode(rows, out, 0.25, True)
    torch.testing.assert_close(out, 0.25 * sum(singles) + 1, rtol=1e-6, atol=1e-5)


def test_any_bytes_stay_inside() -> None:
    plan = ATOMO(2).plan(LAYOUT, CPU)
    messages = torch.randint(
        0, 256, (2, plan.message_size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    guarded = torch.full((LAYOUT.numel + 200,), 5.0)
    plan.decode(messages, guarded[100:-100], 1.0, False)
    assert (guarded[:100] == 5).all()
    assert (guarded[-100:] == 5).all()


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "2"])
def test_wrong_settings_are_refused(rank: object) -> None:
    with pytest.raises(ValueError, match=r"ATOMO\(rank=.*must be an integer, at least 1"):
        ATOMO(rank)
