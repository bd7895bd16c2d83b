"""The largest coefficients of every block's spectrum, all in one pass; see ``fft.py``.

The transforms are rounded otherwise than on a CPU, so messages agree within rounding, not to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_compress.codecs.packing.planes_triton import later_planes
from lightning_compress.codecs.spectral import coefficients_triton
from lightning_compress.kernels.triton.launch import Summands, float_view, sources

LONGEST = 8192
"""Elements of a block, at most: one program holds it in registers."""
_TILE = 2048
"""Elements that a program handles; several blocks where they are shorter."""
_CODES = 1 << 24
"""Codes that wait to be packed, at most: 64 MiB."""
_PACKED = 2048
"""Codes that a program packs."""


@dataclass(frozen=True)
class Shape:
    """Blocks of one length, and what the message has of them.

    Args:
        start: where they begin in the vector.
        blocks: how many.
        length: elements of a block.
        padded: what it is filled up to, a power of two of at most ``LONGEST``.
        keep: coefficients that are kept of each.
        listed: bins are a list, not a bitmap.
        bits: of a code.
        mantissa: bits of mantissa, or -1: those with the least of the errors that ``measure`` finds.
        ranges, where, codes, stop: where scales and ranges, bins, and codes begin in the message, and where they end.
        ends: where each of the three ends before it is filled up.
    """

    start: int
    blocks: int
    length: int
    padded: int
    keep: int
    listed: bool
    bits: int
    mantissa: int
    ranges: int
    where: int
    codes: int
    stop: int
    ends: tuple[int, int, int]

    @property
    def values(self) -> int:
        """Codes of a block."""
        return 2 * self.keep

    @property
    def rows(self) -> int:
        """Blocks that a program handles."""
        return max(1, min(_TILE // self.padded, triton.next_power_of_2(self.blocks)))

    @property
    def options(self) -> dict[str, Any]:
        """What kernels are launched with: a thread has 16 elements. What is rounded twice elsewhere may be fused.

        With 128 registers a multiprocessor holds two programs of 256 threads, and one of them works where one waits.
        """
        return {"num_warps": max(1, self.rows * self.padded // 512), "maxnreg": 128}

    @property
    def room(self) -> int:
        """Codes that have to wait at a time."""
        return min(self.blocks, self.chunk) * self.values

    @property
    def chunk(self) -> int:
        """Blocks at a time; the codes of a multiple of 8 begin with a byte."""
        return max(self.rows, 8, _CODES // self.values // 8 * 8)

    @property
    def constants(self) -> dict[str, Any]:
        """Of all kernels."""
        return {"L": self.padded, "KEEP": self.keep, "LISTED": self.listed, "BITS": self.bits}

    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Where blocks begin in the vector, length and number, how many codes, and where later planes begin."""
        codes = self.blocks * self.values
        return self.start, self.length, self.blocks, codes, *later_planes(codes, self.bits)


@cache
def waves(length: int, device: torch.device) -> Tensor:
    """``exp(-2 pi i k / length)``, real parts first: ``[2, length / 2]``."""
    angles = torch.arange(length // 2, dtype=torch.float64) * (2 * math.pi / length)
    return torch.stack([angles.cos(), -angles.sin()]).float().to(device)


def measure(vector: Tensor, summands: Summands, errors: Tensor, sample: range, table: Tensor, shape: Shape) -> None:
    """Find how much each number of bits of mantissa would lose.

    Args:
        vector: float32 ``[n]``; what is meant is in it, or in the summands, see ``Summands``.
        summands: see there.
        errors: float64 ``[8, candidates]``, gets the sums of squared errors on every block of a sample, and is 0 below.
        sample: the blocks.
        table: from ``waves``.
        shape: of the first blocks.
    """
    first, second, both = sources(vector, summands)
    warps = max(1, shape.padded // 512)
    coefficients_triton.measure[(len(sample), errors.shape[1])](
        first, second, errors, table, sample.step, shape.start, shape.length, **shape.constants, SUM=both,
        num_warps=warps,
    )  # fmt: skip


def encode(
    vector: Tensor, summands: Summands, message: Tensor, errors: Tensor, table: Tensor, room: Tensor, shape: Shape
) -> None:
    """Move the largest coefficients of blocks into the message; ``vector`` gets what stays.

    Args:
        vector: see ``measure``, as the others.
        summands: see there.
        message: uint8, of which everything about these blocks is overwritten.
        errors: see there.
        table: see there.
        room: int32, ``shape.room`` at least.
        shape: of these blocks.
    """
    first, second, both = sources(vector, summands)
    ranges = float_view(message, shape.ranges, 3 * shape.blocks)
    parts = message, ranges, message[shape.where :], message[shape.codes :]
    starts = shape.where, shape.codes, shape.stop
    gaps = [number for pair in zip(shape.ends, starts, strict=True) for number in pair]
    start, length, blocks, codes, middle, last = shape.numbers()
    for base in range(0, blocks, shape.chunk):
        some = min(blocks - base, shape.chunk)
        coefficients_triton.encode[(triton.cdiv(some, shape.rows),)](
            first, second, vector, *parts, room, errors, table, start, length, base, blocks, *gaps, **shape.constants,
            ROWS=shape.rows, MANTISSA=shape.mantissa, SAMPLE=errors.shape[0], TRIED=errors.shape[1], SUM=both,
            WHOLE=shape.length == shape.padded and blocks % shape.rows == 0, HEAD=shape.ranges == 16, **shape.options,
        )  # fmt: skip
        coefficients_triton.pack[(triton.cdiv(some * shape.values, _PACKED),)](
            room, parts[3], some * shape.values, base * shape.values, codes, middle, last, _PACKED, shape.bits
        )


def decode(messages: Tensor, out: Tensor, weight: float, accumulate: bool, table: Tensor, shape: Shape) -> None:
    """Write, or add, ``weight`` times the sum of messages ``[M, size]``, whose rows may be strided; see ``encode``."""
    ranges = float_view(messages, shape.ranges, 3 * shape.blocks)
    header = float_view(messages, 0, 1)
    parts = header, ranges, header.stride(0), messages[:, shape.where :], messages[:, shape.codes :], messages.stride(0)
    coefficients_triton.decode[(triton.cdiv(shape.blocks, shape.rows),)](
        *parts, out, weight, table, *shape.numbers(), **shape.constants, ROWS=shape.rows, ADD=accumulate,
        MESSAGES=len(messages), WHOLE=shape.length == shape.padded and shape.blocks % shape.rows == 0, **shape.options,
    )  # fmt: skip
