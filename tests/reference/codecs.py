"""What each codec does to a vector, in plain NumPy: ``(what was sent, as float32, and what stays)``."""

from __future__ import annotations

import math
from functools import cache

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


def onebit_columns(vector: Array, segments: list[tuple[int, int, int]], min_column: int) -> tuple[Array, Array]:
    """As ``onebit``, for segments ``(elements, first element in the parameter, elements that feed one unit)``."""
    groups: dict[tuple[int, int], list[int]] = {}
    place = 0
    for number, (numel, first, width) in enumerate(segments):
        joined = math.ceil(min_column / width)
        for element in range(first, first + numel):
            groups.setdefault((number, element // width // joined), []).append(place)
            place += 1
    sent = np.empty_like(vector)
    for places in groups.values():
        sent[places], _ = onebit(vector[places], len(places))
    return sent, vector - sent


def efsign(vector: Array, block: int) -> tuple[Array, Array]:
    """The mean magnitude of each block with the elements' signs, zeros counting as positive."""
    sent = np.empty_like(vector)
    for start in range(0, len(vector), block):
        part = [float(value) for value in vector[start : start + block]]
        mean = math.fsum(abs(value) for value in part) / len(part)
        sent[start : start + block] = [mean if value >= 0 else -mean for value in part]
    return sent, vector - sent


def random16(key: int, count: int, share: float = 0.0) -> list[int]:
    """A key's stream of signed 16-bit numbers, moved on by a share of their range: splitmix64, whose uint64 wrap."""
    golden, lanes = 0x9E3779B97F4A7C15, np.arange(0, 64, 16, dtype=np.uint64)

    def output(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return state ^ state >> np.uint64(31)

    start = output(np.array([(key + golden) % 2**64], np.uint64))
    words = output(start + np.arange(-(-count // 4), dtype=np.uint64) * np.uint64(golden))
    numbers = (words[:, None] >> lanes) + np.uint64(int(share * 65536))
    drawn: list[int] = numbers.astype(np.uint16).view(np.int16).ravel()[:count].tolist()
    return drawn


def natural(vector: Array, bucket: int, key: int, share: float = 0.0) -> tuple[Array, Array]:
    """Each element's lower or upper power of two, whichever a random number below 1 says."""
    sent = np.zeros_like(vector)
    random = random16(key, len(vector), share)
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


def unpacked(raw: bytes, count: int, bits: int) -> list[int]:
    """Read codes out of planes of 32, 16, 8, 4, 2 and 1 bits, lowest bits first, each a little-endian number."""
    codes, place, low = [0] * count, 0, 0
    for width in (width for width in (32, 16, 8, 4, 2, 1) if bits & width):
        size = -(-count * width // 8)
        number = int.from_bytes(raw[place : place + size], "little")
        codes = [code | (number >> width * i & 2**width - 1) << low for i, code in enumerate(codes)]
        place, low = place + size, low + width
    assert place == len(raw)
    return codes


def levels(message: torch.Tensor, blocks: int, count: int, bits: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """Read a message of QSGD or Rotated bit by bit: norms, and levels as signed integers."""
    raw = bytes(message.tolist())
    norms = np.frombuffer(raw[: 4 * blocks], np.float32)
    codes = np.array(unpacked(raw[-(-4 * blocks // 16) * 16 :], count, bits), np.int64)
    return norms, np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)


def qsgd_numbers(vector: Array, bits: int, bucket: int, norm: str) -> tuple[Array, npt.NDArray[np.float64]]:
    """The norm of every bucket, and each element in units of a level."""
    s = 2 ** (bits - 1) - 1
    norms, numbers = [], np.zeros(len(vector))
    for start in range(0, len(vector), bucket):
        part = vector[start : start + bucket].astype(np.float64)
        size = np.abs(part).max() if norm == "max" else math.sqrt(math.fsum(part**2))
        norms.append(size if size >= s * 2.0**-111 else 0.0)
        if norms[-1]:
            numbers[start : start + bucket] = part / size * s
    return np.array(norms, np.float32), numbers


@cache
def rotation(block: int) -> npt.NDArray[np.float64]:
    """``H D``, by the matrix's recursive definition."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * [1 if number >= 0 else -1 for number in random16(0, block)]


def rotated_blocks(numel: int, block: int) -> list[list[int]]:
    """The places of every block's elements; those from ``numel`` on are zeros."""
    total, run, blocks = -(-numel // block) * block, 16, []
    for start in range(0, total, run * block):
        columns = min(run, (total - start) // block)
        blocks += [list(range(start + column, start + columns * block, columns)) for column in range(columns)]
    return blocks


def rotated(vector: Array, bits: int, block: int, key: int) -> tuple[Array, Array]:
    """Each block's coefficients, rounded to even levels between plus and minus the largest, and rotated back."""
    numel = len(vector)
    block = min(block, max(8, 2 ** math.ceil(math.log2(numel))))
    places, matrix = np.array(rotated_blocks(numel, block)), rotation(block)
    padded = np.zeros(places.size)
    padded[:numel] = vector
    coefficients = padded[places] @ matrix.T / block
    largest = np.abs(coefficients).max(axis=1, keepdims=True).astype(np.float32).astype(np.float64)
    chances = (np.array(random16(key, places.size)) + 32768.5) / 65536
    half = 2 ** (bits - 1)
    scale = np.divide(half - 0.5, largest, where=largest >= (half - 0.5) * 2.0**-111, out=np.zeros_like(largest))
    levels = np.clip(np.floor(coefficients * scale - 0.5 + chances[places]), -half, half - 1)
    received = np.zeros(places.size)
    received[places] = np.where(scale > 0, (levels + 0.5) * largest / (half - 0.5), 0) @ matrix
    sent = received[:numel].astype(np.float32)
    return sent, vector - sent


def range_formats(bits: int, mantissa: int, low: float, high: float, nearest: bool) -> tuple[int, int, int]:
    """(base, positives, negatives): the smallest base, at least 1, at which the codes suffice; by bisection."""

    def number(end: float) -> int:
        pattern = int(np.float32(abs(end)).view(np.uint32))
        if nearest and mantissa < 23:
            pattern += 1 << (22 - mantissa)
        return min(pattern, 0x7F7FFFFF) >> (23 - mantissa)

    tops = number(max(high, 0.0)), number(min(low, 0.0))
    below, base = 0, max(tops) + 1
    while base - below > 1:
        middle = (base + below) // 2
        if sum(max(top - middle + 1, 0) for top in tops) <= 2**bits - 1:
            base = middle
        else:
            below = middle
    positives, negatives = (max(top - base + 1, 0) for top in tops)
    return base, positives, negatives


def range_float(vector: Array, bits: int, mantissa: int, block: int, nearest: bool) -> tuple[Array, Array]:
    """Round to so many binary digits by arithmetic in float64, and drop what lies below the smallest value."""
    sent = np.zeros_like(vector)
    for start in range(0, len(vector), block):
        part = vector[start : start + block].astype(np.float64)
        base, positives, negatives = range_formats(bits, mantissa, float(part.min()), float(part.max()), nearest)
        eps, *tops = (
            float(np.uint32(max(number, 0) << (23 - mantissa)).view(np.float32))
            for number in (base, base + positives - 1, base + negatives - 1)
        )
        _, exponent = np.frexp(np.abs(part))
        step = 2.0 ** (np.maximum(exponent - 1, -126) - mantissa)
        value = np.floor(np.abs(part) / step + (0.5 if nearest and mantissa < 23 else 0.0)) * step
        value = np.minimum(value, np.where(part > 0, tops[0] if positives else 0, tops[1] if negatives else 0))
        sent[start : start + block] = np.where(value < eps, 0.0, np.sign(part) * value)
    return sent, vector - sent


def _range_values(codes: list[int], bits: int, mantissa: int, low: float, high: float) -> list[float]:
    base, positives, _ = range_formats(bits, mantissa, low, high, True)
    values = []
    for code in codes:
        number = base + code - 1 - (positives if code > positives else 0)
        value = float(np.uint32(number << (23 - mantissa)).view(np.float32)) if code else 0.0
        values.append(-value if code > positives else value)
    return values


def parse_range_float(message: torch.Tensor, numel: int, bits: int, block: int, nearest: bool) -> Array:
    """Read a RangeFloat message byte by byte, as its docstring describes it."""
    raw = bytes(message.tolist())
    blocks = -(-numel // block)
    mantissa = int.from_bytes(raw[:4], "little")
    low, high = np.frombuffer(raw[16 : 16 + 8 * blocks], np.float32).reshape(2, blocks)
    size = sum(-(-numel * width // 8) for width in (32, 16, 8, 4, 2, 1) if bits & width)
    codes = unpacked(raw[-(-(16 + 8 * blocks) // 16) * 16 :][:size], numel, bits)
    values = []
    for i, code in enumerate(codes):
        base, positives, _ = range_formats(bits, mantissa, float(low[i // block]), float(high[i // block]), nearest)
        number = base + code - 1 - (positives if code > positives else 0)
        value = float(np.uint32(number << (23 - mantissa)).view(np.float32)) if code else 0.0
        values.append(-value if code > positives else value)
    return np.array(values, np.float32)


def transformed(block: Array | npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.complex128]:
    """Orthonormal spectrum of one block, from NumPy's FFT or by the sum that defines the DCT-II."""
    n = len(block)
    if kind == "fft":
        return np.fft.rfft(block.astype(np.float64), norm="ortho")
    return (_cosine_matrix(n) @ block.astype(np.float64)).astype(np.complex128)[_cosine_order(n)]


def restored(spectrum: npt.NDArray[np.complex128], n: int, kind: str) -> npt.NDArray[np.float64]:
    """The block of an orthonormal spectrum."""
    if kind == "fft":
        return np.fft.irfft(spectrum, n, norm="ortho")
    return _cosine_matrix(n)[_cosine_order(n)].T @ spectrum.real


def _cosine_order(n: int) -> list[int]:
    return [0, n // 2] + [k for pair in zip(range(1, n // 2), range(n - 1, n // 2, -1), strict=True) for k in pair]


def _cosine_matrix(n: int) -> npt.NDArray[np.float64]:
    rows = [[math.cos(math.pi * k * (2 * i + 1) / (2 * n)) for i in range(n)] for k in range(n)]
    matrix = np.array(rows) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def areas(numel: int, block: int) -> list[tuple[int, int, int]]:
    """(first element, elements, length after filling up) of every block."""
    found = [(start, min(block, numel - start)) for start in range(0, numel, block)]
    return [
        (start, count, block if count == block else max(8, 1 << (count - 1).bit_length())) for start, count in found
    ]


def spectral(vector: Array, theta: float, block: int, kind: str) -> Array:
    """Only the largest coefficients of every block, unrounded."""
    sent = np.zeros_like(vector)
    for start, count, length in areas(len(vector), block):
        spectrum = transformed(np.pad(vector[start : start + count], (0, length - count)), kind)
        keep = max(1, math.ceil((1 - theta) * len(spectrum) - 1e-9))
        order = sorted(range(len(spectrum)), key=[-abs(each) for each in spectrum].__getitem__)
        spectrum[order[keep:]] = 0
        sent[start : start + count] = restored(spectrum, length, kind)[:count]
    return sent


def parse_spectral(message: torch.Tensor, numel: int, theta: float, block: int, bits: int, kind: str) -> Array:
    """Read an FFT or DCT message byte by byte, as its docstring describes it."""
    raw, offset, out = bytes(message.tolist()), 16, np.zeros(numel, np.float32)
    mantissa, width = int.from_bytes(raw[:4], "little"), 2 if kind == "fft" else 1

    def read(size: int) -> bytes:
        nonlocal offset
        start, offset = offset, offset + -(-size // 16) * 16
        return raw[start : start + size]

    everything = areas(numel, block)
    for blocks in ([each for each in everything if each[1] == block], [each for each in everything if each[1] < block]):
        if not blocks:
            continue
        length = blocks[0][2]
        bins = length // 2 + 1 if kind == "fft" else length
        keep = max(1, math.ceil((1 - theta) * bins - 1e-9))
        scales, lows, highs = np.frombuffer(read(12 * len(blocks)), np.float32).reshape(3, -1)
        place_bytes = 0 if keep == bins else min(2 * keep, -(-bins // 8))
        count, places = keep * width * len(blocks), read(place_bytes * len(blocks))
        codes = unpacked(
            read(sum(-(-count * plane // 8) for plane in (32, 16, 8, 4, 2, 1) if bits & plane)), count, bits
        )
        for i, (start, elements, _) in enumerate(blocks):
            part = places[i * place_bytes : (i + 1) * place_bytes]
            if keep == bins:
                kept = list(range(bins))
            elif 2 * keep < -(-bins // 8):
                kept = np.frombuffer(part, np.uint16).tolist()
            else:
                kept = [k for k in range(bins) if part[k // 8] >> (k % 8) & 1]
            assert len(kept) == keep
            numbers = codes[i * keep * width : (i + 1) * keep * width]
            values = np.array(_range_values(numbers, bits, mantissa, float(lows[i]), float(highs[i])))
            spectrum = np.zeros(bins, np.complex128)
            spectrum[kept] = values[0::2] + 1j * values[1::2] if kind == "fft" else values
            out[start : start + elements] = float(scales[i]) * restored(spectrum, length, kind)[:elements]
    return out
