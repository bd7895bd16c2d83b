"""QSGD and Rotated: levels by the rules, means, and the papers' bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_compress.codecs import QSGD, Rotated
from lightning_compress.codecs.quantize.rotated import hadamard
from lightning_compress.contrib.codecs.natural import Natural
from tests.codecs.helpers import KINDS, make, trip, vectors
from tests.reference import codecs as reference

modest = settings(deadline=None, derandomize=True, max_examples=25)


def check_levels(
    levels: np.ndarray, numbers: np.ndarray, shift: float, key: int, doubt: float, share: float = 0.0
) -> None:
    """Every level is the one that the random number picks; near the border between two, either."""
    chances = (np.array(reference.random16(key, len(numbers), share)) + 32768.5) / 65536
    exact = numbers - shift + chances
    wrong = levels != np.floor(exact)
    assert (np.abs(exact - np.round(exact))[wrong] <= doubt).all()
    assert (np.abs(levels - np.floor(exact)) <= 1).all()


@pytest.mark.parametrize("codec", [QSGD(), QSGD(2, 64), QSGD(8, 72, "l2"), QSGD(3, 128, "l2")], ids=repr)
@modest
@given(vector=vectors())
def test_qsgd_equals_the_reference(codec: QSGD, vector: torch.Tensor) -> None:
    decoded, _, message = trip(codec, vector, key=9)
    bucket = min(codec.bucket, -(-len(vector) // 8) * 8)
    norms, levels = reference.levels(message, -(-len(vector) // bucket), len(vector), codec.bits)
    wanted, numbers = reference.qsgd_numbers(vector.numpy(), codec.bits, bucket, codec.norm)
    np.testing.assert_array_equal(norms, wanted)
    check_levels(levels, numbers, 0.0, 9, 1e-4)
    scale = np.repeat(norms.astype(np.float64), bucket)[: len(vector)]
    np.testing.assert_allclose(decoded.numpy(), levels * scale / (2 ** (codec.bits - 1) - 1), rtol=3e-7)


@pytest.mark.parametrize("codec", [Rotated(), Rotated(2, 64), Rotated(8, 128), Rotated(3, 2048)], ids=repr)
@modest
@given(vector=vectors())
def test_rotated_equals_the_reference(codec: Rotated, vector: torch.Tensor) -> None:
    numel = len(vector)
    decoded, _, message = trip(codec, vector, key=9)
    block = min(codec.block, max(8, 2 ** math.ceil(math.log2(numel))))
    places = np.array(reference.rotated_blocks(numel, block))
    norms, levels = reference.levels(message, len(places), places.size, codec.bits)
    matrix = reference.rotation(block)
    padded = np.zeros(places.size)
    padded[:numel] = vector.numpy()
    coefficients = padded[places] @ matrix.T / block
    largest = np.abs(coefficients).max(axis=1)
    top = (2**codec.bits - 1) / 2
    sent = largest >= top * 2.0**-111
    np.testing.assert_allclose(norms, np.where(sent, largest, 0), rtol=1e-5)
    numbers = np.zeros(places.size)
    numbers[places] = np.divide(coefficients * top, largest[:, None], where=sent[:, None], out=0 * coefficients)
    check_levels(levels, numbers, 0.5, 9, 1e-2)
    received = np.zeros(places.size)
    received[places] = ((levels[places] + 0.5) * norms[:, None].astype(np.float64) / top) @ matrix
    np.testing.assert_allclose(decoded, received[:numel], rtol=0, atol=1e-6 * block * largest.max())


def spread(codec: object, vector: torch.Tensor, draws: int) -> tuple[float, float]:
    """Relative squared error of one draw, on average, and of the draws' mean."""
    square = vector.double().square().sum()
    total, errors = torch.zeros(len(vector), dtype=torch.float64), 0.0
    for key in range(draws):
        decoded = trip(codec, vector, key)[0].double()  # type: ignore[arg-type]
        total += decoded
        errors += float((decoded - vector).square().sum() / square)
    return errors / draws, float((total / draws - vector).square().sum() / square)


UNBIASED = [QSGD(2, 64), QSGD(), QSGD(4, 512, "l2"), QSGD(8), Rotated(2), Rotated(), Rotated(8, 64), Natural()]


@pytest.mark.parametrize("kind", ["normal", "heavy", "one-hot", "ties", "lopsided"])
@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_unbiased(codec: object, kind: str) -> None:
    draws = 200
    single, mean = spread(codec, make(kind, 2048), draws)
    few = kind in ("heavy", "lopsided")  # a handful of elements makes up the error, which then varies itself
    assert mean <= (12 if few else 2) * single / draws + 1e-9


