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
