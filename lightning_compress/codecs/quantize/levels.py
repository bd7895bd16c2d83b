"""Stochastic rounding to evenly spaced levels, shared by the codecs with a few bits per element."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Shard, Shards, SourcePlan, aligned
from lightning_compress.codecs.packing.bits import block_shape
from lightning_compress.codecs.packing.planes import Planes
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits, Stream, word_state
from lightning_compress.core.source import NOTHING, Pieces, Source, place_of
from lightning_compress.core.told import Fold
from lightning_compress.core.workspace import pieces, scratch

FINEST, LARGEST = 2.0**-111, torch.finfo(torch.float32).max
"""The smallest distance between two numbers that is sent: ``UNIT`` divided by it is still a float32."""
BITS = 8
"""Largest number of bits of a code."""
UNIT = 1 << 16
"""Number of random values between two levels: the probability of rounding up is a multiple of 1 / UNIT."""
RUN = 1 << 18
"""Elements that tensor operations handle at a time, so that their scratch memory fits a CPU's caches."""
Norm = Literal["max", "l2"]


def more_bits(ranks: int) -> int:
    """Return the number of extra bits that divide the rounding variance by ``ranks``. Each bit divides it by 4."""
    return math.ceil(math.log2(ranks) / 2)


def memory_of(messages: Tensor) -> tuple[Any, int]:
    """Return bytes ``[messages, n]`` on a CPU as kernels take them: ``[all]``, and the bytes from one to the next."""
    count, size = messages.shape
    distance = messages.stride(0)
    return messages.as_strided(((count - 1) * distance + size if count else 0,), (1,)).numpy(), distance


