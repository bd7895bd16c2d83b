"""TernGrad: its rules, its mean, its count of zeros, and the bytes of its numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_compress.contrib.codecs import ternary
from lightning_compress.contrib.codecs.ternary import RUN, pack_digits, unpack_digits
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.core.layout import Layout
from tests.codecs.helpers import CPU, layout, make, trip, vectors
from tests.reference import ternary as reference

CODECS = [TernGrad(), TernGrad(packing="base3"), TernGrad(None), TernGrad(1.0, "base3")]


def ranges(numel: int) -> list[tuple[int, int]]:
    return [(segment.offset, segment.end) for segment in layout(numel).segments if segment.numel]


def clipped(codec: TernGrad, vector: torch.Tensor) -> torch.Tensor:
    """The gradient that is sent on average."""
    parts = ranges(len(vector))
    out = vector.double()
    for (start, stop), limit in zip(parts, reference.terngrad_limits(vector.numpy(), codec.clip, parts), strict=True):
        out[start:stop].clamp_(-limit, limit)
    return out


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(deadline=None, derandomize=True, max_examples=15)
@given(vector=vectors())
def test_equals_the_reference(codec: TernGrad, vector: torch.Tensor) -> None:
    compare(codec, vector)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_equals_the_reference_over_several_runs(codec: TernGrad) -> None:
    compare(codec, make("normal", RUN + 12_343))


def test_longer_runs_than_a_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ternary, "chunk_size", lambda device: 3 * RUN)  # what an accelerator has
    compare(TernGrad(), make("normal", 4 * RUN + 12_343))


def compare(codec: TernGrad, vector: torch.Tensor) -> None:
    decoded, residual, message = trip(codec, vector, key=9)
    parts = ranges(len(vector))
    limits = reference.terngrad_limits(vector.numpy(), codec.clip, parts)
    scales, numbers = reference.parse_terngrad(message, len(parts), len(vector), codec.packing)
    wanted = [limit if limit >= 2.0**-111 else 0.0 for limit in limits]
    np.testing.assert_allclose(scales, np.array(wanted, np.float32), rtol=2e-7)
    exact = reference.terngrad_chances(vector.numpy(), limits, [float(scale) for scale in scales], parts, key=9)
    wrong = numbers != np.floor(exact)
    assert (np.abs(exact - np.round(exact))[wrong] <= 1e-5).all()
    assert set(numbers) <= {-1, 0, 1}
    each = np.concatenate([np.full(stop - start, scale) for (start, stop), scale in zip(parts, scales, strict=True)])
    np.testing.assert_array_equal(decoded.numpy(), numbers * each)
    np.testing.assert_array_equal(residual.numpy(), vector.numpy() - decoded.numpy())


@pytest.mark.parametrize("kind", ["normal", "heavy", "one-hot", "constant", "ties", "negative"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_unbiased_for_the_clipped_gradient(codec: TernGrad, kind: str) -> None:
    vector, draws = make(kind, 4001), 300
    wanted = clipped(codec, vector)
    plan = codec.plan(layout(4001), CPU)
    message, decoded = torch.zeros(1, plan.message_size, dtype=torch.uint8), torch.zeros(4001)
    total, zeros = torch.zeros(4001, dtype=torch.float64), 0
    for key in range(draws):
        plan.encode(vector.clone(), message[0], key)
        plan.decode(message, decoded, 1.0, False)
        total += decoded
        zeros += int((decoded == 0).sum())
    scales = torch.cat([wanted[start:stop].abs().amax().expand(stop - start) for start, stop in ranges(4001)])
    variance = (scales * wanted.abs() - wanted.square()).clamp(min=0)
    error = (total / draws - wanted).abs()
    rare = 6 * scales / draws  # a chance of 1 in 10,000 may come up a few times
    assert (error <= 5.5 * (variance / draws).sqrt() + rare).all()
    assert error.square().sum() <= 1.5 * variance.sum() / draws + 1e-9
    chances = wanted.abs() / scales.clamp(min=1e-30)  # of not being 0
    spread = math.sqrt(float((chances * (1 - chances)).sum()) * draws)
    assert abs(4001 * draws - zeros - float(chances.sum()) * draws) <= 4 * spread + 4001 * draws * 2.0**-16
    assert clipped(TernGrad(None), vector).equal(vector.double())
    assert kind != "normal" or codec.clip is None or wanted.ne(vector).any()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_parameters_have_scales_of_their_own(codec: TernGrad) -> None:
    vector = make("normal", 3000)
    vector[:1500] *= 1e-6
    vector[1500:2500] = 0  # a whole parameter
    decoded, residual, _ = trip(codec, vector)
    assert not decoded[1500:2500].any()
    assert not residual[1500:2500].any()
    for part in (decoded[:1500], decoded[2500:]):
        values = part.abs().unique()
        assert len(values) == 2
        assert values[0] == 0
    assert decoded[:1500].abs().max() < 1e-5 < 0.1 < decoded[2500:].abs().max()


@pytest.mark.parametrize(("numel", "clips"), [(63, False), (64, True)])
def test_few_or_equal_elements_are_not_clipped(numel: int, clips: bool) -> None:
    plan = TernGrad().plan(Layout.of([("a", (numel,))]), CPU)
    vector = torch.full((numel,), 0.01)
    vector[0] = 1.0
    message = torch.zeros(plan.message_size, dtype=torch.uint8)
    plan.encode(vector.clone(), message, 0)
    assert (message[:4].view(torch.float32) < 1) == clips
    plan.encode(torch.full((numel,), 0.1), message, 0)
    assert message[:4].view(torch.float32) == 0.1


@pytest.mark.parametrize("numel", [1, 2, 3, 4, 5, 6, 9, 160, 161, RUN + 1, 2 * RUN + 7])
def test_sizes(numel: int) -> None:
    header = -(-4 * len(ranges(numel)) // 16) * 16
    for packing, most in (("2bit", 4), ("base3", 5)):
        plan = TernGrad(packing=packing).plan(layout(numel), CPU)  # type: ignore[arg-type]
        assert plan.message_size == header + math.ceil(numel / most)


@pytest.mark.parametrize(
    ("radix", "digits", "dtype"), [(3, 5, torch.uint8), (5, 13, torch.int32), (63, 5, torch.int32)]
)
@pytest.mark.parametrize("numel", [1, 7, 64, 1000])
def test_digits_come_back(radix: int, digits: int, dtype: torch.dtype, numel: int) -> None:
    codes = torch.randint(0, radix, (numel,), dtype=torch.uint8)
    words = torch.full((-(-numel // digits),), 77, dtype=dtype)
    pack_digits(codes, radix, digits, words)
    assert int(words.max()) < radix**digits
    back = torch.full((numel,), 99, dtype=dtype)
    unpack_digits(words, radix, digits, back)
    assert torch.equal(back.to(torch.uint8), codes)


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, math.inf, "2.5", True])
def test_bad_clip(clip: object) -> None:
    with pytest.raises(ValueError, match=r"number of standard deviations above 0.*try 2\.5"):
        TernGrad(clip)  # type: ignore[arg-type]


def test_bad_packing() -> None:
    with pytest.raises(ValueError, match="packing must be one of '2bit', 'base3'"):
        TernGrad(packing="base4")  # type: ignore[arg-type]
