"""The properties of floats that are made for a range."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.codecs.quantize.formats import Formats, build
from lightning_compress.codecs.quantize.minifloat import Coder
from tests.helpers.table import table
from tests.reference.codecs import range_formats

RANGES = [(-1.0, 1.0), (-0.5, 0.5), (-1.0, 3.0), (-0.1, 0.007), (0.0, 2.0), (-5.0, 0.0), (-1e-12, 1.0), (-1e30, 1e30)]
FORMATS = [(2, 0), (3, 0), (4, 1), (8, 3), (8, 4), (8, 7), (10, 4), (10, 6), (13, 5), (16, 10)]
every = table("bits, mantissa, low, high", [(*form, *ends) for form in FORMATS for ends in RANGES])
modest = settings(deadline=None, derandomize=True, max_examples=200)


def make(bits: int, mantissa: int, low: float, high: float) -> Formats:
    return build(bits, mantissa, torch.tensor([low]), torch.tensor([high]))


def encode(values: torch.Tensor, formats: Formats, nearest: bool = True) -> torch.Tensor:
    """Codes of float32 ``[R, n]``: to nearest (half away from zero) or cut off, saturating at the range's ends."""
    work = Coder(formats.bits, values.numel(), values.device)
    half = (-formats.mask >> 1) * nearest
    work.encode(torch.clamp(values, formats.lowest, formats.highest), replace(formats, half=half))
    return work.codes(values.numel())[: values.numel()].view(values.shape).clone()


def decode(codes: torch.Tensor, formats: Formats) -> torch.Tensor:
    """Values of whole numbers ``[R, n]``; numbers that are no codes count as the last one."""
    work = Coder(formats.bits, codes.numel(), codes.device)
    work.codes(codes.numel())[: codes.numel()].copy_(codes.reshape(-1))
    one, other = work.decode(codes.shape, formats)
    return one * other


def there_and_back(values: torch.Tensor, formats: Formats, nearest: bool = True) -> torch.Tensor:
    return decode(encode(values, formats, nearest), formats)


def spread(low: float, high: float) -> torch.Tensor:
    """Ascending values of the range, over many binades."""
    scales = torch.logspace(-8, 0, 4001)
    return torch.cat([low * scales.flip(0), torch.zeros(1), high * scales])[None]


@every
def test_encode_inverts_decode_on_all_codes(bits: int, mantissa: int, low: float, high: float) -> None:
    formats = make(bits, mantissa, low, high)
    count = int(formats.positive + formats.negative) + 1
    assert count <= 2**bits
    codes = torch.arange(count)[None]
    values = decode(codes, formats)
    assert len(values.unique()) == count
    for nearest in (False, True):
        assert torch.equal(encode(values, formats, nearest).long(), codes)


@every
def test_the_base_is_the_smallest_that_has_room(bits: int, mantissa: int, low: float, high: float) -> None:
    for nearest in (False, True):
        formats = build(bits, mantissa, torch.tensor([low]), torch.tensor([high]), nearest)
        found = int(formats.base), int(formats.positive), int(formats.negative)
        assert found == range_formats(bits, mantissa, low, high, nearest)


@modest
@given(
    bits=st.integers(2, 16),
    share=st.floats(0, 1),
    ends=st.tuples(*[st.floats(0, 2.0**126, width=32, allow_subnormal=True)] * 2),
    near=st.none() | st.integers(-1, 1),
    nearest=st.booleans(),
)
def test_the_base_is_the_smallest_for_any_range(
    bits: int, share: float, ends: tuple[float, float], near: int | None, nearest: bool
) -> None:
    mantissa = round(share * min(bits - 1, 23))
    low, high = ends
    if near is not None:  # one end just where the other's codes run out
        pattern = int(np.float32(high).view(np.uint32)) - ((2**bits - 2 + near) << (23 - mantissa))
        low = float(np.uint32(max(pattern, 0)).view(np.float32))
    formats = build(bits, mantissa, torch.tensor([-low]), torch.tensor([high]), nearest)
    found = int(formats.base), int(formats.positive), int(formats.negative)
    assert found == range_formats(bits, mantissa, -low, high, nearest)
    assert found[1] + found[2] < 2**bits