@pytest.mark.parametrize("kind", ["normal", "heavy", "one-hot", "constant", "ties"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_keeps_the_papers_bounds(bits: int, kind: str) -> None:
    n, s, buckets = 512, 2 ** (bits - 1) - 1, 128
    vector = make(kind, n * buckets, 3)
    decoded, residual, _ = trip(QSGD(bits, n, "l2"), vector)
    error = residual.double().view(buckets, n).square().sum(1) / vector.double().view(buckets, n).square().sum(1).clamp(
        min=1e-30
    )
    assert error.mean() <= 1.1 * min(n / s**2, math.sqrt(n) / s)
    assert decoded.count_nonzero() / buckets <= 1.1 * s * (s + math.sqrt(n))


def test_measured_variance_and_sizes() -> None:
    vector = make("normal", 512 * 512)
    for bits, error in ((2, 17.2), (4, 1.57), (8, 0.0052)):  # as the same rules gave elsewhere, L2 norm
        _, residual, _ = trip(QSGD(bits, 512, "l2"), vector)
        assert residual.square().sum() / vector.square().sum() == pytest.approx(error, rel=0.25)
    assert 8 * len(trip(QSGD(), vector)[2]) / len(vector) == 4.0625
    assert 8 * len(trip(Rotated(), vector)[2]) / len(vector) == 4.125
    assert 8 * len(trip(Natural(), vector)[2]) / len(vector) == 8 + 8 / 1024
    _, residual, _ = trip(Natural(), vector)
    assert residual.square().sum() / vector.square().sum() == pytest.approx(0.0816, rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_natural_keeps_an_eighth(kind: str) -> None:
    vector = make(kind, 1 << 16)
    single, _ = spread(Natural(), vector, 3) if vector.double().square().sum() > 1e-30 else (0.0, 0.0)
    assert single <= 1.05 / 8


def test_numbers_on_a_level_stay_as_they_are() -> None:
    vector = torch.arange(-7, 8).float().repeat(100)
    for key in range(20):
        decoded, residual, _ = trip(QSGD(4, 1504), vector, key)
        assert torch.equal(decoded, vector)
        assert not residual.any()
        powers = 2.0 ** vector.abs() * vector.sign()
        assert torch.equal(trip(Natural(), powers, key)[0], powers)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, 2.0**-99, 1e-45, 0.0, 1.0])
@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_extremes_are_finite_and_conserved(codec: object, value: float) -> None:
    vector = torch.full((1000,), value) * torch.tensor([1.0, -1.0]).repeat(500)
    for key in range(3):
        decoded, residual, _ = trip(codec, vector, key)  # type: ignore[arg-type]
        assert decoded.isfinite().all()
        torch.testing.assert_close(decoded.double() + residual.double(), vector.double(), rtol=2e-7, atol=1e-44)


@pytest.mark.parametrize("bits", [2, 4, 5])
def test_rotation_helps_where_few_elements_are_large(bits: int) -> None:
    heavy, one_hot = make("heavy", 1 << 16), make("one-hot", 1 << 16)
    rotated = spread(Rotated(bits), heavy, 3)[0]
    assert rotated < 0.5 * spread(QSGD(bits, 1024), heavy, 3)[0]
    assert rotated < 0.5 * spread(QSGD(bits, 1024, "l2"), heavy, 3)[0]
    assert spread(Rotated(bits), one_hot, 3)[0] < 1e-6  # all coefficients are as large: the outermost numbers


@pytest.mark.parametrize("shape", [(1, 8, 3), (1, 1024, 1), (5, 64, 16), (2, 512, 16)])
def test_the_transform_is_its_own_inverse(shape: tuple[int, int, int]) -> None:
    matrices = make("normal", math.prod(shape)).view(shape)
    once = hadamard(matrices.clone()) / shape[1]
    assert (hadamard(once) - matrices).abs().max() <= 1e-6 * matrices.abs().max()


BAD = [
    (QSGD, {"bits": 1}, "bits must be an integer from 2 to 8"),
    (QSGD, {"bits": 9}, "bits must be an integer from 2 to 8"),
    (QSGD, {"bits": 4.0}, "bits must be an integer from 2 to 8"),
    (QSGD, {"bucket": 100}, "multiple of 8, at least 64; try 512"),
    (QSGD, {"norm": "l1"}, "norm must be one of 'max', 'l2'"),
    (Rotated, {"bits": 0}, "bits must be an integer from 2 to 8"),
    (Rotated, {"block": 1000}, "power of two from 64 to 8192"),
    (Rotated, {"block": 16384}, "power of two from 64 to 8192"),
    (Natural, {"bucket": 12}, "multiple of 8, at least 64; try 1024"),
]


@pytest.mark.parametrize(("codec", "arguments", "words"), BAD)
def test_bad_settings(codec: type, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        codec(**arguments)
