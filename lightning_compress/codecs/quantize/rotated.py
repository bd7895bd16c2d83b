"""Block quantisation after a random rotation, which spreads large elements over their block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.base import Codec, FusedPlan, KernelPlan, Plan, Summands, aligned
from lightning_compress.codecs.cast import BF16
from lightning_compress.codecs.packing.planes import code_bytes
from lightning_compress.codecs.quantize.levels import BITS, Quantiser, check_correlated, more_bits
from lightning_compress.core.buffers import scratch
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits, Stream, word_state


class Hadamard:
    """``H x`` for every column of some matrices, ``H = [[1, 1], [1, -1]]`` to a Kronecker power; ``H H = rows * I``.

    Neighbours in memory belong to different columns, so that every step adds long contiguous runs. The order of the
    additions is fixed, as a matrix product's is not: every device finds the same bits.

    Args:
        shape: how many matrices, their rows (a power of two), and their columns.
        device: where.

    Attributes:
        matrices: float32 of this shape, to be filled by the caller; scratch.
        rows: the same memory, ``[rows, count * columns]``: the matrices stand side by side, so that runs are long.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        count, rows, columns = shape
        flat = scratch("hadamard", count * rows * columns, torch.float32, device)
        self.rows = flat.view(rows, count * columns)
        self.matrices = flat.view(rows, count, columns).transpose(0, 1)
        self._steps = []  # views are made once: making them costs as much as a step on a short run
        run = count * columns
        while run < flat.numel():
            pairs = flat.view(-1, 2, run)
            self._steps.append((pairs[:, 0], pairs[:, 1]))
            run *= 2

    def transform(self) -> None:
        """Replace the matrices by their transforms; in place, as twice as many would not fit the cache."""
        for upper, lower in self._steps:
            upper.add_(lower)
            torch.sub(upper, lower, alpha=2, out=lower)  # (a + b) - 2 b


COLUMNS = 16
"""Blocks of a run, in the message's format: a vector register or a few hold a row, and the nearest cache a run."""
RUN = 1 << 18
"""Elements that tensor operations handle at a time: what they need fits a CPU's caches."""
LARGEST = 2.0**110
"""Blocks with a larger coefficient stay: the sums of the way back might overflow."""


@dataclass(frozen=True)
class Rotated(Codec):
    """Rotate each block, round the coefficients to ``2^bits`` numbers, and let the receiver rotate the sum back.

    The coefficients of a block x of n elements are ``c = H D x / n``: D flips signs, drawn from ``seed`` and the same
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
        seed: which signs are flipped; any integer, the same on all ranks.
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
    seed: int = 0
    correlated: bool = False

    def __post_init__(self) -> None:
        check_correlated("Rotated", self.correlated)
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"Rotated(bits={self.bits!r}): bits must be an integer from 2 to 8; try 4")
        if not isinstance(self.block, int) or not 64 <= self.block <= 8192 or self.block & (self.block - 1):
            raise ValueError(f"Rotated(block={self.block!r}): block must be a power of two from 64 to 8192; try 256")
        if not isinstance(self.seed, int):
            raise ValueError(f"Rotated(seed={self.seed!r}): seed must be an integer; try 0")

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
            rotation = fused.Rotation(_signs(self.seed, block, device).view(-1), rest, self.bits, body)
            return KernelPlan(layout, body + code_bytes(count * block, self.bits), rotation)
        return _RotatedPlan(layout, device, self)


class _RotatedPlan(FusedPlan):
    def __init__(self, layout: Layout, device: torch.device, codec: Rotated) -> None:
        super().__init__(layout)
        block, self._blocks = _shape(layout.numel, codec.block)
        self._header = 4 * self._blocks
        self._body = aligned(self._header)
        pieces = [_Piece(blocks, block, layout.numel) for blocks in _cut(layout.numel, block)]
        most = max((piece.size for piece in pieces), default=0)
        self._quantiser = Quantiser(codec.bits, 0.5, self._blocks * block, most, device)
        self.message_size = self._body + self._quantiser.size
        self._norms = torch.empty(self._blocks, dtype=torch.float32, device=device)
        signs = _signs(codec.seed, block, device)
        fast = kernels.backend(__name__, device, "numba")
        if fast:
            whole = [_Piece(slice(0, self._blocks), block, layout.numel)]
            self._way: _Slow | _Fast = _Fast(fast, self._quantiser, signs, pieces, whole)
        else:
            self._way = _Slow(self._quantiser, signs, pieces)

    def encode(self, vector: Tensor, message: Tensor, key: int, keep: bool = True, summands: Summands = None) -> None:
        self.take(vector, message, summands)
        self._way.encode(vector, message[self._body :], self._norms, self.stream(key), keep)
        message[: self._header] = self._norms.view(torch.uint8)
        message[self._header : self._body] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        norms = messages[:, : self._header].clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
        steps = self._quantiser.steps(norms).mul_(weight).view(len(messages), self._blocks)
        self._way.decode(messages[:, self._body :], steps, out, accumulate)


class _Piece:
    """Blocks that are handled together: columns of equal matrices, which stand one after the other in the vector.

    Args:
        blocks: which ones.
        block: elements of a block.
        numel: elements of the vector; its last piece may have fewer than the matrices.
    """

    def __init__(self, blocks: slice, block: int, numel: int) -> None:
        count = blocks.stop - blocks.start
        self.blocks, self.size = blocks, count * block
        self.numbers = slice(blocks.start * block, blocks.stop * block)
        self.elements = slice(self.numbers.start, min(self.numbers.stop, numel))
        columns = min(COLUMNS, max(1, count))
        self.shape = count // columns, block, columns


class _Slow:
    """By tensor operations.

    Args:
        quantiser: rounds.
        signs: float32 ``[block, 1]``.
        pieces: what to handle at a time.
    """

    def __init__(self, quantiser: Quantiser, signs: Tensor, pieces: Sequence[_Piece]) -> None:
        self._quantiser, self._signs, self._scaled = quantiser, signs, signs / len(signs)
        self._pieces = [(piece, Hadamard(piece.shape, signs.device)) for piece in pieces]

    def encode(self, vector: Tensor, body: Tensor, norms: Tensor, stream: Stream, keep: bool) -> None:
        """Write codes and norms; take what they stand for out of the vector, or leave that as it is."""
        for piece, hadamard in self._pieces:
            part, matrices = vector[piece.elements], hadamard.matrices
            if part.numel() == piece.size:
                torch.mul(part.view(piece.shape), self._scaled, out=matrices)
            else:
                flat = matrices.view(-1)
                flat[: part.numel()] = part
                flat[part.numel() :] = 0
                matrices.mul_(self._scaled)
            hadamard.transform()
            largest = torch.maximum(hadamard.rows.amax(dim=0), hadamard.rows.amin(dim=0).neg_())
            own, factors = self._quantiser.fit(largest.double(), LARGEST)
            norms[piece.blocks] = own
            count, _, columns = piece.shape
            numbers = self._quantiser.encode(matrices, factors.view(count, 1, columns), piece.numbers, stream, body)
            if keep:
                torch.mul(numbers, self._quantiser.steps(own).view(count, 1, columns), out=matrices)
                self._add_back(hadamard, part, -1.0)

    def decode(self, bodies: Tensor, steps: Tensor, out: Tensor, accumulate: bool) -> None:
        """Write, or add, the sum of what codes stand for."""
        if not accumulate:
            out.zero_()
        for piece, hadamard in self._pieces if len(bodies) else ():
            count, _, columns = piece.shape
            for index, (body, step) in enumerate(zip(bodies, steps[:, piece.blocks], strict=True)):
                numbers = self._quantiser.decode(body, piece.numbers, piece.shape)
                if index:  # rounded twice, whatever the processor
                    hadamard.matrices.add_(numbers.mul_(step.view(count, 1, columns)))
                else:
                    torch.mul(numbers, step.view(count, 1, columns), out=hadamard.matrices)
            self._add_back(hadamard, out[piece.elements], 1.0)

    def _add_back(self, hadamard: Hadamard, part: Tensor, factor: float) -> None:
        """Add ``factor * D H c`` for the coefficients in the transform's input."""
        hadamard.transform()
        matrices = hadamard.matrices
        if part.numel() == matrices.numel():
            part.view(matrices.shape).addcmul_(matrices, self._signs, value=factor)
        else:
            part.add_(matrices.mul_(self._signs).view(-1)[: part.numel()], alpha=factor)


