"""GPU kernels of ``fft.py``: a block is encoded or decoded in one pass.

Transforms round differently than on a CPU, so messages agree up to rounding, not bit for bit.
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
from lightning_compress.core.source import Source
from lightning_compress.core.workspace import scratch
from lightning_compress.kernels.triton.launch import float_view

LONGEST = 8192
"""Largest number of elements of a block, because one program holds it in registers."""
_TILE = 2048
"""Elements that a program handles: several blocks if they are shorter."""
_LEAST_TILE = 128
"""Least of them: a compiled program in which threads of a warp hold copies of a number chose other coefficients."""
_CODES = 1 << 24
"""Largest number of codes that wait to be packed: 64 MiB."""
_PACKED = 2048
"""Codes that a program packs."""


@dataclass(frozen=True)
class _Launch:
    """Launch parameters of blocks of one length.

    Args:
        area: the blocks; their padded length is at most ``LONGEST``.
        table: from ``waves``.
    """

    area: Area
    table: Tensor

    @property
    def rows(self) -> int:
        """Blocks that a program handles."""
        return max(self.least_rows, min(_TILE // self.area.padded, triton.next_power_of_2(self.area.blocks)))

    @property
    def least_rows(self) -> int:
        """Least number of rows of a program; those beyond the last block are not written."""
        return max(1, _LEAST_TILE // self.area.padded)

    @property
    def options(self) -> dict[str, Any]:
        """Launch options: a thread holds 16 elements. Unlike in other kernels, fused multiply-add is allowed.

        With 128 registers per thread, a multiprocessor holds two programs of 256 threads: one computes while the other
        waits for memory.
        """
        return {"num_warps": max(1, self.rows * self.area.padded // 512), "maxnreg": 128}

    @property
    def room(self) -> int:
        """Largest number of codes that wait to be packed."""
        return min(self.area.blocks, self.chunk) * self.area.values

    @property
    def chunk(self) -> int:
        """Blocks per launch. The codes of a multiple of 8 blocks fill whole bytes."""
        return max(self.rows, 8, _CODES // self.area.values // 8 * 8)

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of all kernels."""
        places = self.area.places
        return {"L": self.area.padded, "KEEP": places.keep, "LISTED": places.listed, "BITS": self.area.bits}

    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Return start, length and number of the blocks, the number of codes, and the offsets of the later planes."""
        area, codes = self.area, self.area.blocks * self.area.values
        return area.start, area.length, area.blocks, codes, *later_planes(codes, area.bits)

    @property
    def packs(self) -> bool:
        """True if the codes of a program fill whole bytes, so that it can pack them itself."""
        return self.rows * self.area.values % 8 == 0 or self.area.blocks <= self.rows

    @property
    def whole(self) -> bool:
        """True if every program has all of its blocks, and every block all of its elements."""
        return self.area.length == self.area.padded and self.area.blocks % self.rows == 0


@cache
def waves(length: int, device: torch.device) -> Tensor:
    """Return ``exp(-2 pi i k / length)``, real parts first: float32 ``[2, length / 2]``."""
    angles = torch.arange(length // 2, dtype=torch.float64) * (2 * math.pi / length)
    return torch.stack([angles.cos(), -angles.sin()]).float().to(device)


class Spectra:
    """Moves the largest coefficients of blocks into messages; see ``Kernel``.

    Args:
        areas: the vector's blocks.
        mantissa: bits of mantissa, or -1 for those with the least error on a sample of the first area.
        tried: number of candidates.
        device: device of the vectors.
    """

    def __init__(self, areas: Sequence[Area], mantissa: int, tried: int, device: torch.device) -> None:
        self._launches = [_Launch(area, waves(area.padded, device)) for area in areas]
        self._mantissa = mantissa
        room = max((launch.room for launch in self._launches), default=0)
        self._room = scratch("spectrum codes", room, torch.int32, device)
        self._errors = torch.zeros(SAMPLE, tried, dtype=torch.float64, device=device)

    def encode(self, source: Source, rest: Tensor | None, message: Tensor, stream: Stream) -> None:
        """See ``Kernel``."""
        (first, second, vector), added, _ = source.pointers(rest)
        if self._mantissa < 0:
            self._measure(first, second, added)
        for launch in self._launches:
            self._encode(vector, first, second, added, message, launch)

    def _measure(self, first: Tensor, second: Tensor, both: bool) -> None:
        """Measure the error of each candidate on the sample. Errors of rows beyond the sample stay 0."""
        launch, errors = self._launches[0], self._errors
        area = launch.area
        coefficients_triton.measure[(len(area.sample), errors.shape[1])](
            first, second, errors, launch.table, area.sample.step, area.start, area.length, **launch.constants,
            ROWS=launch.least_rows, SUM=both, num_warps=max(1, area.padded // 512),
        )  # fmt: skip

    def _encode(
        self, vector: Tensor, first: Tensor, second: Tensor, both: bool, message: Tensor, launch: _Launch
    ) -> None:
        area, errors = launch.area, self._errors
        ranges = float_view(message, area.ranges.start, 3 * area.blocks)
        parts = message, ranges, message[area.where :], message[area.codes :]
        gaps = [edge for gap in area.gaps for edge in (gap.start, gap.stop)]
        start, length, blocks, *planes = launch.numbers()
        for base in range(0, blocks, launch.chunk):
            some = min(blocks - base, launch.chunk)
            coefficients_triton.encode[(triton.cdiv(some, launch.rows),)](
                first, second, vector, *parts, self._room, errors, launch.table,
                start, length, base, blocks, *planes, *gaps, **launch.constants, **launch.options,
                ROWS=launch.rows, MANTISSA=self._mantissa, SAMPLE=errors.shape[0], TRIED=errors.shape[1],
                SUM=both, WHOLE=launch.whole, HEAD=area.ranges.start == 16, PACK=launch.packs,
            )  # fmt: skip
            if not launch.packs:
                coefficients_triton.pack[(triton.cdiv(some * area.values, _PACKED),)](
                    self._room, parts[3], some * area.values, base * area.values, *planes, _PACKED, area.bits
                )

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        header = float_view(messages, 0, 1)
        for launch in self._launches:
            area = launch.area
            ranges = float_view(messages, area.ranges.start, 3 * area.blocks)
            codes = messages[:, area.where :], messages[:, area.codes :], messages.stride(0)
            coefficients_triton.decode[(triton.cdiv(area.blocks, launch.rows),)](
                header, ranges, header.stride(0), *codes, out, weight, launch.table, *launch.numbers(),
                **launch.constants, ROWS=launch.rows, ADD=accumulate, MESSAGES=len(messages), WHOLE=launch.whole,
                **launch.options,
            )  # fmt: skip