class Buckets:
    """Cuts a vector into pieces of whole buckets, and a last bucket that may be shorter.

    Args:
        numel: length of the vector.
        bucket: elements of a bucket. A shorter vector is one bucket.
        norm: "max", the largest magnitude, or "l2".
        device: device of the vector.

    Attributes:
        width: elements of a whole bucket.
        count: number of buckets.
        pieces: pairs of slices, ``(buckets, elements)``. All buckets of a piece have the same length.
        most: elements of the largest piece.
    """

    def __init__(self, numel: int, bucket: int, norm: Norm, device: torch.device) -> None:
        self.width, self.count = block_shape(numel, bucket)
        whole, rest = divmod(numel, self.width)
        rows = max(1, min(RUN // self.width, whole))
        self.most = rows * self.width
        self.pieces = [(part, slice(part.start * self.width, part.stop * self.width)) for part in pieces(whole, rows)]
        if rest:
            self.pieces.append((slice(whole, whole + 1), slice(whole * self.width, numel)))
        self._wide = scratch("qsgd wide", self.most, torch.float64, device) if norm == "l2" else None

    def norms(self, rows: Tensor) -> Tensor:
        """Return the norm of each row, in float64 so that all devices get the same."""
        if self._wide is None:
            return torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_()).double()
        return self._wide[: rows.numel()].view(rows.shape).copy_(rows).square_().sum(dim=1).sqrt_()


class Quantiser:
    """Rounds ``v / step`` to evenly spaced numbers around 0, and packs them.

    The numbers are ``level + shift``. Levels are integers from ``-2^(bits-1)`` (one more if shift is 0) to
    ``2^(bits-1) - 1``, stored as two's complements in planes (``codecs/packing/planes.py``). A value between two
    numbers is rounded down or up at random, with probabilities that make the mean exact to 2^-17 of a step. A value
    that equals a number stays as it is.

    Args:
        bits: 2 to 8.
        shift: 0.0 if 0 is one of the numbers, 0.5 if as many numbers are below 0 as above.
        count: numbers in a message.
        most: numbers in the largest piece that is rounded at a time.
        device: device of the vectors.

    Attributes:
        top: the largest number.
        sign: the highest bit of a code.
        shift: as given.
        planes: the codes' place in a message.
        size: bytes of the codes.
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
        """Return the distance between two numbers of blocks with these norms, limited so that no number overflows."""
        steps: Tensor = norms / self._top  # with a Python number, a GPU would multiply by its reciprocal
        return steps.clamp_(max=LARGEST / self.top * (1 - 2**-22))

    def encode(self, rows: Tensor, factors: Tensor, elements: slice, stream: Stream, body: Tensor) -> Tensor:
        """Round and pack.

        Args:
            rows: float32, contiguous.
            factors: from ``fit``, broadcast to ``rows``.
            elements: the slice of the message's numbers that these are; starts at a multiple of 8.
            stream: the random bits.
            body: uint8 ``[size]``. The bytes of these numbers are overwritten.

        Returns:
            The numbers, in the shape of ``rows``.
        """
        numel = rows.numel()
        random = self._random.draw(stream.key, elements.start, numel, stream.offset).view(rows.shape)
        # Random numbers -32768 to 32767 become the middles of the UNIT parts of [0, 1).
        levels = (rows * factors).add_(random).mul_(1 / UNIT).add_(0.5 + 0.5 / UNIT - self.shift).floor_()
        codes = self._codes[: -(-numel // 8) * 8]
        codes.view(torch.int8)[:numel].view(rows.shape).copy_(levels)
        codes[numel:] = 0
        self.planes.write(codes, elements, body)
        return levels.add_(self.shift)

    def decode(self, body: Tensor, elements: slice, shape: tuple[int, ...]) -> Tensor:
        """Return a slice of a message's numbers as float32 of this shape."""
        numel = elements.stop - elements.start
        codes = self._codes[: -(-numel // 8) * 8]
        self.planes.read(codes, elements, body)
        codes.bitwise_xor_(self.sign).sub_(self.sign)  # sign extension; uint8 wraps around
        return codes.view(torch.int8)[:numel].view(shape).float().add_(self.shift)


class Piece(NamedTuple):
    """Blocks that are handled together.

    Attributes:
        blocks: slice of the blocks.
        numbers: slice of the message's numbers.
        elements: slice of the vector. At the vector's end it may be shorter than ``numbers``.
        shape: shape of the numbers. A block lies along the second dimension.
        kernel_arguments: further arguments of the CPU kernel; None if tensor operations handle this piece.
    """

    blocks: slice
    numbers: slice
    elements: slice
    shape: tuple[int, ...]
    kernel_arguments: tuple[Any, ...] | None


class LevelPlan(SourcePlan):
    """Rounds each block to levels of its norm, by tensor operations or by CPU kernels.

    A message is every block's norm as float32, zeros up to a multiple of 16 bytes, then the codes in planes.

    Args:
        layout: layout of the vectors.
        device: device of the vectors.
        bits: see ``Quantiser``.
        shift: see ``Quantiser``.
        pieces: what is handled at a time, in order.
        fast: the CPU kernels, or None. They access each number in memory once.
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
        most = max((p.numbers.stop - p.numbers.start for p in pieces if p.kernel_arguments is None), default=0)
        self._pieces, self._fast, self._largest = pieces, fast, largest
        self._quantiser = Quantiser(bits, shift, count, most, device)
        self._header = 4 * blocks
        self._body = aligned(self._header)
        self.message_size = self._body + self._quantiser.size
        self._norms = torch.empty(blocks, dtype=torch.float32, device=device)
        self.in_pieces = fast is not None and all(piece.kernel_arguments is not None for piece in pieces)
        self._places = [self._quantiser.planes.places(piece.numbers.start) for piece in pieces]

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""
        (key, offset), body, keep = self._shared or (key, 0), message[self._body :], rest is not None
        for piece, places in zip(self._pieces, self._places, strict=True):
            given, norms = source.part(piece.elements), self._norms[piece.blocks]
            left = rest[piece.elements] if rest is not None else None
            if self._fast and piece.kernel_arguments is not None:
                random = np.uint64(word_state(key, piece.numbers.start)), np.int16(offset)
                inputs = *piece.kernel_arguments, self._quantiser.top, self._largest, *random
                outputs = body.numpy(), places, norms.numpy(), NOTHING if left is None else left.numpy()
                given.feed(self._fast.encode, *inputs, *outputs)
                continue
            part = given.into(left)
            numbers = self.forward(part, piece)
            sent, factors = fit(self.norms_of(numbers), self._quantiser.top, self._largest)
            norms.copy_(sent.view(-1))
            numbers = self._quantiser.encode(numbers, factors, piece.numbers, Stream(key, offset), body)
            if keep:
                part.sub_(self.inverse(numbers.mul_(self._quantiser.steps(sent)), piece))
        message[: self._header] = self._norms.view(torch.uint8)
        message[self._header : self._body] = 0

    def decode(self, messages: Tensor, out: Tensor | Pieces, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        norms = messages[:, : self._header].clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
        steps = self._quantiser.steps(norms).mul_(weight).view(messages.shape[0], self._norms.shape[0])
        bodies = messages[:, self._body :]
        memory = memory_of(bodies) if self._fast else None
        for piece, places in zip(self._pieces, self._places, strict=True):
            piece_steps = steps[:, piece.blocks]
            if self._fast and memory and piece.kernel_arguments is not None:
                inputs = *memory, places, np.int32(self._quantiser.sign), piece_steps.contiguous().numpy()
                self._fast.decode(*inputs, *piece.kernel_arguments, place_of(out, piece.elements), accumulate)
                continue
            part = cast(Tensor, out[piece.elements])  # else ``in_pieces`` would be False
            if not accumulate:
                part.zero_()
            piece_steps = piece_steps.reshape(-1, piece.shape[0], 1, *piece.shape[2:])
            decoded = (self._quantiser.decode(body, piece.numbers, piece.shape) for body in bodies)
            self.add(part, piece, (numbers.mul_(step) for numbers, step in zip(decoded, piece_steps, strict=True)))

    @property
    def _constants(self) -> tuple[object, ...] | None:
        """What the kernel of all pieces depends on, besides their lengths; None if there is no such kernel."""
        given = {
            tuple(len(each) if isinstance(each, np.ndarray) else each for each in piece.kernel_arguments or ("none",))
            for piece in self._pieces
        }
        fits = self._fast and len(given) == 1 and ("none",) not in given and self._shared is None
        return (type(self), self._quantiser.sign, self._largest, *given.pop()) if fits else None

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """See ``ShardCoder``."""
        rows, constants = [], self._constants
        for shard in shards:
            plan = shard.coder
            if not isinstance(plan, LevelPlan) or constants is None or plan._constants != constants:
                return None
            place = shard.start, shard.numel, shard.at, len(plan._norms), plan._body, shard.peer, shard.number
            rows.append((*place, *plan._quantiser.planes.places(0).tolist()))
        return Shards.of(rows, shards, device)

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """See ``ShardCoder``."""
        assert self._fast
        given = self._pieces[0].kernel_arguments or ()
        inputs = shards.table.numpy(), messages.view(-1).numpy(), np.uint64(key), *given
        left = NOTHING if rest is None else rest.numpy()
        source.feed(self._fast.encode_shards, *inputs, self._quantiser.top, self._largest, left)

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor | Pieces, weight: float, accumulate: bool, fold: Fold | None
    ) -> None:
        """See ``ShardCoder``."""
        assert self._fast
        given = self._pieces[0].kernel_arguments or ()
        inputs = messages.view(-1).numpy(), shards.table.numpy(), place_of(out), np.float32(weight), accumulate
        numbers = np.int32(self._quantiser.sign), self._quantiser.top
        self._fast.decode_shards(*inputs, *given, *numbers)

    @abstractmethod
    def norms_of(self, numbers: Tensor) -> Tensor:
        """Return the norms of a piece's blocks, float64, with size 1 in the second dimension."""

    @abstractmethod
    def forward(self, part: Tensor, piece: Piece) -> Tensor:
        """Turn elements of the vector into the numbers to round: float32 of the piece's shape."""

    @abstractmethod
    def inverse(self, numbers: Tensor, piece: Piece) -> Tensor:
        """Turn numbers back into elements of the vector, float32 ``[n]``. The numbers may be overwritten."""

    @abstractmethod
    def add(self, part: Tensor, piece: Piece, numbers: Iterable[Tensor]) -> None:
        """Add the numbers of several messages to the elements of a piece, in order."""


def check_correlated(method: str, correlated: object) -> None:
    """Raise ValueError if ``correlated``, a setting of the class ``method``, is not a boolean."""
    if not isinstance(correlated, bool):
        raise ValueError(
            f"{method}(correlated={correlated!r}): correlated must be true (ranks share random bits, so that their "
            "errors partly cancel) or false"
        )


def fit(norms: Tensor, top: float, largest: float = LARGEST) -> tuple[Tensor, Tensor]:
    """Return the norms to send, and the factors of the blocks' elements.

    Args:
        norms: float64, at least the largest magnitude of each block.
        top: the largest number; see ``Quantiser``.
        largest: a norm above this, or whose steps would be below 2^-111, is sent as 0. Then the whole block stays in
            the vector.

    Returns:
        Norms, float32. Factors, float32: they scale elements to ``UNIT`` times the numbers, at most ``UNIT * top``.
    """
    sent = norms.clamp(max=LARGEST).float()
    sent.masked_fill_((sent < FINEST * top) | (sent > largest), 0)
    exact = UNIT * top / sent.double()
    factors = exact.float()
    factors = torch.where(factors.double() > exact, factors.nextafter(factors.new_zeros(())), factors)
    return sent, factors.masked_fill_(sent == 0, 0)
