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
from lightning_compress.codecs.quantize.levels import BITS, RUN, LevelPlan, Piece, check_correlated, more_bits
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits
from lightning_compress.core.workspace import scratch


def hadamard(matrices: Tensor) -> Tensor:
    """Multiply matrices in place by the Walsh-Hadamard matrix H, a Kronecker power of ``[[1, 1], [1, -1]]``.

    ``H H = rows * I``. Elements that are adjacent in memory belong to different columns, so every step adds long
    contiguous runs. Unlike in a matrix product, the order of the additions is fixed, so all devices get the same bits.

    Args:
        matrices: float32 ``[count, rows, columns]``, contiguous. ``rows`` is a power of two.

    Returns:
        ``matrices``.
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
"""Blocks of a run, part of the message format. A row fits a few vector registers, and a run fits the nearest cache."""
LARGEST = 2.0**110
"""A block with a larger coefficient is not sent, because sums of the inverse rotation might overflow."""


@dataclass(frozen=True)
class Rotated(Codec):
    """Rotate each block, round its coefficients to ``2^bits`` numbers, and rotate the sum of messages back.

    The coefficients of a block x of n elements are ``c = H D x / n``. H is the Walsh-Hadamard matrix. D flips signs, in
    the same way for every block, rank and step. The coefficients look like normal data whatever x looks like, so one
    large element does not waste the other elements' levels. With ``m = max|c|``, each coefficient is rounded up or down
    at random to a number ``m (2 q + 1) / (2^bits - 1)``, with q from ``-2^(bits-1)`` to ``2^(bits-1) - 1``, such that
    the mean is exact. The receiver sums the numbers of all messages and rotates once: ``D H c``. The method is
    unbiased. Rounding errors stay in the vector, for error feedback, which is off by default. No state.

    Elements are taken in runs of 16 blocks. The last run may have fewer blocks and is filled up with zeros to whole
    blocks. A run of b blocks is a matrix of n rows and b columns, stored row by row. Its columns are the blocks. A
    vector that is shorter than a block is one block, whose length is the next power of two.

    A message is every block's m as float32, zeros up to a multiple of 16 bytes, then q of all matrices as two's
    complements. These are stored in planes of 4, 2 and 1 bits of all elements (8 bits are one plane), the first element
    lowest. That is ``bits + 32 / block`` bits per element, plus at most one block of zeros. A block whose m is
    above 2^110, or below 2^-111 times the largest ``q + 1/2``, sends zeros and stays in the vector; without error
    feedback, it counts as zero. Normal data does below 2e-32 with the defaults, and below 1.3e-30 with the most bits in
    the largest blocks.

    Args:
        bits: 2 to 8. The expected squared error is 0.7 of the squared norm of normal data at 2 bits, 0.028 at 4 and
            1e-4 at 8. From 4 bits on, the loss of a character LSTM rises by at most 0.5 % on average with SGD
            and AdamW, more with embeddings of words and Adam: ``lightning-compress docs choose``.
        block: elements that are rotated together and share m: a power of two from 64 to 8192. Small blocks have a
            smaller m on normal data. Large blocks spread an outlier further, but are slower. 64 costs half a bit per
            element for m. On normal data, 128 to 512 have the least error at an equal total of bits.
        correlated: ranks round by random bits that they share, each at its own offset, in an order that is drawn in
            each step. If the ranks' values lie between the same two levels, their errors partly cancel. Each single
            message stays unbiased. It works where several messages are averaged: in ``all_gather``, ``run_length``, the
            first stage of ``two_shot`` (from 3 ranks on), and between nodes; but not for encoded sums. Useful for 2 to
            4 bits, where steps are wide. It costs no bytes and hardly any time.

    Raises:
        ValueError: a setting is out of range.

    Suresh, Yu, Kumar, McMahan, "Distributed Mean Estimation with Limited Communication", ICML 2017, arXiv 1611.00429
    (stochastic rotated quantisation; there between each block's minimum and maximum, here symmetric). Suresh, Sun, Ro,
    Yu, "Correlated Quantization for Distributed Mean Estimation and Optimization", ICML 2022, arXiv 2203.04925 (there
    with an order, and random bits within a rank's share, for each element; here a stream that all ranks shift).
    """

    name: ClassVar[str] = "rotated"
    bits: int = 4
    block: int = 256
    correlated: bool = False

    gone: ClassVar[dict[str, str]] = {"seed": "all runs have the same rotation; give seed= beside the compressor"}

    def __post_init__(self) -> None:
        check_correlated("Rotated", self.correlated)
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"Rotated(bits={self.bits!r}): bits must be an integer from 2 to 8; try 4")
        if not isinstance(self.block, int) or not 64 <= self.block <= 8192 or self.block & (self.block - 1):
            raise ValueError(f"Rotated(block={self.block!r}): block must be a power of two from 64 to 8192; try 256")

    @property
    def safe_with_adam(self) -> bool:
        """True from 4 bits on."""
        return self.bits >= 4

    def refined(self, ranks: int) -> Codec:
        """Return it with ``log2(ranks) / 2`` more bits, rounded up, or ``bf16`` if these are more than 8."""
        bits = self.bits + more_bits(ranks)
        return replace(self, bits=bits) if bits <= BITS else BF16()

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        fused = kernels.backend(__name__, device, "triton")
        if fused and self.block <= fused.LONGEST:
            block, count = _shape(layout.numel, self.block)
            body = aligned(4 * count)
            rest = scratch("rotated rest", COLUMNS * block, torch.float32, device)
            rotation = fused.Rotation(_signs(block, device).view(-1), rest, self.bits, body)
            return KernelPlan(layout, body + code_bytes(count * block, self.bits), rotation)
        return _RotatedPlan(layout, device, self)


class _RotatedPlan(LevelPlan):
    """Rounds matrices whose columns are the blocks. A piece is a sequence of matrices of equal shape."""

    def __init__(self, layout: Layout, device: torch.device, codec: Rotated) -> None:
        block, blocks = _shape(layout.numel, codec.block)
        self._signs = _signs(block, device)
        fast, arguments = kernels.backend(__name__, device, "numba"), None
        if fast:
            tile = scratch("rotated tile", COLUMNS * block, torch.float32, device)
            arguments = self._signs.view(-1).numpy(), np.float32(0.5), tile.numpy()
        parts = []
        for part in [slice(0, blocks)] if fast and blocks else _cut(layout.numel, block):
            count, numbers = part.stop - part.start, slice(part.start * block, part.stop * block)
            columns = min(COLUMNS, count)
            elements = slice(numbers.start, min(numbers.stop, layout.numel))
            parts.append(Piece(part, numbers, elements, (count // columns, block, columns), arguments))
        super().__init__(layout, device, codec.bits, 0.5, parts, fast, LARGEST)

    def norms_of(self, numbers: Tensor) -> Tensor:
        largest = numbers.abs()
        while largest.shape[1] > 1:  # by halves: torch's maximum over few columns is slow
            largest = torch.maximum(*largest.chunk(2, 1))
        return largest.double()

    def forward(self, part: Tensor, piece: Piece) -> Tensor:
        padded = torch.nn.functional.pad(part, (0, piece.numbers.stop - piece.elements.stop))
        return hadamard(padded.view(piece.shape) * (self._signs / len(self._signs)))

    def inverse(self, numbers: Tensor, piece: Piece) -> Tensor:
        return hadamard(numbers).mul_(self._signs).view(-1)[: piece.elements.stop - piece.elements.start]

    def add(self, part: Tensor, piece: Piece, numbers: Iterable[Tensor]) -> None:
        total = torch.zeros(piece.shape, dtype=torch.float32, device=part.device)
        for decoded in numbers:
            total += decoded
        part.add_(self.inverse(total, piece))


def _shape(numel: int, block: int) -> tuple[int, int]:
    """Return the length of a block and the number of blocks. A vector shorter than a block is one block."""
    if numel:
        block = min(block, max(8, 1 << (numel - 1).bit_length()))
    return block, -(-numel // block)


def _cut(numel: int, block: int) -> list[slice]:
    """Return slices of blocks: whole runs, as many as fit a cache, and then the last run if it is shorter."""
    whole, blocks, most = numel // (block * COLUMNS) * COLUMNS, -(-numel // block), RUN // block
    parts = [slice(first, min(first + most, whole)) for first in range(0, whole, most)]
    return parts + [slice(whole, blocks)] * (whole < blocks)


def _signs(block: int, device: torch.device) -> Tensor:
    """Return a random sign for each row of a matrix: float32 ``[block, 1]``."""
    bits = RandomBits(block, device).draw(0, 0, block)
    return torch.where(bits >= 0, 1, -1).float().view(block, 1)
