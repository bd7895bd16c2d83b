"""Slow references for integer codes and sparse messages, in plain Python from the papers' rules."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from lightning_compress.codecs import SparseLoCo
from tests.reference.codecs import random16

Array = npt.NDArray[np.float32]


def omega(number: int) -> str:
    """Elias' omega code, by its recursive rule."""
    code = "0"
    while number > 1:
        code = format(number, "b") + code
        number = len(format(number, "b")) - 1
    return code


def read_omega(bits: str, place: int) -> tuple[int, int]:
    """The number whose omega code begins there, and where the next one begins."""
    number = 1
    while bits[place] == "1":
        number, place = int(bits[place : place + number + 1], 2), place + number + 1
    return number, place + 1


def rice(numbers: list[int], k: int) -> bytes:
    """Golomb-Rice codes, as the module describes them."""
    unary = "".join("0" * (number >> k) + "1" for number in numbers)
    head = b"".join(value.to_bytes(4, "little") for value in (len(numbers), k, len(unary)))
    return head + _bytes(unary) + codes([number & (1 << k) - 1 for number in numbers], k)


def read_rice(raw: bytes) -> tuple[list[int], int]:
    """The numbers, and the bytes that they took."""
    count, k, unary = (int.from_bytes(raw[place : place + 4], "little") for place in (0, 4, 8))
    middle = 12 + -(-unary // 8)
    quotients = _bits(raw[12:middle])[:unary].split("1")[:-1]
    assert len(quotients) == count
    remainders, used = read_codes(raw[middle:], count, k)
    numbers = [(len(quotient) << k) + each for quotient, each in zip(quotients, remainders, strict=True)]
    return numbers, middle + used


def _planes(bits: int) -> list[tuple[int, int]]:
    """Lowest bit and width of each plane: the largest powers of two first."""
    planes, low = [], 0
    while low < bits:
        width = max(each for each in (1, 2, 4, 8, 16) if each <= bits - low)
        planes.append((low, width))
        low += width
    return planes


def codes(numbers: list[int], bits: int) -> bytes:
    """Codes plane by plane, the first code lowest in each byte."""
    return b"".join(
        _bytes("".join(format(number >> low & (1 << width) - 1, f"0{width}b")[::-1] for number in numbers))
        for low, width in _planes(bits)
    )


def read_codes(raw: bytes, count: int, bits: int) -> tuple[list[int], int]:
    """The codes, and the bytes that they took."""
    numbers, place = [0] * count, 0
    for low, width in _planes(bits):
        size = -(-count * width // 8)
        stream = _bits(raw[place : place + size])
        for i in range(count):
            numbers[i] |= int(stream[i * width : (i + 1) * width][::-1], 2) << low
        place += size
    return numbers, place


def _bytes(bits: str) -> bytes:
    """Packed, the first bit of each byte lowest."""
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def _bits(raw: bytes) -> str:
    return "".join(format(byte, "08b")[::-1] for byte in raw)


def parse_qsgd_elias(message: torch.Tensor, numel: int, bits: int, bucket: int) -> Array:
    """Read a message of QSGD in Elias codes bit by bit, as its docstring describes it."""
    raw, s = bytes(message.tolist()), 2 ** (bits - 1) - 1
    buckets = -(-numel // bucket)
    norms = np.frombuffer(raw[: 4 * buckets], np.float32)
    lengths = np.frombuffer(raw[4 * buckets : 6 * buckets], np.uint16)
    stream = "".join(format(byte, "08b") for byte in raw[6 * buckets :])
    assert len(raw) == 6 * buckets + math.ceil(int(lengths.sum()) / 8)
    out, place = np.zeros(numel, np.float32), 0
    for number in range(buckets):
        element, end = number * bucket - 1, place + int(lengths[number])
        while place < end:
            gap, place = read_omega(stream, place)
            sign = -1 if stream[place] == "1" else 1
            level, place = read_omega(stream, place + 1)
            element += gap
            out[element] = sign * level * (norms[number] / np.float32(s))
        assert place == end
    return out


def kept(vector: Array, density: float, ranges: list[tuple[int, int]]) -> list[list[int]]:
    """Places of the largest elements of each range, but zeros, by sorting; the first ones among equals."""
    found = []
    for start, stop in ranges:
        order = sorted(range(start, stop), key=lambda i: -abs(float(vector[i])))
        found.append(sorted(i for i in order[: max(1, math.ceil(density * (stop - start)))] if vector[i]))
    return found


def coded(vector: Array, parts: list[list[int]], values: str) -> tuple[Array, Array]:
    """What is sent of these places, and what stays."""
    sent, stays = np.zeros_like(vector), vector.copy()
    for places in parts:
        if values in ("fp32", "fp16"):
            for i in places:
                limit = 65504.0 if values == "fp16" else math.inf
                number = min(max(float(vector[i]), -limit), limit)
                sent[i] = np.float16(number) if values == "fp16" else number
        elif values == "1bit":
            mean = _mean([abs(float(vector[i])) for i in places])
            for i in places:
                sent[i] = math.copysign(mean, vector[i])
        else:
            for sign in (1, -1):
                ones = [i for i in places if (vector[i] < 0) == (sign < 0)]
                middle = _mean([abs(float(vector[i])) for i in ones])
                for bucket in (
                    [i for i in ones if abs(float(vector[i])) >= middle],
                    [i for i in ones if abs(float(vector[i])) < middle],
                ):
                    for i in bucket:
                        sent[i] = _mean([float(vector[j]) for j in bucket])
        for i in places:
            stays[i] = vector[i] - sent[i]
    return sent, stays


def two_means(vector: Array, parts: list[list[int]]) -> tuple[Array, Array]:
    """The mean of the positive ones and of the negative ones of each part."""
    sent, stays = np.zeros_like(vector), vector.copy()
    for places in parts:
        for negative in (False, True):
            ones = [i for i in places if (vector[i] < 0) == negative]
            for i in ones:
                sent[i] = _mean([float(vector[j]) for j in ones])
                stays[i] = vector[i] - sent[i]
    return sent, stays


def _mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def read_positions(raw: bytes, numel: int, kind: str) -> tuple[list[int], int]:
    """Positions at the beginning of these bytes, and the bytes that they took."""
    words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw) // 4 * 4, 4)]
    if kind == "int32":
        return words[1 : 1 + words[0]], 4 + 4 * words[0]
    if kind == "bitmap":
        size = -(-numel // 8)
        return [i for i, bit in enumerate(_bits(raw[:size])) if bit == "1"], size
    if kind == "int16":
        blocks = -(-numel // 65536)
        positions, place = [], 4 * blocks
        for block in range(blocks):
            for _ in range(words[block]):
                positions.append(65536 * block + int.from_bytes(raw[place : place + 2], "little"))
                place += 2
        return positions, place
    gaps, used = read_rice(raw)
    positions = []
    for gap in gaps:
        positions.append((positions[-1] if positions else -1) + gap + 1)
    return positions, used


def parse_entries(message: torch.Tensor, numel: int, ends: list[int], indices: str, values: str) -> tuple[Array, int]:
    """Read positions and values byte by byte, as ``positions`` and ``values`` describe them; and the bytes used."""
    raw, out = bytes(message.tolist()), np.zeros(numel, np.float32)
    positions, used = read_positions(raw, numel, indices)
    if values in ("fp32", "fp16"):
        size = 4 if values == "fp32" else 2
        numbers = np.frombuffer(raw[used : used + size * len(positions)], f"f{size}")
        out[positions] = numbers
        return out, used + size * len(positions)
    stored, bits = {"1bit": (1, 1), "means": (2, 1), "2bit": (4, 2)}[values]
    levels = np.frombuffer(raw[used : used + 4 * stored * len(ends)], np.float32).reshape(-1, stored)
    used += levels.nbytes
    stream, size = read_codes(raw[used:], len(positions), bits)
    for number, position in enumerate(positions):
        part = sum(end <= position for end in ends)
        code = stream[number]
        table = [levels[part][0], -levels[part][0]] if values == "1bit" else levels[part]
        out[position] = table[code]
    return out, used + size


def threshold(vector: Array, plus: float, minus: float, most: int, key: int) -> tuple[Array, Array]:
    """One step for each element beyond a threshold, from the key's place on and round."""
    plus, minus = float(np.float32(plus)), float(np.float32(minus))
    sent, stays = np.zeros_like(vector), vector.copy()
    start, count = key % len(vector), 0
    for i in [*range(start, len(vector)), *range(start)]:
        if count < most and (vector[i] >= plus or vector[i] <= -minus):
            sent[i] = plus if vector[i] >= plus else -minus
            stays[i] = vector[i] - sent[i]
            count += 1
    return sent, stays


def adaptive_places(vector: Array, proportion: float, ranges: list[tuple[int, int]]) -> list[list[int]]:
    """What reaches the thresholds of either sign in each range, at most four times the target."""
    found = []
    for start, stop in ranges:
        places: set[int] = set()
        for sign in (1, -1):
            ones = [i for i in range(start, stop) if sign * vector[i] > 0]
            largest = sorted((abs(float(vector[i])) for i in ones), reverse=True)
            if ones:
                least = largest[max(1, math.floor(len(ones) / proportion)) - 1]
                places |= {i for i in ones if abs(float(vector[i])) >= least}
        found.append(sorted(places)[: 4 * max(2, math.ceil((stop - start) / proportion))])
    return found


def wangni_chances(vector: Array, density: float) -> tuple[npt.NDArray[np.float64], float]:
    """Each element's probability, and the magnitude of those that are not certain, by the paper's greedy algorithm."""
    magnitudes = np.abs(vector.astype(np.float64))
    target = density * len(vector)
    if target == len(vector):
        return (magnitudes > 0).astype(np.float64), 1.0
    level = max(magnitudes.sum() / target, 2.0**-126)
    for _ in range(9):
        chances = np.minimum(magnitudes / level, 1)
        certain = magnitudes >= level
        if not certain.any() or certain.sum() >= target or not magnitudes[~certain].any():
            break
        level = max(min(level, magnitudes[~certain].sum() / (target - certain.sum())), 2.0**-126)
    return chances, min(level, float(np.finfo(np.float32).max))


def wangni_random(key: int, numel: int) -> list[float]:
    """The numbers below 1 that the probabilities are compared with: 16 bits of one stream and 16 of another."""
    mask = 2**64 - 1

    def output(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return state ^ state >> 31

    other = output((output((key + 0x9E3779B97F4A7C15) & mask) + 1 + 0x9E3779B97F4A7C15) & mask)
    lower = [output(other + i * 0x9E3779B97F4A7C15 & mask) >> 48 for i in range(numel)]
    return [
        (upper + 32768 + (more + 0.5) / 65536) / 65536 for upper, more in zip(random16(key, numel), lower, strict=True)
    ]


def rows(vector: Array, segments: list[tuple[int, int, int]]) -> bytes:
    """The message of the rows that are not zero.

    Args:
        vector: of segments.
        segments: of each, its elements, the parameter's element that is its first one, and the width of a row.
    """
    found: list[list[float]] = []
    place = 0
    for numel, start, width in segments:
        for element in range(start, start + numel):
            if element == start or element % width == 0:
                found.append([])
            found[-1].append(float(vector[place]))
            place += 1
    kept = [number for number, row in enumerate(found) if any(row)]
    numbers = np.array(kept, np.int32).tobytes()
    bits = _bytes("".join("1" if any(row) else "0" for row in found)).ljust(4 * math.ceil(len(found) / 32), b"\0")
    values = np.array([value for number in kept for value in found[number]], np.float32).tobytes()
    ways = [
        (len(bytes(name)) + len(body), preferred, np.array([count, kind], np.int32).tobytes() + name + body)
        for count, kind, name, body, preferred in (
            (len(kept), 0, numbers, values, 1),
            (len(kept), 1, bits, values, 2),
            (len(found), 2, b"", vector.tobytes(), 0),
        )
    ]
    return min(ways)[2]


def sparseloco(vector: Array, segments: list[tuple[int, int]], settings: SparseLoCo) -> tuple[Array, Array]:
    """What is sent and what stays: the largest of each block, four bins over six deviations, the means of the bins."""
    sent, stays = np.zeros_like(vector), vector.copy()
    for start, stop in segments:
        kept: list[int] = []
        for first in range(start, stop, settings.block):
            block = range(first, min(first + settings.block, stop))
            keep = min(len(block), max(4, math.ceil(settings.k * len(block) / settings.block)))
            kept += sorted(block, key=lambda i: -abs(float(vector[i])))[:keep]
        numbers = {i: float(vector[i]) for i in kept}
        shift = _mean(list(numbers.values()))
        deviation = math.sqrt(math.fsum((each - shift) ** 2 for each in numbers.values()) / max(1, len(kept) - 1))
        bins: dict[int, list[int]] = {}
        for i, number in numbers.items():
            code = round((number - shift) / (6 * deviation / 4) + 2) if deviation else 2
            bins.setdefault(min(max(code, 0), 3), []).append(i)
        for members in bins.values():
            values = [numbers[i] for i in members]
            level = np.float32(0 if 0 in values else _mean(values))
            for i in members:
                sent[i], stays[i] = level, vector[i] - level
    return sent, stays
