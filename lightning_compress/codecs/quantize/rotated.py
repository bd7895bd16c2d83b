"""Block quantisation after a random rotation, which spreads large elements over their block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.cast import BF16
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan, aligned
from lightning_compress.codecs.packing.planes import code_bytes
from lightning_compress.codecs.quantize.levels import BITS, LevelPlan, Piece, check_correlated, more_bits
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits
from lightning_compress.core.workspace import scratch


def hadamard(matrices: Tensor) -> Tensor:
    """Replace some matrices, in place, by ``H x`` for every column, ``H = [[1, 1], [1, -1]]`` to a Kronecker power.

    Applied twice it is ``rows * I``. Neighbours in memory belong to different columns, so that every step adds long
    contiguous runs. The order of the additions is fixed, as a matrix product's is not: every device finds the same
    bits.

    Args:
        matrices: float32 ``[count, rows, columns]``, contiguous; rows are a power of two.
    """
    count, rows, columns = matrices.shape
    run = 1
    while run < rows:
        upper, lower = matrices.view(count, -1, 2, run, columns).unbind(2)
        upper.add_(lower)
        torch.sub(upper, lower, alpha=2, out=lower)  # (a + b) - 2 b
        run *= 2
    return matrices


COLUMNS = 16
"""Blocks of a run, in the message's format: a vector register or a few hold a row, and the nearest cache a run."""
RUN = 1 << 18
"""Elements that tensor operations handle at a time: what they need fits a CPU's caches."""
LARGEST = 2.0**110
"""Blocks with a larger coefficient stay: the sums of the way back might overflow."""


@dataclass(frozen=True)
class Rotated(Codec):
    """Rotate each block, round the coefficients to ``2^bits`` numbers, and let the receiver rotate the sum back.

    The coefficients of a block x of n elements are ``c = H D x / n``: D flips signs, the same
    for every block, rank and step; H is the Walsh-Hadamard matrix. They look like normal data whatever x looks like, so
    that one large element does not take all levels. With ``m = max|c|``, each is rounded at random, up or down, to a
    number ``m (2 q + 1) / (2^bits - 1)``, q from ``-2^(bits-1)`` to ``2^(bits-1) - 1``, such that the mean is exact. A
    receiver adds up all messages' numbers and rotates once: ``D H c``. The method is unbiased; what rounding did stays
    in the vector, where error feedback, off by default, would find it. No state.

    Elements are taken in runs of 16 blocks (the last one shorter, filled up with zeros to whole blocks); a run of b
    blocks is a matrix of n rows and b columns, row by row, and its columns are the blocks. A vector that is shorter
    than a block is one block of the next power of two. A message is every block's m as float32, zeros up to a multiple
    of 16 bytes, then q of the matrices, as two's complements in planes of 4, 2 and 1 bits of all of them (8 bits are
    one plane), the first one lowest: ``bits + 32 / block`` bits per element, and up to a block of filling. A block
    with m below 2^-100 or above 2^110 sends zeros and stays.

    Args:
        bits: 2 (the expected squared error is 0.7 of normal data's squared norm) over 4 (0.028) to 8 (1e-4); 4 and
            more cost half a percent at most on average, with SGD and with AdamW (``docs/results.md``).
        block: elements that are rotated together and share a scale; a power of two from 64 (half a bit each for the
            scale) to 8192 (slowest). Smaller ones have smaller m on normal data, and larger ones spread an outlier
            further: on normal data 128 to 512 have the least error for the bits in all.
        correlated: ranks round by random bits that they share, each at another offset, in an order that is drawn in
            each step: where their numbers lie between the same two levels, their errors cancel in part, and one rank's
            message is as right on average as it was. Of several messages for one mean, so in ``all_gather``,
            ``run_length``, the first stage of ``two_shot`` (from 3 ranks on), and between nodes; encoding a sum is one
            rank's work. For 2 to 4 bits, where steps are wide; no bytes and hardly any time.

    Raises:
        ValueError: a setting is none of these.

    Suresh, Yu, Kumar, McMahan, "Distributed Mean Estimation with Limited Communication", ICML 2017, arXiv 1611.00429
    (stochastic rotated quantisation; there between each block's minimum and maximum, here symmetric). Suresh, Sun, Ro,
    Yu, "Correlated Quantization for Distributed Mean Estimation and Optimization", ICML 2022, arXiv 2203.04925 (there
    with an order, and random bits within a rank's share, for each element; here a stream that all ranks shift).
    """

    name: ClassVar[str] = "rotated"
    bits: int = 4
    block: int = 256
    correlated: bool = False

    gone: ClassVar[dict[str, str]] = {"seed": "the rotation is one; seed= beside the compressor draws all the rest"}

    def __post_init__(self) -> None:
        check_correlated("Rotated", self.correlated)
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"Rotated(bits={self.bits!r}): bits must be an integer from 2 to 8; try 4")
        if not isinstance(self.block, int) or not 64 <= self.block <= 8192 or self.block & (self.block - 1):
            raise ValueError(f"Rotated(block={self.block!r}): block must be a power of two from 64 to 8192; try 256")

    @property
    def safe_with_adam(self) -> bool:
        """From 4 bits on."""
        return self.bits >= 4

    def refined(self, ranks: int) -> Codec:
        """See ``Codec.refined``: half of log2 of the ranks more bits; ``bf16`` where that is more than 8."""
        bits = self.bits + more_bits(ranks)
        return replace(self, bits=bits) if bits <= BITS else BF16()

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        fused = kernels.backend(__name__, device, "triton")
        if fused and self.block <= fused.LONGEST:
            block, count = _shape(layout.numel, self.block)
            body = aligned(4 * count)
            rest = scratch("rotated rest", COLUMNS * block, torch.float32, device)
            rotation = fused.Rotation(_signs(block, device).view(-1), rest, self.bits, body)
            return KernelPlan(layout, body + code_bytes(count * block, self.bits), rotation)
        return _RotatedPlan(layout, device, self)


