"""Rice and Elias codes: round trips, and the bits of the slow references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.codecs.packing.positions import HEADER, read_rice, rice_capacity, rice_parameter, write_rice
from lightning_compress.contrib.codecs import elias
from tests.reference import sparse as reference

modest = settings(deadline=None, derandomize=True, max_examples=60)
SOME = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 300), st.integers(0, 2**20)), max_size=200)


def rice_bytes(numbers: np.ndarray, k: int) -> np.ndarray:
    out = np.full(HEADER + int((numbers >> k).sum() + (k + 1) * len(numbers)) // 8 + 6, 0xAB, np.uint8)
    return out[: write_rice(numbers, k, out)]


@modest
@given(numbers=SOME, k=st.integers(0, 16))
def test_rice_codes_are_those_of_the_reference(numbers: list[int], k: int) -> None:
    numbers = [number >> max(0, 10 - k) for number in numbers]  # the unary part gets long
    data = rice_bytes(np.array(numbers, np.int64), k)
    assert data.tobytes() == reference.rice(numbers, k)
    back, used = read_rice(np.concatenate([data, np.full(5, 0xFF, np.uint8)]))
    assert (back.tolist(), used) == (numbers, len(data))
    assert reference.read_rice(data.tobytes()) == (numbers, len(data))


@pytest.mark.parametrize("k", [4, 9, 16])
def test_rice_round_trip_of_many(k: int) -> None:
    numbers = np.arange(0, 2**20 + 1, 1 if k > 9 else 37)
    back, _ = read_rice(rice_bytes(numbers, k))
    assert np.array_equal(back, numbers)


@modest
@given(numbers=SOME)
def test_rice_fits_its_capacity(numbers: list[int]) -> None:
    array = np.array(numbers, np.int64)
    for total, count in ((sum(numbers), len(numbers)), (2 * sum(numbers) + 9, len(numbers) + 7)):
        assert len(rice_bytes(array, rice_parameter(sum(numbers), len(numbers)))) <= rice_capacity(total, count)


@pytest.mark.parametrize(("density", "least"), [(0.1, 4.690), (0.01, 8.079), (0.001, 11.407)])
def test_rice_is_near_the_entropy(density: float, least: float) -> None:
    gaps = np.random.default_rng(0).geometric(density, 200_000) - 1
    bits = 8 * len(rice_bytes(gaps, rice_parameter(int(gaps.sum()), len(gaps)))) / len(gaps)
    assert least <= bits <= 1.03 * least


@modest
@given(data=st.binary(max_size=300), numbers=SOME)
def test_rice_refuses_or_reads_any_bytes(data: bytes, numbers: list[int]) -> None:
    real = rice_bytes(np.array(numbers, np.int64) >> 8, 2)
    for cut in {0, 4, HEADER, len(real) - 1}:
        with pytest.raises(ValueError, match="truncated"):
            read_rice(real[: min(cut, len(real) - 1)])
    spoilt = np.concatenate([real[:HEADER], np.frombuffer(data, np.uint8)])
    for each in (np.frombuffer(data, np.uint8), spoilt):
        try:
            back, used = read_rice(each)
        except ValueError:
            continue
        assert used <= len(each)
        assert (back >= 0).all()


def read_all(stream: np.ndarray, lengths: np.ndarray, lane: int) -> np.ndarray:
    """Read codes in lock-step, from the places where each ``lane``-th of them begins."""
    words = elias.to_words(stream)
    places = (np.cumsum(lengths) - lengths)[::lane]
    columns = []
    for _ in range(lane):
        numbers, sizes = elias.read(elias.window(words, places))
        places = places + sizes
        columns.append(numbers)
    return np.stack(columns, axis=1).reshape(-1)


def elias_bytes(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, lengths = elias.omega(numbers)
    words = np.zeros(int(lengths.sum()) // 64 + 2, np.uint64)
    middle = elias.append(words, 0, codes[:5], lengths[:5])
    end = elias.append(words, middle, codes[5:], lengths[5:])
    return elias.to_bytes(words, end), lengths


def test_elias_round_trip_of_1_to_2_20() -> None:
    numbers = np.arange(1, 2**20 + 1)
    stream, lengths = elias_bytes(numbers)
    assert len(stream) == -(-int(lengths.sum()) // 8)
    assert np.array_equal(read_all(stream, lengths, 256), numbers)


@modest
@given(numbers=st.lists(st.one_of(st.integers(1, 9), st.integers(1, 600), st.integers(1, 2**40 - 1)), max_size=99))
def test_elias_codes_are_those_of_the_reference(numbers: list[int]) -> None:
    stream, _ = elias_bytes(np.array(numbers, np.int64))
    bits = "".join(map(reference.omega, numbers))
    assert stream.tobytes() == int(bits + "0" * (-len(bits) % 8) or "0", 2).to_bytes(-(-len(bits) // 8), "big")
    place, back = 0, []
    while place < len(bits):
        number, place = reference.read_omega(bits, place)
        back.append(number)
    assert back == numbers


def test_elias_refuses_numbers_without_end() -> None:
    with pytest.raises(ValueError, match="above 2\\^40"):
        elias.read(np.array([2**64 - 1], np.uint64))