class _Fast:
    """The same by a kernel: each number is touched in memory once.

    Args:
        kernel: ``rotated_numba.py``.
        quantiser, signs, pieces: see ``_Slow``.
        whole: all in one piece, for codes of four bits, which the kernel packs.
    """

    def __init__(
        self,
        kernel: ModuleType,
        quantiser: Quantiser,
        signs: Tensor,
        pieces: Sequence[_Piece],
        whole: Sequence[_Piece],
    ) -> None:
        self._kernel, self._quantiser, self._signs = kernel, quantiser, signs.view(-1).numpy()
        self._nibbles = quantiser.sign == 8
        self._pieces = whole if self._nibbles else pieces
        most = 0 if self._nibbles else max((piece.size for piece in pieces), default=0)
        self._codes = scratch("rotated codes", most, torch.uint8, signs.device)
        self._tile = scratch("rotated tile", COLUMNS * len(signs), torch.float32, signs.device).numpy()

    def encode(self, vector: Tensor, body: Tensor, norms: Tensor, stream: Stream, keep: bool) -> None:
        """See ``_Slow``."""
        top, shift = self._quantiser.top, np.float32(self._quantiser.shift)
        for piece in self._pieces:
            codes = body if self._nibbles else self._codes[: piece.size]
            random = np.uint64(word_state(stream.key, piece.numbers.start)), np.int16(stream.offset)
            given = vector[piece.elements].numpy(), self._signs, top, shift, LARGEST, *random
            wanted = codes.numpy(), self._nibbles, norms[piece.blocks].numpy()
            self._kernel.encode(*given, *wanted, self._tile, keep)
            if not self._nibbles:
                self._quantiser.planes.write(codes, piece.numbers, body)

    def decode(self, bodies: Tensor, steps: Tensor, out: Tensor, accumulate: bool) -> None:
        """See ``_Slow``."""
        sign, shift = np.int32(self._quantiser.sign), np.float32(self._quantiser.shift)
        for piece in self._pieces:
            codes = bodies if self._nibbles else self._unpacked(bodies, piece)
            sent = codes.numpy(), self._nibbles, sign, shift, steps[:, piece.blocks].numpy()
            self._kernel.decode(*sent, self._signs, out[piece.elements].numpy(), self._tile, accumulate)

    def _unpacked(self, bodies: Tensor, piece: _Piece) -> Tensor:
        codes = scratch("rotated messages", len(bodies) * piece.size, torch.uint8, bodies.device)
        codes = codes.view(len(bodies), piece.size)
        for own, body in zip(codes, bodies, strict=True):
            self._quantiser.planes.read(own, piece.numbers, body)
        return codes


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


def _signs(seed: int, block: int, device: torch.device) -> Tensor:
    """A random sign for each row of a matrix."""
    bits = RandomBits(block, device).draw(seed % 2**64, 0, block)
    return torch.where(bits >= 0, 1, -1).float().view(block, 1)
