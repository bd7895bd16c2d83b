"""Block quantisation after a random rotation, which spreads large elements over their block."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.base import Codec, Plan, aligned
from lightning_compress.codecs.buffers import check, scratch
from lightning_compress.codecs.hadamard import Hadamard
from lightning_compress.codecs.quantise import Quantiser
from lightning_compress.codecs.randomness import RandomBits, word_state
from lightning_compress.layout import Layout

RUN = 1 << 18
"""Elements that are cut into blocks together, in the message's format: what they need fits a CPU's caches."""
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

    Elements are taken in runs of 2^18 (the last one shorter, filled up with zeros to whole blocks); a run of b blocks
    is a matrix of n rows and b columns, row by row, and its columns are the blocks. A vector that is shorter than a
    block is one block of the next power of two. A message is every block's m as float32, zeros up to a multiple of 16
    bytes, then q of the matrices, as two's complements in planes of 4, 2 and 1 bits of all of them (8 bits are one
    plane), the first one lowest: ``bits + 32 / block`` bits per element, and up to a block of filling. A block
    with m below 2^-100 or above 2^110 sends zeros and stays.

    Args:
        bits: 2 (the expected squared error is 0.7 of normal data's squared norm) over 4 (0.028) to 8 (1e-4); 4 and
            more are within 0.4 % of dense in training with SGD and with AdamW (``docs/results.md``).
        block: elements that are rotated together and share a scale; a power of two from 64 (half a bit each for the
            scale) to 8192 (slowest). Smaller ones have smaller m on normal data, and larger ones spread an outlier
            further: on normal data 128 to 512 have the least error for the bits in all.
        seed: which signs are flipped; any integer, the same on all ranks.

    Raises:
        ValueError: a setting is none of these.

    Suresh, Yu, Kumar, McMahan, "Distributed Mean Estimation with Limited Communication", ICML 2017, arXiv 1611.00429
    (stochastic rotated quantisation; there between each block's minimum and maximum, here symmetric).
    """

    bits: int = 4
    block: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
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

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return _RotatedPlan(layout, device, self)


