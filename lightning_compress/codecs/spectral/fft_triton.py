"""The largest coefficients of every block's spectrum, all in one pass; see ``fft.py``.

The transforms are rounded otherwise than on a CPU, so messages agree within rounding, not to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_compress.codecs.packing.planes_triton import later_planes
from lightning_compress.codecs.spectral import coefficients_triton
from lightning_compress.codecs.spectral.spectrum import SAMPLE, Area
from lightning_compress.core.random import Stream
from lightning_compress.core.workspace import scratch
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
class _Blocks:
    """How blocks of one length are worked on.

    Args:
        area: where they are; filled up to ``LONGEST`` at most.
        table: from ``waves``.
    """

    area: Area
    table: Tensor

    @property
    def rows(self) -> int:
        """Blocks that a program handles."""
        return max(1, min(_TILE // self.area.padded, triton.next_power_of_2(self.area.blocks)))

    @property
    def options(self) -> dict[str, Any]:
        """What kernels are launched with: a thread has 16 elements. What is rounded twice elsewhere may be fused.

        With 128 registers a multiprocessor holds two programs of 256 threads, and one of them works where one waits.
        """
        return {"num_warps": max(1, self.rows * self.area.padded // 512), "maxnreg": 128}

    @property
    def room(self) -> int:
        """Codes that have to wait at a time."""
        return min(self.area.blocks, self.chunk) * self.area.values

    @property
    def chunk(self) -> int:
        """Blocks at a time; the codes of a multiple of 8 begin with a byte."""
        return max(self.rows, 8, _CODES // self.area.values // 8 * 8)

    @property
    def constants(self) -> dict[str, Any]:
        """Of all kernels."""
        places = self.area.places
        return {"L": self.area.padded, "KEEP": places.keep, "LISTED": places.listed, "BITS": self.area.bits}

    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Where blocks begin in the vector, length and number, how many codes, and where later planes begin."""
        area, codes = self.area, self.area.blocks * self.area.values
        return area.start, area.length, area.blocks, codes, *later_planes(codes, area.bits)

    @property
    def whole(self) -> bool:
        """Every program has all of its blocks, and these all of their elements."""
        return self.area.length == self.area.padded and self.area.blocks % self.rows == 0


@cache
def waves(length: int, device: torch.device) -> Tensor:
    """``exp(-2 pi i k / length)``, real parts first: ``[2, length / 2]``."""
    angles = torch.arange(length // 2, dtype=torch.float64) * (2 * math.pi / length)
    return torch.stack([angles.cos(), -angles.sin()]).float().to(device)


class Spectra:
    """Moves the largest coefficients of blocks into messages; see ``Kernel``.

    Args:
        areas: the vector's blocks.
        mantissa: bits of mantissa, or -1: those with the least errors on a sample of the first area.
        tried: how many bits of mantissa are.
        device: where.
    """

    def __init__(self, areas: Sequence[Area], mantissa: int, tried: int, device: torch.device) -> None:
        self._areas = [_Blocks(area, waves(area.padded, device)) for area in areas]
        self._mantissa = mantissa
        room = max((blocks.room for blocks in self._areas), default=0)
        self._room = scratch("spectrum codes", room, torch.int32, device)
        self._errors = torch.zeros(SAMPLE, tried, dtype=torch.float64, device=device)

    def encode(self, vector: Tensor, summands: Summands, message: Tensor, stream: Stream, keep: bool) -> None:
        """See ``Kernel``."""
        given = sources(vector, summands)
        if self._mantissa < 0:
            self._measure(*given)
        for blocks in self._areas:
            self._encode(vector, *given, message, blocks)

    def _measure(self, first: Tensor, second: Tensor, both: bool) -> None:
        """Find how much each number of bits of mantissa would lose; sums of blocks that are not looked at stay 0."""
        blocks, errors = self._areas[0], self._errors
        area = blocks.area
        coefficients_triton.measure[(len(area.sample), errors.shape[1])](
            first, second, errors, blocks.table, area.sample.step, area.start, area.length, **blocks.constants,
            SUM=both, num_warps=max(1, area.padded // 512),
        )  # fmt: skip

    def _encode(self, vector: Tensor, first: Tensor, second: Tensor, both: bool, message: Tensor, one: _Blocks) -> None:
        area, errors = one.area, self._errors
        ranges = float_view(message, area.ranges.start, 3 * area.blocks)
        parts = message, ranges, message[area.where :], message[area.codes :]
        gaps = [edge for gap in area.gaps for edge in (gap.start, gap.stop)]
        start, length, blocks, codes, middle, last = one.numbers()
        for base in range(0, blocks, one.chunk):
            some = min(blocks - base, one.chunk)
            coefficients_triton.encode[(triton.cdiv(some, one.rows),)](
                first, second, vector, *parts, self._room, errors, one.table, start, length, base, blocks, *gaps,
                **one.constants, ROWS=one.rows, MANTISSA=self._mantissa, SAMPLE=errors.shape[0],
                TRIED=errors.shape[1], SUM=both, WHOLE=one.whole, HEAD=area.ranges.start == 16, **one.options,
            )  # fmt: skip
            coefficients_triton.pack[(triton.cdiv(some * area.values, _PACKED),)](
                self._room, parts[3], some * area.values, base * area.values, codes, middle, last, _PACKED, area.bits
            )

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        header = float_view(messages, 0, 1)
        for one in self._areas:
            area = one.area
            ranges = float_view(messages, area.ranges.start, 3 * area.blocks)
            codes = messages[:, area.where :], messages[:, area.codes :], messages.stride(0)
            coefficients_triton.decode[(triton.cdiv(area.blocks, one.rows),)](
                header, ranges, header.stride(0), *codes, out, weight, one.table, *one.numbers(), **one.constants,
                ROWS=one.rows, ADD=accumulate, MESSAGES=len(messages), WHOLE=one.whole, **one.options,
            )  # fmt: skip
