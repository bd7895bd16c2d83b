"""Loops for floats of N bits, and for planes, do what tensor operations do, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.codecs.packing.planes import Planes, code_bytes, code_dtype
from lightning_compress.codecs.quantize.formats import build
from lightning_compress.codecs.quantize.minifloat import Coder
from tests.helpers.table import table

pytest.importorskip("numba")

from lightning_compress.codecs.packing import planes_numba
from lightning_compress.codecs.quantize import minifloat_numba as loops

BITS = [*range(2, 17), 32]
LARGEST = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.17e-38, -1.17e-38, LARGEST, -LARGEST, np.inf, -np.inf, 2.0**127, -(2.0**127)]
modest = settings(deadline=None, derandomize=True, max_examples=300)
floats = st.floats(allow_nan=False, width=32) | st.sampled_from(SPECIAL)


@st.composite
def rows(draw):
    """Values of any kind, of one magnitude, of few kinds, or all the same; and a setting."""
    bits = draw(st.sampled_from(BITS))
    count = draw(st.integers(1, 70))
    kind = draw(st.sampled_from(["any", "few", "same", "normal"]))
    if kind == "normal":
        random = np.random.default_rng(draw(st.integers(0, 1000)))
        scale = np.float32(10.0 ** draw(st.integers(-44, 37)))
        values = (random.standard_normal(count).astype(np.float32) * scale).astype(np.float32)
    else:
        pool = draw(st.lists(floats, min_size=1, max_size={"any": count, "few": 4, "same": 1}[kind]))
        values = np.array([pool[index % len(pool)] for index in range(count)], np.float32)
    return bits, draw(st.integers(0, min(bits - 1, 23))), values, draw(st.booleans())


def pattern(end: torch.Tensor) -> np.int32:
    return np.int32(end.view(torch.int32).item())


@modest
@given(rows())
def test_codes_and_values(given):
    bits, mantissa, values, nearest = given
    tensor = torch.from_numpy(values.copy())[None]
    low, high = tensor.amin(1).clamp_(max=0).add_(0.0), tensor.amax(1).clamp_(min=0).add_(0.0)
    formats = build(bits, mantissa, low, high, nearest)
    work, count = Coder(bits, len(values), tensor.device), len(values)
    rounded, kept = work.encode(torch.clamp(tensor, formats.lowest, formats.highest), formats)
    wanted = work.codes(count)[:count].numpy().copy()
    sent = (rounded * kept)[0].numpy()
    rest = tensor.clone().addcmul_(rounded, kept, value=-1)[0].numpy()

    upper, lower = loops.ends(values)
    assert [upper, loops.negated(lower)] == [pattern(high), pattern(low)]
    form = loops.fit(bits, mantissa, upper, lower, nearest)
    fields = (formats.shift, formats.half, formats.below, formats.positive, formats.last)
    assert list(form) == [int(field) for field in fields]
    for kind, left in ((loops.SAME, values), (loops.ROUNDED, sent + 0.0), (loops.REST, rest)):
        row, codes = values.copy(), np.full(count, 77, np.uint32)
        loops.encode(row, codes, form, kind)
        assert np.array_equal(codes, wanted)
        assert (row + 0.0 if kind == loops.ROUNDED else row).tobytes() == left.tobytes()


@modest
@given(
    setting=st.sampled_from(BITS).flatmap(lambda bits: st.tuples(st.just(bits), st.integers(-3, 40))),
    ends=st.tuples(*[st.integers(-(2**31), 2**31 - 1) | st.integers(0x3F000000, 0x40000000)] * 2),
    weight=st.sampled_from([1.0, 1 / 3, 0.125, -0.7]),
    seed=st.integers(0, 1000),
    count=st.integers(1, 70),
    nearest=st.booleans(),
)
def test_decoding_of_any_bytes(setting, ends, weight, seed, count, nearest):
    (bits, mantissa), random = setting, np.random.default_rng(seed)
    low, high = torch.tensor(ends, dtype=torch.int64).to(torch.int32).view(torch.float32).split(1)
    formats, work = build(bits, mantissa, low, high, nearest), Coder(bits, count, low.device)
    codes = random.integers(0, 1 << bits, count)
    codes[random.random(count) < 0.2] = 0
    codes[random.random(count) < 0.2] = min(int(formats.positive) + 1, (1 << bits) - 1)
    work.codes(count)[:count] = torch.from_numpy(codes).to(code_dtype(bits))
    wanted = torch.from_numpy(random.choice(np.array([0.0, -0.0, 1.5, -1e-40], np.float32), count))[None]
    out = wanted[0].numpy().copy()
    wanted.addcmul_(*work.decode((1, count), formats), value=weight)
    form = loops.fit(bits, mantissa, pattern(high), pattern(-low), nearest)
    loops.decode(codes.astype(np.uint32), out, form, weight)
    assert out.tobytes() == wanted[0].numpy().tobytes()


@table("count", [1, 7, 8, 16, 31, 72, 100])
@table("bits", [1, *BITS])
def test_planes(bits, count):
    """After codes that stay as they are; their number is no multiple of 8."""
    random, before, after = np.random.default_rng(count), 24, 41 - count % 8
    total = before + count + after
    codes = random.integers(0, 1 << bits, total)
    body = torch.zeros(code_bytes(total, bits), dtype=torch.uint8)
    planes, padded = Planes(bits, total), torch.zeros(-(-total // 8) * 8, dtype=code_dtype(bits))
    padded[:total] = torch.from_numpy(codes)
    planes.write(padded, slice(0, total), body)
    wanted, part = body.numpy().copy(), slice(before, before + count)
    again = np.full_like(codes, 77, np.uint32)[part]
    planes_numba.unpack(again, wanted, planes.table, before)
    assert np.array_equal(again, codes[part])
    for _, width, start in planes.table:
        body[start + before * width // 8 : start + -(-total * width // 8)] = 255
    found = body.numpy()
    later = codes[before + count :].astype(again.dtype)
    planes_numba.pack(np.concatenate([again, later]), found, planes.table, before)
    assert np.array_equal(found, wanted)