class _RotatedPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, codec: Rotated) -> None:
        super().__init__(layout)
        block = min(codec.block, max(8, 1 << (layout.numel - 1).bit_length())) if layout.numel else codec.block
        self._blocks = -(-layout.numel // block)
        self._header = 4 * self._blocks
        self._body = aligned(self._header)
        columns = max(1, min(RUN // block, self._blocks))
        self._quantiser = Quantiser(codec.bits, 0.5, self._blocks * block, columns * block, device)
        self.message_size = self._body + self._quantiser.size
        self._norms = torch.empty(self._blocks, dtype=torch.float32, device=device)
        signs = _signs(codec.seed, block, device)
        whole = layout.numel // (columns * block)
        main = Hadamard(block, columns, device)
        self._pieces = [_Piece(part * columns, columns * block, main, signs) for part in range(whole)]
        fast = kernels.of(device) if whole and columns % kernels.TILE == 0 else None
        self._fast = _Fast(fast.rotation, self._quantiser, signs, columns) if fast else None
        done = whole * columns
        if done < self._blocks:
            rest = Hadamard(block, self._blocks - done, device)
            self._pieces.append(_Piece(done, layout.numel - done * block, rest, signs))

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        check(vector, message, self.layout.numel, self.message_size)
        for piece in self._pieces:
            part = vector[piece.elements]
            if self._fast and piece.whole:
                self._fast.encode(part, piece, key, message[self._body :], self._norms[piece.blocks])
                continue
            coefficients = piece.rotate(part)
            largest = torch.maximum(coefficients.amax(dim=0), coefficients.amin(dim=0).neg_())
            norms, factors = self._quantiser.fit(largest.double(), LARGEST)
            self._norms[piece.blocks] = norms
            numbers = self._quantiser.encode(coefficients, factors, piece.numbers, key, message[self._body :])
            torch.mul(numbers, self._quantiser.steps(norms), out=piece.hadamard.matrix)
            piece.add_back(part, -1.0)
        message[: self._header] = self._norms.view(torch.uint8)
        message[self._header : self._body] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        check(out, messages, self.layout.numel, self.message_size)
        if not accumulate:
            out.zero_()
        norms = messages[:, : self._header].clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
        steps = self._quantiser.steps(norms).mul_(weight).view(len(messages), self._blocks)
        for piece in self._pieces if len(messages) else ():
            if self._fast and piece.whole:
                self._fast.decode(messages[:, self._body :], piece, steps[:, piece.blocks], out[piece.elements])
                continue
            total = piece.hadamard.matrix
            for index, (message, step) in enumerate(zip(messages, steps[:, piece.blocks], strict=True)):
                numbers = self._quantiser.decode(message[self._body :], piece.numbers, total.shape)
                if index:
                    total.addcmul_(numbers, step)
                else:
                    torch.mul(numbers, step, out=total)
            piece.add_back(out[piece.elements], 1.0)


class _Fast:
    """The same by a kernel: each number is touched in memory once.

    Args:
        kernel: ``kernels/rotation.py``.
        quantiser: rounds.
        signs: float32 ``[block, 1]``.
        columns: blocks of a piece, a multiple of ``TILE``.
    """

    def __init__(self, kernel: ModuleType, quantiser: Quantiser, signs: Tensor, columns: int) -> None:
        self._kernel, self._quantiser = kernel, quantiser
        self._signs, numel = signs.view(-1).numpy(), len(signs) * columns
        self._nibbles, cpu = quantiser.sign == 8, torch.device("cpu")
        self._codes = scratch("rotated codes", 0 if self._nibbles else numel, torch.uint8, cpu)
        self._tiles = scratch("rotated tiles", kernel.SIDE * kernel.TILE * len(signs), torch.float32, cpu).numpy()

    def encode(self, part: Tensor, piece: _Piece, key: int, body: Tensor, norms: Tensor) -> None:
        top, shift = self._quantiser.top, np.float32(self._quantiser.shift)
        state = np.uint64(word_state(key, piece.numbers.start))
        codes = body[self._bytes(piece)] if self._nibbles else self._codes
        spread = part.numpy(), self._signs, top, shift, LARGEST, state
        self._kernel.encode(*spread, codes.numpy(), self._nibbles, norms.numpy(), self._tiles)
        if not self._nibbles:
            self._quantiser.planes.write(codes, piece.numbers, body)

    def decode(self, bodies: Tensor, piece: _Piece, steps: Tensor, out: Tensor) -> None:
        codes = bodies[:, self._bytes(piece)]
        if not self._nibbles:
            numel = len(self._codes)
            codes = scratch("rotated messages", len(bodies) * numel, torch.uint8, out.device).view(len(bodies), numel)
            for own, body in zip(codes, bodies, strict=True):
                self._quantiser.planes.read(own, piece.numbers, body)
        sign, shift = np.int32(self._quantiser.sign), np.float32(self._quantiser.shift)
        sent = codes.numpy(), self._nibbles, sign, shift, steps.contiguous().numpy()
        self._kernel.decode(*sent, self._signs, out.numpy(), self._tiles)

    def _bytes(self, piece: _Piece) -> slice:
        """Where a piece's codes of four bits stand in a message's body."""
        return slice(piece.numbers.start // 2, piece.numbers.stop // 2)


class _Piece:
    """A run of blocks: the columns of a matrix that stands row by row in the vector.

    Args:
        first: its first block.
        numel: elements of the vector in it; fewer than the matrix has where zeros fill it up.
        hadamard: transforms its columns.
        signs: float32 ``[block, 1]``.
    """

    def __init__(self, first: int, numel: int, hadamard: Hadamard, signs: Tensor) -> None:
        block, columns = hadamard.matrix.shape
        self.blocks = slice(first, first + columns)
        self.elements = slice(first * block, first * block + numel)
        self.numbers = slice(first * block, (first + columns) * block)
        self.hadamard = hadamard
        self.whole = numel == hadamard.matrix.numel()
        self._signs, self._scaled = signs, signs / block

    def rotate(self, part: Tensor) -> Tensor:
        """Coefficients of the part's blocks, ``H D x / n``; in scratch."""
        matrix = self.hadamard.matrix
        if part.numel() == matrix.numel():
            torch.mul(part.view(matrix.shape), self._scaled, out=matrix)
        else:
            flat = matrix.view(-1)
            flat[: part.numel()] = part
            flat[part.numel() :] = 0
            matrix.mul_(self._scaled)
        self.hadamard.transform()
        return matrix

    def add_back(self, part: Tensor, factor: float) -> None:
        """Add ``factor * D H c`` for the coefficients in the transform's input."""
        self.hadamard.transform()
        matrix = self.hadamard.matrix
        if part.numel() == matrix.numel():
            part.view(matrix.shape).addcmul_(matrix, self._signs, value=factor)
        else:
            part.add_(matrix.mul_(self._signs).view(-1)[: part.numel()], alpha=factor)


def _signs(seed: int, block: int, device: torch.device) -> Tensor:
    """A random sign for each row of a matrix."""
    bits = RandomBits(block, device).draw(seed % 2**64, 0, block)
    return torch.where(bits >= 0, 1, -1).float().view(block, 1)
