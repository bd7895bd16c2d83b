"""Each operation of LLVM's vectors does what a few lines of NumPy say."""

import numpy as np
import pytest
import torch

from lightning_compress.codecs.packing.planes import Planes
from tests.helpers.table import table

pytest.importorskip("numba")

from numba import njit

from lightning_compress.codecs.quantize import levels_numba
from lightning_compress.kernels.numba import simd, words

FLOAT, LANES = np.float32, simd.LANES
SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38], FLOAT)
ROW = np.arange(LANES)
kernel = njit(error_model="numpy")  # which is not cached: the cache does not see when an operation has changed


random = table("rng", lambda: map(np.random.default_rng, range(8)))


def numbers(rng, size, special=True):
    """Of all magnitudes; some are special."""
    values = (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 7, size)).astype(FLOAT)
    return np.where(rng.random(size) < 0.3, rng.choice(SPECIAL, size), values) if special else values


def same(found, wanted):
    """Bit by bit, but for which NaN it is."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    nan = np.isnan(wanted) if wanted.dtype == FLOAT else np.zeros(wanted.shape, bool)
    assert np.array_equal(nan, np.isnan(found) if found.dtype == FLOAT else nan)
    assert found[~nan].tobytes() == wanted[~nan].tobytes()


def as_word(booleans):
    return np.packbits(booleans, bitorder="little").view(np.uint32)[0]


def as_booleans(word):
    return np.unpackbits(np.array([word], np.uint32).view(np.uint8), bitorder="little") == 1


@kernel
def _signs(values, index):
    return simd.signs(values, index)


@random
def test_signs(rng):
    values, index = numbers(rng, 100), int(rng.integers(68))
    assert _signs(values, index) == as_word(values[index : index + 32] >= 0)


@kernel
def _nonzero(values, index):
    return simd.nonzero(values, index)


@random
def test_nonzero(rng):
    values, index = numbers(rng, 100), int(rng.integers(68))
    assert _nonzero(values, index) == as_word(values[index : index + 32] != 0)


@kernel
def _reaching(values, index, least):
    return simd.reaching(values, index, least)


@table("least", [1e-45, 1.0, 3e38, np.inf])
@random
def test_reaching(least, rng):
    values, index = numbers(rng, 100), int(rng.integers(68))
    assert _reaching(values, index, FLOAT(least)) == as_word(np.abs(values[index : index + 32]) >= FLOAT(least))


@kernel
def _add_chosen(out, index, word, high, low):
    simd.add_chosen(out, index, word, high, low)


@table("special", [False, True])
@random
def test_add_chosen(special, rng):
    out, index, word = numbers(rng, 100), int(rng.integers(68)), rng.integers(1 << 32, dtype=np.uint32)
    (high, low), wanted = numbers(rng, 2, special), out.copy()
    with np.errstate(all="ignore"):
        wanted[index : index + 32] += np.where(as_booleans(word), high, low)
    _add_chosen(out, index, word, high, low)
    same(out, wanted)


@kernel
def _write_chosen(out, index, word, high, low):
    simd.write_chosen(out, index, word, high, low)


@table("special", [False, True])
@random
def test_write_chosen(special, rng):
    out, index, word = numbers(rng, 100), int(rng.integers(68)), rng.integers(1 << 32, dtype=np.uint32)
    (high, low), wanted = numbers(rng, 2, special), out.copy()
    wanted[index : index + 32] = np.where(as_booleans(word), high, low) + FLOAT(0)
    _write_chosen(out, index, word, high, low)
    same(out, wanted)


@kernel
def _butterflies(tile, first, distance):
    simd.butterflies(tile, first, distance)


@table("distance", [LANES, 3 * LANES, 64])
@random
def test_butterflies(distance, rng):
    tile, first = numbers(rng, 500), int(rng.integers(LANES))
    index, wanted = first + distance * np.arange(4)[:, None] + ROW, tile.copy()
    with np.errstate(all="ignore"):
        for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
            for upper, lower in pairs:
                a, b = wanted[index[upper]], wanted[index[lower]]
                wanted[index[upper]], wanted[index[lower]] = a + b, (a + b) - 2 * b
        _butterflies(tile, first, distance)
    exact = np.abs(wanted) < 1e30  # 2 b may overflow here
    same(np.where(exact, tile, 0), np.where(exact, wanted, 0))


@kernel
def _scale(out, at, source, index, factor):
    simd.scale(out, at, source, index, factor)


@random
def test_scale(rng):
    (out, source), (at, index), factor = numbers(rng, (2, 50)), rng.integers(34, size=2), numbers(rng, 1)[0]
    wanted = out.copy()
    with np.errstate(all="ignore"):
        wanted[at : at + LANES] = source[index : index + LANES] * factor + FLOAT(0)
    _scale(out, at, source, index, factor)
    same(out, wanted)


@kernel
def _add_scaled(out, at, source, index, factor):
    simd.add_scaled(out, at, source, index, factor)


@random
def test_add_scaled(rng):
    (out, source), (at, index), factor = numbers(rng, (2, 50)), rng.integers(34, size=2), numbers(rng, 1)[0]
    wanted = out.copy()
    with np.errstate(all="ignore"):
        wanted[at : at + LANES] += source[index : index + LANES] * factor
    _add_scaled(out, at, source, index, factor)
    same(out, wanted)


@kernel
def _raise_to(largest, at, source, index, distance):
    simd.raise_to(largest, at, source, index, distance)


@table("distance", [LANES, 40])
@random
def test_raise_to(distance, rng):
    largest, source, (at, index) = np.abs(numbers(rng, 50)), numbers(rng, 200), rng.integers(34, size=2)
    source = np.where(np.isnan(source), FLOAT(0), source)  # what is not finite is refused before
    wanted = np.where(np.isnan(largest), FLOAT(0), largest)
    largest = wanted.copy()
    rows = np.abs(source[index + distance * np.arange(4)[:, None] + ROW])
    wanted[at : at + LANES] = np.maximum(wanted[at : at + LANES], rows.max(0))
    _raise_to(largest, at, source, index, distance)
    same(largest, wanted)


@kernel
def _round_levels(out, at, source, index, factors, zero, offset, state, move):
    simd.round_levels(out, at, source, index, factors, zero, offset, state, move)


@table("move", [0, 21845, -32768])
@table("state", [0, 2**64 - 3 * simd.GAMMA % 2**64, 12345678901234567])
@random
def test_round_levels(state, move, rng):
    (out, source), (at, index) = numbers(rng, (2, 80), special=False), rng.integers(48, size=2)
    factors, offset, zero = numbers(rng, LANES + 5, special=False), FLOAT(0.5 + 0.5 / 65536), 5
    words = np.uint64(state) + np.arange(LANES // 2, dtype=np.uint64) * np.uint64(simd.GAMMA)
    for shift, factor in ((30, simd.FACTORS[0]), (27, simd.FACTORS[1]), (31, 1)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    wanted, random = out.copy(), (words.view(np.int16) + np.int16(move)).astype(FLOAT)
    levels = source[index : index + 2 * LANES] * np.tile(factors[zero:], 2) + random
    wanted[at : at + 2 * LANES] = np.floor(offset + levels * FLOAT(1 / 65536))
    _round_levels(out, at, source, index, factors, zero, offset, np.uint64(state), np.int16(move))
    same(out, wanted)


@kernel
def _to_numbers(tile, at, steps, zero, shift):
    simd.to_numbers(tile, at, steps, zero, shift)


@random
def test_to_numbers(rng):
    (tile, steps), (at, zero), shift = numbers(rng, (2, 50)), rng.integers(34, size=2), numbers(rng, 1)[0]
    wanted = tile.copy()
    with np.errstate(all="ignore"):
        wanted[at : at + LANES] = (tile[at : at + LANES] + shift) * steps[zero : zero + LANES]
    _to_numbers(tile, at, steps, zero, shift)
    same(tile, wanted)


@table("shift", [0.0, 0.5])
@table("bits", range(2, 9))
@random
def test_rows_of_codes(bits, shift, rng):
    """A row of levels goes to its planes and comes back, between rows that stay as they are."""
    count, first = 96, 16 * int(rng.integers(6))
    planes = Planes(bits, count)
    (tile, steps), (at, column) = numbers(rng, (2, 50)), rng.integers(34, size=2)
    levels = rng.integers(-(1 << bits - 1), 1 << bits - 1, count)
    codes, body, again = ((levels & (1 << bits) - 1).astype(np.uint8), *np.zeros((2, planes.size), np.uint8))
    planes.write(torch.from_numpy(codes), slice(0, count), torch.from_numpy(body))
    again[:] = body
    row, places = slice(first, first + LANES), planes.places(0)
    for plane, width in enumerate((4 if bits < 8 else 8, 2, 1), 1):
        if bits & width:
            begin = places[plane] + first * width // 8
            again[begin : begin + LANES * width // 8] = 255
    levels_numba.pack(levels[row].astype(FLOAT), again, places, first)
    same(again, body)
    wanted = tile.copy()
    with np.errstate(all="ignore"):
        wanted[at : at + LANES] += (levels[row].astype(FLOAT) + FLOAT(shift)) * steps[column : column + LANES]
    levels_numba.add_row(tile, at, body, places, first, steps, column, FLOAT(shift), np.int32(1 << bits - 1))
    same(tile, wanted)
    assert [levels_numba.unpack_one(body, places, index) for index in range(count)] == codes.tolist()
    for index in range(count):
        levels_numba.pack_one(codes[index], again, places, index)
    same(again, body)


@kernel
def _fetch(source, index):
    simd.fetch(source, index)


@table("index", [0, 49, 1 << 20])
@random
def test_fetching_changes_nothing(index, rng):
    """Also beyond the end."""
    source = numbers(rng, 50)
    before = source.copy()
    _fetch(source, index)
    same(source, before)


@table("word", [0, 1, 2, 1 << 31, (1 << 32) - 1, 0x80000001, 0x00F0F000])
def test_bits_of_a_word(word):
    word, index = np.uint32(word), np.flatnonzero(as_booleans(word))
    assert words.ones(word) == len(index)
    if word:
        assert words.lowest(word) == index[0]
        assert words.without_lowest(word) == word - (1 << index[0])