@every
def test_monotone_and_idempotent(bits: int, mantissa: int, low: float, high: float) -> None:
    formats = make(bits, mantissa, low, high)
    values = spread(low, high)
    for nearest in (False, True):
        back = there_and_back(values, formats, nearest)
        assert (back.diff() >= 0).all()
        assert torch.equal(there_and_back(back, formats, nearest), back)


@every
def test_relative_error(bits: int, mantissa: int, low: float, high: float) -> None:
    formats = make(bits, mantissa, low, high)
    values = spread(low, high)
    inside = (values.abs() >= formats.eps) & (values >= formats.lowest) & (values <= formats.highest)
    for nearest in (False, True):
        error = (there_and_back(values, formats, nearest).double() - values).abs()
        assert (error <= 2.0 ** -(mantissa + nearest) * values.abs())[inside].all()
        small = (values.abs() < formats.eps) & (values >= formats.lowest) & (values <= formats.highest)
        assert (error <= formats.eps)[small].all()


@every
def test_ends_are_values_and_all_beyond_saturates(bits: int, mantissa: int, low: float, high: float) -> None:
    formats = make(bits, mantissa, low, high)
    for end, found in ((high, formats.highest), (low, formats.lowest)):
        cut = np.float32(end).view(np.uint32) >> (23 - mantissa) << (23 - mantissa)
        expected = float(np.uint32(cut).view(np.float32))
        assert float(found) == (expected if abs(expected) >= float(formats.eps) else 0.0)
        if found:
            beyond = torch.tensor([[end, 2 * end, 3e38 if end > 0 else -3e38]])
            assert torch.equal(there_and_back(beyond, formats), found.expand(1, 3))


def test_zeros_and_a_side_without_codes() -> None:
    formats = make(8, 3, -1.0, 1.0)
    assert encode(torch.tensor([[0.0, -0.0]]), formats).tolist() == [[0, 0]]
    assert decode(torch.tensor([[0]]), formats).view(torch.int32).tolist() == [[0]]
    formats = make(8, 3, 0.0, 1.0)
    assert (int(formats.positive), int(formats.negative)) == (255, 0)
    assert there_and_back(torch.tensor([[-0.5, -1e-30, 0.5]]), formats).tolist() == [[0, 0, 0.5]]
    assert not there_and_back(torch.tensor([[1.0, -1.0]]), make(8, 3, 0.0, 0.0)).any()


def test_symmetry_and_freedom_of_scale() -> None:
    values = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    formats = make(8, 3, -4.0, 4.0)
    assert torch.equal(there_and_back(-values, formats), -there_and_back(values, formats))
    larger = make(8, 3, -4.0 * 2**20, 4.0 * 2**20)
    assert int(larger.base - formats.base) == 20 * 2**3
    assert torch.equal(encode(values * 2**20, larger), encode(values, formats))


def test_32_bits_lose_nothing() -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = torch.from_numpy(np.append(random[np.abs(random) <= 1], [1e-45, -1e-45, 1, -1]).astype(np.float32))[None]
    for nearest in (False, True):
        assert torch.equal(there_and_back(values, make(32, 23, -1.0, 1.0), nearest), values)


@pytest.mark.parametrize(
    ("bits", "mantissa", "end", "eps", "error"),
    [
        (10, 6, 0.5, 2.0e-3, 0.0053),
        (10, 5, 0.5, 8.1e-6, 0.0066),
        (10, 4, 0.5, 1.3e-10, 0.0133),
        (8, 4, 1.0, 4.4e-3, 0.0185),
        (8, 3, 1.0, 1.9e-5, 0.0264),
    ],
)
def test_measured_errors(bits: int, mantissa: int, end: float, eps: float, error: float) -> None:
    formats = make(bits, mantissa, -end, end)
    values = 0.05 * torch.randn(1, 200_000, generator=torch.Generator().manual_seed(1))
    assert float(formats.eps) == pytest.approx(eps, rel=0.1)
    found = (there_and_back(values, formats) - values).norm() / values.norm()
    assert float(found) == pytest.approx(error, rel=0.1)
