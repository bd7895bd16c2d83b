"""What each codec does to a vector, in plain NumPy: ``(what was sent, as float32, and what stays)``."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float32]


def dense(vector: Array) -> tuple[Array, Array]:
    """All of it."""
    return vector.copy(), np.zeros_like(vector)


def fp16(vector: Array, limit: float = 65504.0) -> tuple[Array, Array]:
    """The nearest half-precision number, ties to even; beyond the limit, the limit."""
    sent = np.clip(vector, -limit, limit).astype(np.float16).astype(np.float32)
    return sent, vector - sent


def bf16(vector: Array) -> tuple[Array, Array]:
    """The nearest float32 whose lower 16 bits are 0, ties to even."""
    sent = np.empty_like(vector)
    largest = np.array(0x7F7F0000, np.uint32).view(np.float32)
    for i, value in enumerate(np.clip(vector, -largest, largest)):
        bits = int(value.view(np.uint32))
        upper, lower = bits >> 16, bits & 0xFFFF
        if lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1):
            upper += 1
        sent[i] = np.array(upper << 16, np.uint32).view(np.float32)
    return sent, vector - sent


def topk(vector: Array, density: float, ranges: list[tuple[int, int]]) -> tuple[Array, Array]:
    """The largest of each range by sorting; Python's sort is stable, so the first ones among equals."""
    sent, stays = np.zeros_like(vector), vector.copy()
    for start, stop in ranges:
        k = max(1, math.ceil(density * (stop - start)))
        order = sorted(range(start, stop), key=lambda i: -abs(float(vector[i])))
        for i in order[:k]:
            sent[i], stays[i] = vector[i], 0.0
    return sent, stays


def onebit(vector: Array, block: int) -> tuple[Array, Array]:
    """The mean of the elements >= 0 and that of the others, block by block, in exact sums."""
    sent = np.empty_like(vector)
    for start in range(0, len(vector), block):
        part = [float(value) for value in vector[start : start + block]]
        upper, lower = [v for v in part if v >= 0], [v for v in part if not v >= 0]
        high = math.fsum(upper) / len(upper) if upper else 0.0
        low = math.fsum(lower) / len(lower) if lower else 0.0
        sent[start : start + block] = [high if v >= 0 else low for v in part]
    return sent, vector - sent


def parse_onebit(message: torch.Tensor, numel: int, block: int) -> Array:
    """Read a OneBit message byte by byte, as its docstring describes it."""
    raw = bytes(message.tolist())
    blocks = -(-numel // block)
    means = np.frombuffer(raw[: 8 * blocks], np.float32)
    body = raw[-(-8 * blocks // 16) * 16 :]
    bits = [body[i // 8] >> (i % 8) & 1 for i in range(numel)]
    return np.array([means[i // block if bit else blocks + i // block] for i, bit in enumerate(bits)], np.float32)


def efsign(vector: Array, block: int) -> tuple[Array, Array]:
    """The mean magnitude of each block with the elements' signs, zeros counting as positive."""
    sent = np.empty_like(vector)
    for start in range(0, len(vector), block):
        part = [float(value) for value in vector[start : start + block]]
        mean = math.fsum(abs(value) for value in part) / len(part)
        sent[start : start + block] = [mean if value >= 0 else -mean for value in part]
    return sent, vector - sent


def random16(key: int, count: int) -> list[int]:
    """A key's stream of signed 16-bit numbers: splitmix64 in Python's integers."""
    mask = 2**64 - 1

    def output(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return state ^ state >> 31

    start = output((key + 0x9E3779B97F4A7C15) & mask)
    words = [output((start + i * 0x9E3779B97F4A7C15) & mask) for i in range(-(-count // 4))]
    numbers = [word >> 16 * lane & 0xFFFF for word in words for lane in range(4)]
    return [number - 65536 if number >= 32768 else number for number in numbers[:count]]


def natural(vector: Array, bucket: int, key: int) -> tuple[Array, Array]:
    """Each element's lower or upper power of two, whichever a random number below 1 says."""
    sent = np.zeros_like(vector)
    random = random16(key, len(vector))
    for start in range(0, len(vector), bucket):
        powers = []
        for value, number in zip(vector[start : start + bucket], random[start:], strict=False):
            _, exponent = math.frexp(float(value))  # the value is 0.5 to 1 times 2^exponent
            lower = 2.0 ** (exponent - 1) if value and exponent >= -125 else 0.0
            upper = 2 * lower if lower else 2.0**-126
            chance = ((number % 65536 | 1) << 7) / 2**23
            powers.append(lower if (abs(float(value)) - lower) / (upper - lower) + chance < 1 else upper)
        least = min(max(powers), 2.0**127) * 2.0**-126 if max(powers) > 1 else 0.0
        for i, power in enumerate(powers):
            kept = 0.0 if power < least else min(power, 2.0**127)
            sent[start + i] = math.copysign(kept, vector[start + i])
    return sent, vector - sent


def levels(message: torch.Tensor, blocks: int, count: int, bits: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """Read a message of QSGD or Rotated bit by bit: norms, and levels as signed integers."""
    raw = bytes(message.tolist())
    norms = np.frombuffer(raw[: 4 * blocks], np.float32)
    place, low = -(-4 * blocks // 16) * 16, 0
    codes = np.zeros(count, np.int64)
    for width in (width for width in (8, 4, 2, 1) if bits & width):
        for i in range(count):
            position = i * width
            codes[i] |= (raw[place + position // 8] >> position % 8 & 2**width - 1) << low
        place, low = place + -(-count * width // 8), low + width
    assert place == len(raw)
    return norms, np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)


def qsgd_numbers(vector: Array, bits: int, bucket: int, norm: str) -> tuple[Array, npt.NDArray[np.float64]]:
    """The norm of every bucket, and each element in units of a level."""
    s = 2 ** (bits - 1) - 1
    norms, numbers = [], np.zeros(len(vector))
    for start in range(0, len(vector), bucket):
        part = vector[start : start + bucket].astype(np.float64)
        size = np.abs(part).max() if norm == "max" else math.sqrt(math.fsum(part**2))
        norms.append(size if size >= 2.0**-100 else 0.0)
        if norms[-1]:
            numbers[start : start + bucket] = part / size * s
    return np.array(norms, np.float32), numbers


def rotation(block: int, seed: int) -> npt.NDArray[np.float64]:
    """``H D``, by the matrix's recursive definition."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * [1 if number >= 0 else -1 for number in random16(seed % 2**64, block)]


def rotated_blocks(numel: int, block: int) -> list[list[int]]:
    """The places of every block's elements; those from ``numel`` on are zeros."""
    total, run, blocks = -(-numel // block) * block, max(2**18 // block, 1), []
    for start in range(0, total, run * block):
        columns = min(run, (total - start) // block)
        blocks += [list(range(start + column, start + columns * block, columns)) for column in range(columns)]
    return blocks
