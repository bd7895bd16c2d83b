"""Stochastic rounding to evenly spaced levels, packed: what the codecs with a few bits per element share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.codec import FusedPlan, aligned
from lightning_compress.codecs.packing.planes import Planes
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits, Stream, word_state
from lightning_compress.core.workspace import scratch
from lightning_compress.kernels import Summands

SMALLEST, LARGEST = 2.0**-100, torch.finfo(torch.float32).max
BITS = 8
"""The most that a code of even levels has."""
UNIT = 1 << 16
"""Random numbers per level: the probability of rounding up is a multiple of 1 / UNIT."""


def more_bits(ranks: int) -> int:
    """Bits by which the variance of rounding to even levels falls to ``1 / ranks``: by 4 a bit, since steps halve."""
    return math.ceil(math.log2(ranks) / 2)


class Quantiser:
    """Rounds ``v / step`` to ``2^bits`` numbers or one fewer, evenly spaced around 0, and packs them.

    The numbers are ``level + shift`` with integer levels from ``-2^(bits-1)`` (or one more if shift is 0) to
    ``2^(bits-1) - 1``, stored as two's complements in planes (``codecs/packing/planes.py``). Rounding takes the lower
    neighbour or the upper one with probabilities that make the mean exact (to 2^-17 of a step), and leaves neighbours
    alone.

    Args:
        bits: 2 to 8.
        shift: 0.0 for numbers among which is 0, 0.5 for as many on either side.
        count: numbers in a message.
        most: numbers in the largest piece that is rounded at a time.
        device: where.

    Attributes:
        top, sign, shift: the largest number, the highest bit of a code, and as given.
        planes, size: where codes stand in a message, and how many bytes they take.
    """

    def __init__(self, bits: int, shift: float, count: int, most: int, device: torch.device) -> None:
        self.top = 2 ** (bits - 1) - 1 + shift
        self.planes = Planes(bits, count)
        self.size = self.planes.size
        self.sign, self.shift = 2 ** (bits - 1), shift
        self._codes = scratch("codes", -(-most // 8) * 8, torch.uint8, device)
        self._random = RandomBits(most, device)
        self._top = torch.tensor(self.top, dtype=torch.float32, device=device)

    def steps(self, norms: Tensor) -> Tensor:
        """The distance between two numbers of blocks with these norms; such that no number overflows."""
        steps: Tensor = norms / self._top  # by a number of Python's, an accelerator would multiply with its inverse
        return steps.clamp_(max=LARGEST / self.top * (1 - 2**-22))

    def encode(self, rows: Tensor, factors: Tensor, elements: slice, stream: Stream, body: Tensor) -> Tensor:
        """Round and pack.

        Args:
            rows: float32, contiguous.
            factors: from ``fit``, broadcast to ``rows``.
            elements: which numbers of the message these are; starts at a multiple of 8.
            stream: where the randomness comes from.
            body: uint8 ``[size]``, in which the bytes of these numbers are overwritten.

        Returns:
            The numbers, of the shape of ``rows``.
        """
        numel = rows.numel()
        random = self._random.draw(stream.key, elements.start, numel, stream.offset).view(rows.shape)
        # Random numbers are -32768 to 32767: brought to the middles of the UNIT parts of [0, 1).
        levels = (rows * factors).add_(random).mul_(1 / UNIT).add_(0.5 + 0.5 / UNIT - self.shift).floor_()
        codes = self._codes[: -(-numel // 8) * 8]
        codes.view(torch.int8)[:numel].view(rows.shape).copy_(levels)
        codes[numel:] = 0
        self.planes.write(codes, elements, body)
        return levels.add_(self.shift)

    def decode(self, body: Tensor, elements: slice, shape: tuple[int, ...]) -> Tensor:
        """The numbers of a message's piece, float32 of this shape."""
        numel = elements.stop - elements.start
        codes = self._codes[: -(-numel // 8) * 8]
        self.planes.read(codes, elements, body)
        codes.bitwise_xor_(self.sign).sub_(self.sign)  # extends the sign; uint8 wraps
        return codes.view(torch.int8)[:numel].view(shape).float().add_(self.shift)


class Piece(NamedTuple):
    """Blocks that are handled together.

    Attributes:
        blocks: which ones.
        numbers: which of the message's numbers these are.
        elements: of the vector; at its end there may be fewer than numbers.
        shape: of the numbers; a block is one along the second dimension.
        told: what a CPU's kernel is told besides; None where it cannot have this piece.
    """

    blocks: slice
    numbers: slice
    elements: slice
    shape: tuple[int, ...]
    told: tuple[Any, ...] | None


class LevelPlan(FusedPlan):
    """Blocks whose numbers are rounded to levels of their norm, by tensor operations or by the kernels of a CPU.

    A message is every block's norm as float32, zeros up to a multiple of 16 bytes, then the codes in planes.

    Args:
        layout: what the vector is made of.
        device: where it is.
        bits: see ``Quantiser``.
        shift: likewise.
        pieces: what to handle at a time, in order.
        fast: the kernels, which touch each number in memory once; codes of four bits they pack by themselves.
        largest: blocks with a larger norm are not sent.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        bits: int,
        shift: float,
        pieces: Sequence[Piece],
        fast: ModuleType | None,
        largest: float = LARGEST,
    ) -> None:
        super().__init__(layout)
        blocks, count = (pieces[-1].blocks.stop, pieces[-1].numbers.stop) if pieces else (0, 0)
        most = max((each.numbers.stop - each.numbers.start for each in pieces if each.told is None), default=0)
        self._pieces, self._fast, self._largest, self._nibbles = pieces, fast, largest, bits == 4
        self._quantiser = Quantiser(bits, shift, count, most, device)
        self._header = 4 * blocks
        self._body = aligned(self._header)
        self.message_size = self._body + self._quantiser.size
        self._norms = torch.empty(blocks, dtype=torch.float32, device=device)

    def encode(self, vector: Tensor, message: Tensor, key: int, keep: bool = True, summands: Summands = None) -> None:
        """See ``Plan.encode``."""
        self.take(vector, message, summands)
        stream, body = self.stream(key), message[self._body :]
        for piece in self._pieces:
            part, norms = vector[piece.elements], self._norms[piece.blocks]
            if self._fast and piece.told is not None:
                codes = self._room(body[None], piece)
                random = np.uint64(word_state(stream.key, piece.numbers.start)), np.int16(stream.offset)
                given = part.numpy(), *piece.told, self._quantiser.top, self._largest, *random
                self._fast.encode(*given, codes[0].numpy(), self._nibbles, norms.numpy(), keep)
                if not self._nibbles:
                    self._quantiser.planes.write(codes[0], piece.numbers, body)
                continue
            numbers = self.forward(part, piece)
            sent, factors = fit(self.norms_of(numbers), self._quantiser.top, self._largest)
            norms.copy_(sent.view(-1))
            numbers = self._quantiser.encode(numbers, factors, piece.numbers, stream, body)
            if keep:
                part.sub_(self.inverse(numbers.mul_(self._quantiser.steps(sent)), piece))
        message[: self._header] = self._norms.view(torch.uint8)
        message[self._header : self._body] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        norms = messages[:, : self._header].clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
        steps = self._quantiser.steps(norms).mul_(weight).view(len(messages), len(self._norms))
        bodies = messages[:, self._body :]
        for piece in self._pieces:
            part, own = out[piece.elements], steps[:, piece.blocks]
            if self._fast and piece.told is not None:
                codes = self._room(bodies, piece)
                for row, body in zip(codes, bodies, strict=True) if not self._nibbles else ():
                    self._quantiser.planes.read(row, piece.numbers, body)
                sent = codes.numpy(), self._nibbles, np.int32(self._quantiser.sign), own.numpy()
                self._fast.decode(*sent, *piece.told, part.numpy(), accumulate)
                continue
            if not accumulate:
                part.zero_()
            own = own.reshape(-1, piece.shape[0], 1, *piece.shape[2:])
            read = (self._quantiser.decode(body, piece.numbers, piece.shape) for body in bodies)
            self.add(part, piece, (numbers.mul_(step) for numbers, step in zip(read, own, strict=True)))

    def _room(self, bodies: Tensor, piece: Piece) -> Tensor:
        """Where a kernel finds the codes of a piece, or puts them; a row for each message."""
        start, stop = piece.numbers.start, piece.numbers.stop
        if self._nibbles:
            return bodies[:, start // 2 : stop // 2]
        room = scratch("codes of a kernel", len(bodies) * (stop - start), torch.uint8, bodies.device)
        return room.view(len(bodies), stop - start)

    @abstractmethod
    def norms_of(self, numbers: Tensor) -> Tensor:
        """Norms of the blocks of a piece, float64, 1 along the second dimension."""

    @abstractmethod
    def forward(self, part: Tensor, piece: Piece) -> Tensor:
        """The numbers of a piece, float32 of its shape, of the vector's elements."""

    @abstractmethod
    def inverse(self, numbers: Tensor, piece: Piece) -> Tensor:
        """The vector's elements, one-dimensional, again; the numbers may be lost."""

    @abstractmethod
    def add(self, part: Tensor, piece: Piece, numbers: Iterable[Tensor]) -> None:
        """Add what messages say of a piece's numbers, one after the other, to the vector's elements."""


def check_correlated(method: str, correlated: object) -> None:
    """Refuse what is no boolean.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(correlated, bool):
        raise ValueError(
            f"{method}(correlated={correlated!r}): it must be true (ranks round by random bits that they share, and "
            "their errors cancel in part) or false"
        )


def fit(norms: Tensor, top: float, largest: float = LARGEST) -> tuple[Tensor, Tensor]:
    """What to send for the norms of blocks, and what to multiply elements with.

    Args:
        norms: float64; at least the largest magnitude of each block.
        top: the largest number; see ``Quantiser``.
        largest: norms above it are sent as 0, as are those below 2^-100, so that the block stays as it is.

    Returns:
        float32 norms, and factors that bring elements to ``UNIT`` times the numbers' scale, never beyond top.
    """
    sent = norms.clamp(max=LARGEST).float()
    sent.masked_fill_((sent < SMALLEST) | (sent > largest), 0)
    exact = UNIT * top / sent.double()
    factors = exact.float()
    factors = torch.where(factors.double() > exact, factors.nextafter(factors.new_zeros(())), factors)
    return sent, factors.masked_fill_(sent == 0, 0)
