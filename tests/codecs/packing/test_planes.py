"""Codes in planes, the same by lanes and by torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.codecs.packing import planes as packing
from tests.helpers.table import table
from tests.reference.codecs import unpacked


@pytest.mark.parametrize("bits", range(1, 9))
@settings(deadline=None, derandomize=True, max_examples=30)
@given(numel=st.integers(1, 3000), seed=st.integers(0, 99))
def test_round_trip(bits: int, numel: int, seed: int) -> None:
    padded = -(-numel // 8) * 8
    codes = torch.randint(0, 256, (padded,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    codes[numel:] = 0
    back, twin = torch.full((2, padded), 0xAB, dtype=torch.uint8)
    total = 0
    for low, width in packing.planes(bits):
        size = packing.code_bytes(numel, width)
        packed, other = torch.full((2, size), 0xAB, dtype=torch.uint8)
        packing.pack_plane(codes, low, width, packed)
        packing.unpack_plane(packed, low, width, back)
        if width < 8:
            packing.pack_plane_torch(codes, low, width, other)
            packing.unpack_plane_torch(other, low, width, twin)
            assert torch.equal(packed, other)
            assert torch.equal(back, twin)
        total += size
    assert torch.equal(back[:numel], codes[:numel] & (2**bits - 1))
    assert numel * bits <= 8 * total <= numel * bits + 8 * len(packing.planes(bits))


def test_first_codes_lowest() -> None:
    packed = torch.zeros(4, dtype=torch.uint8)
    packing.pack_plane(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8), 0, 4, packed)
    assert packed.tolist() == [0x21, 0x43, 0x65, 0x87]


@table("bits", [*range(1, 17), 32])
@table("count", [1, 7, 8, 1000])
def test_codes_are_packed_truly(bits: int, count: int) -> None:
    padded = -(-count // 8) * 8
    codes = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(bits))
    codes[0] = 2**bits - 1
    written = torch.zeros(padded, dtype=packing.code_dtype(bits))
    written[:count] = codes
    planes = packing.Planes(bits, count)
    body = torch.full((planes.size,), 0xAB, dtype=torch.uint8)
    back = torch.full_like(written, 77)
    for start in range(0, count, 504):  # piece by piece
        elements = slice(start, min(start + 504, count))
        window = slice(start, -(-elements.stop // 8) * 8)
        planes.write(written[window].clone(), elements, body)
    assert unpacked(bytes(body.tolist()), count, bits) == codes.tolist()
    for start in range(0, count, 504):
        elements = slice(start, min(start + 504, count))
        planes.read(back[start : -(-elements.stop // 8) * 8], elements, body)
    assert torch.equal(back[:count].long(), codes)
    assert planes.size == packing.code_bytes(count, bits)
    assert count * bits <= 8 * planes.size < count * bits + 8 * len(packing.planes(bits))
