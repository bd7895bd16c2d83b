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


def _codes(raw: bytes, count: int, bits: int) -> list[int]:
    number = int.from_bytes(raw, "little")
    return [number >> (bits * i) & (2**bits - 1) for i in range(count)]


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
    codes = _codes(raw[-(-(16 + 8 * blocks) // 16) * 16 :], numel, bits)
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
    return (_cosine_matrix(n) @ block.astype(np.float64)).astype(np.complex128)


def restored(spectrum: npt.NDArray[np.complex128], n: int, kind: str) -> npt.NDArray[np.float64]:
    """The block of an orthonormal spectrum."""
    return np.fft.irfft(spectrum, n, norm="ortho") if kind == "fft" else _cosine_matrix(n).T @ spectrum.real


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
        code_bytes = -(-keep * width // 8) * bits
        places, codes = read(place_bytes * len(blocks)), read(code_bytes * len(blocks))
        for i, (start, count, _) in enumerate(blocks):
            part = places[i * place_bytes : (i + 1) * place_bytes]
            if keep == bins:
                kept = list(range(bins))
            elif 2 * keep < -(-bins // 8):
                kept = np.frombuffer(part, np.uint16).tolist()
            else:
                kept = [k for k in range(bins) if part[k // 8] >> (k % 8) & 1]
            assert len(kept) == keep
            numbers = _codes(codes[i * code_bytes : (i + 1) * code_bytes], keep * width, bits)
            values = np.array(_range_values(numbers, bits, mantissa, float(lows[i]), float(highs[i])))
            spectrum = np.zeros(bins, np.complex128)
            spectrum[kept] = values[0::2] + 1j * values[1::2] if kind == "fft" else values
            out[start : start + count] = float(scales[i]) * restored(spectrum, length, kind)[:count]
    return out