class _RotatedPlan(LevelPlan):
    """Pieces are equal matrices, which stand one after the other in the vector, and whose columns are the blocks."""

    def __init__(self, layout: Layout, device: torch.device, codec: Rotated) -> None:
        block, blocks = _shape(layout.numel, codec.block)
        self._signs = _signs(block, device)
        fast, told = kernels.backend(__name__, device, "numba"), None
        if fast:
            tile = scratch("rotated tile", COLUMNS * block, torch.float32, device)
            told = self._signs.view(-1).numpy(), np.float32(0.5), tile.numpy()
        whole = fast and codec.bits == 4 and blocks
        found = []
        for part in [slice(0, blocks)] if whole else _cut(layout.numel, block):
            count, numbers = part.stop - part.start, slice(part.start * block, part.stop * block)
            columns = min(COLUMNS, count)
            elements = slice(numbers.start, min(numbers.stop, layout.numel))
            found.append(Piece(part, numbers, elements, (count // columns, block, columns), told))
        super().__init__(layout, device, codec.bits, 0.5, found, fast, LARGEST)

    def norms_of(self, numbers: Tensor) -> Tensor:
        largest = numbers.abs()
        while largest.shape[1] > 1:  # by halves: torch has no fast maximum over rows of few columns
            largest = torch.maximum(*largest.chunk(2, 1))
        return largest.double()

    def forward(self, part: Tensor, piece: Piece) -> Tensor:
        padded = torch.nn.functional.pad(part, (0, piece.numbers.stop - piece.elements.stop))
        return hadamard(padded.view(piece.shape) * (self._signs / len(self._signs)))

    def inverse(self, numbers: Tensor, piece: Piece) -> Tensor:
        return hadamard(numbers).mul_(self._signs).view(-1)[: piece.elements.stop - piece.elements.start]

    def add(self, part: Tensor, piece: Piece, numbers: Iterable[Tensor]) -> None:
        total = torch.zeros(piece.shape, device=part.device)
        for each in numbers:
            total += each
        part.add_(self.inverse(total, piece))


def _shape(numel: int, block: int) -> tuple[int, int]:
    """The elements of a block, and how many blocks there are; a vector that is shorter than one is one."""
    if numel:
        block = min(block, max(8, 1 << (numel - 1).bit_length()))
    return block, -(-numel // block)


def _cut(numel: int, block: int) -> list[slice]:
    """Whole runs that fit a cache, and the rest."""
    whole, blocks, most = numel // (block * COLUMNS) * COLUMNS, -(-numel // block), RUN // block
    parts = [slice(first, min(first + most, whole)) for first in range(0, whole, most)]
    return parts + [slice(whole, blocks)] * (whole < blocks)


def _signs(block: int, device: torch.device) -> Tensor:
    """A random sign for each row of a matrix."""
    bits = RandomBits(block, device).draw(0, 0, block)
    return torch.where(bits >= 0, 1, -1).float().view(block, 1)
