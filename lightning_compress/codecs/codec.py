"""The contract of every codec.

A codec encodes a vector into a message and decodes messages again. It is pure and rank-local: it knows no process
group. Its plans keep these rules:

* ``encode`` *moves* content from the vector into the message: ``vector_after + decode(message) == vector_before``, to
  float32 rounding relative to the block's largest value (exactly, for a sparsifier). So error feedback only has to keep
  the vector.
* A value too large for the message's format saturates. The rest stays in the vector.
* ``message_size`` depends only on the layout and the settings, and ``encode`` writes every byte of the message. A plan
  whose messages vary in length sets ``variable``. Then ``message_size`` is the capacity, and ``used`` is the number of
  bytes that the last ``encode`` wrote. What does not fit stays in the vector. ``decode`` gets rows that may end
  anywhere between ``used`` and the capacity.
* All randomness comes from ``key``: equal vectors and equal keys give equal bytes.
* ``encode`` accepts any finite vector. ``decode`` accepts any bytes: it never reads or writes outside its buffers, it
  returns, and it either writes some numbers (perhaps not finite) or raises ValueError. After an error, ``out`` is
  undefined and the plan still works. On an accelerator, indices are clamped instead of checked, because a check would
  wait for the device.
* What all ranks must draw alike is drawn in ``share``. It gets the same key on all ranks, before the first ``encode``
  or ``decode`` of a step.
* A ``correlated`` codec rounds by random bits that the ranks share, each rank at its own offset, after the exchange
  called ``correlate``. Without that call it uses the bits of ``key``. Each message is unbiased either way.
* After the first steps, no call allocates memory of the vector's size: scratch memory belongs to the plan.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.core.random import Stream
from lightning_compress.core.source import Pieces, Source
from lightning_compress.core.told import Fold

ALIGNMENT = 16
"""Sections of a message start at multiples of this many bytes."""


def aligned(size: int) -> int:
    """Return ``size``, in bytes, rounded up to a multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Plan(ABC):
    """A codec prepared for one layout on one device. It owns the scratch memory.

    Args:
        layout: layout of the vectors.

    Attributes:
        message_size: bytes of a message; if ``variable``, the capacity.
        variable: messages differ in length.
        in_pieces: ``decode`` also accepts ``Pieces`` as ``out``.
    """

    message_size: int
    in_pieces: bool = False
    variable: bool = False
    _used: int | None = None
    _expected: int | None = None
    _shared: Stream | None = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def used(self) -> int:
        """Number of bytes that the last ``encode`` wrote."""
        return self._used if self.variable and self._used is not None else self.message_size

    @property
    def expected_size(self) -> int:
        """Typical number of bytes of a message. Exchanges are chosen by it."""
        return self._expected if self.variable and self._expected is not None else self.message_size

    def share(self, key: int) -> None:  # noqa: B027  # most codecs draw nothing in common
        """Draw what all ranks must have in common in this step.

        Args:
            key: the same on all ranks, another one in each step.
        """

    def correlate(self, key: int, place: int, places: int) -> None:
        """Take the random bits of a ``correlated`` codec from a stream that several ranks share, until the next call.

        The ranks' offsets divide [0, 1) evenly. So the errors of equal numbers cancel up to ``1 / places`` of a step,
        while the bits of each single rank stay uniform.

        Args:
            key: the same on all ranks, another one in each step.
            place: this rank's offset, a different one on each rank: 0 to ``places - 1``.
            places: number of offsets.
        """
        self._shared = Stream.shared(key, place, places)

    def stream(self, key: int) -> Stream:
        """Return the stream of random bits by which ``encode`` rounds when it gets this key."""
        return self._shared or Stream(key)

    @abstractmethod
    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """Move content from the vector into the message.

        Args:
            vector: float32 ``[numel]``. Afterwards it holds what the message does not.
            message: uint8 ``[message_size]``. Every byte is overwritten.
            key: unsigned 64-bit number, the seed of all random bits.
        """

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """Encode what is not in one vector yet, or of which nothing is kept. Exchanges call this and not ``encode``.

        A plan that reads its numbers once can save passes over memory here; see ``SourcePlan``.

        Args:
            source: the numbers.
            rest: float32 ``[numel]``, overwritten by what the message does not hold; it may be memory of the source.
                None: nothing is kept, and the source's spare memory may be overwritten.
            message: see ``encode``.
            key: see ``encode``.
        """
        self.encode(source.into(rest), message, key)

    @abstractmethod
    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write ``weight`` times the sum of the decoded messages. Rows are summed in order.

        Args:
            messages: uint8 ``[M, message_size]``, M >= 0. Rows may be strided.
            out: float32 ``[numel]``. If ``in_pieces``, pieces of memory are allowed too, with ``accumulate=False``.
            weight: factor of the sum.
            accumulate: add to ``out`` instead of overwriting it.

        Raises:
            ValueError: a message is damaged, and the damage was found.
        """

    def check(self, vector: Tensor | Pieces | None, messages: Tensor) -> None:
        """Raise ValueError if a vector or messages do not fit this plan. The messages' content is not checked.

        Args:
            vector: what ``encode`` or ``decode`` was given; only a tensor is checked.
            messages: uint8 ``[message_size]`` or ``[M, message_size]``; rows of a ``variable`` plan may be shorter.

        Raises:
            ValueError: a length or a dtype differs from the plan's, as in a truncated message.
        """
        if isinstance(vector, Tensor) and (vector.shape != (self.layout.numel,) or vector.dtype != torch.float32):
            raise ValueError(
                f"the vector is {vector.dtype} of shape {tuple(vector.shape)}, but this plan is for float32 of shape "
                f"({self.layout.numel},); make a plan for its layout"
            )
        size = messages.shape[-1]
        shorter = self.variable and messages.dim() > 1 and size < self.message_size
        if messages.dtype != torch.uint8 or (size != self.message_size and not shorter):
            raise ValueError(
                f"the message is {messages.dtype} with {size} bytes, but this plan's messages are uint8 with "
                f"{self.message_size} bytes; it is truncated, or was made by a plan for another layout"
            )


class SourcePlan(Plan):
    """A plan that reads its numbers once, by ``encode_from``, and trusts exchanges that they give it what fits."""

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan.encode``."""
        self.check(vector, message)
        self.encode_from(Source(vector), vector, message, key)

    @abstractmethod
    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""


class Kernel(Protocol):
    """One-pass encoder and decoder for an accelerator. Vectors are not empty."""

    def encode(self, source: Source, rest: Tensor | None, message: Tensor, stream: Stream) -> None:
        """Write the whole message, and what it does not hold to ``rest``. Random bits come from ``stream``."""

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write or add the weighted sum of messages ``[M, message_size]``. Rows may be strided."""


class Shard(NamedTuple):
    """A part of a vector that has a message of its own, among other messages.

    Attributes:
        start: its first element in the vector.
        numel: its number of elements.
        coder: what encodes it: its plan's kernel, or its plan.
        at: the first byte of its message.
        size: bytes of its message.
        peer: to whom it is sent; mixed into the random key.
        number: of the section; mixed into the key if it is not 0.
    """

    start: int
    numel: int
    coder: object
    at: int
    size: int
    peer: int
    number: int


class Shards(NamedTuple):
    """Shards, as the launches read them.

    Attributes:
        table: int64, a row for each program.
        aligned: whether each begins at a multiple of 16 bytes of its vector.
        slots: how many shards.
    """

    table: Tensor
    aligned: bool
    slots: int

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]], shards: Sequence[Shard], device: torch.device) -> Shards:
        """Return the rows on a device."""
        table = torch.tensor(rows, dtype=torch.int64).to(device)
        return cls(table, all(shard.start % 4 == 0 for shard in shards), len(shards))


@runtime_checkable
class ShardCoder(Protocol):
    """A kernel, or a plan, that also encodes and decodes many shards in one call."""

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """Return these shards for such calls; None if their coders differ in more than where codes begin."""

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """Write all messages.

        Args:
            source: the whole vector, whose parts are encoded.
            rest: as long as the vector; see ``Plan.encode_from``.
            messages: uint8, the memory that holds all messages.
            shards: which ones.
            key: the random key without peer and section.
        """

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor | Pieces, weight: float, accumulate: bool, fold: Fold | None
    ) -> None:
        """Write or add the weighted sums of messages.

        Args:
            messages: uint8 ``[M, size]``, contiguous. Shards are decoded from every row but the own one, by kernels
                alone; or, if ``fold`` is None, each from the place where it stands, once.
            shards: which ones; their places count from the first row.
            out: the whole vector; on a CPU also in pieces, with ``accumulate=False``.
            weight: factor.
            accumulate: add to ``out``.
            fold: whose heads are folded, too, and whose sums are checked; or None.
        """


class KernelPlan(SourcePlan):
    """A plan that leaves all work to a kernel.

    Args:
        layout: layout of the vectors.
        size: bytes of a message.
        kernel: encodes and decodes messages of this size.
    """

    def __init__(self, layout: Layout, size: int, kernel: Kernel) -> None:
        super().__init__(layout)
        self.message_size, self.kernel = size, kernel

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""
        if self.layout.numel:
            self.kernel.encode(source, rest, message, self.stream(key))

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        if self.layout.numel:
            self.kernel.decode(messages, out, weight, accumulate)


class Method:
    """Base of codecs and reducers. A subclass is a frozen dataclass of its settings.

    Attributes:
        contractive: the method is biased and needs error feedback, which is then on by default.
        elementwise: every element is encoded independently, so small parameters need no special treatment.
        keeps_zeros: an element that is 0 in the vector (on all ranks, for a reducer) is exactly 0 in the decoded vector
            or the mean, whatever its neighbours are.
        conserves: what is not sent stays in the vector. Otherwise the output is not a mean.
    """

    contractive: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    keeps_zeros: ClassVar[bool] = False
    conserves: ClassVar[bool] = True

    @property
    def safe_with_adam(self) -> bool:
        """True if the method works well with optimizers that have adaptive learning rates."""
        return not self.contractive


class Codec(Method, ABC):
    """Base of compression methods that are pure and rank-local.

    Attributes:
        sparse: a message holds few elements. Encoding a sum of messages would lose some of them.
        reencodable: a decoded vector may be encoded again, as the owner of a shard does with the ranks' sum.
        sum_dtype: the dtype in which messages may be summed element by element; then ``decode`` of the sum is the sum
            of the decoded messages. None: messages cannot be summed.
        is_cast: a message is the elements cast to ``sum_dtype`` and nothing else; magnitudes above ``limit`` saturate.
        block: shards are cut at multiples of this many elements.
        correlated: errors of the ranks' messages partly cancel; see ``Plan.correlate``.
    """

    sparse: ClassVar[bool] = False
    reencodable: ClassVar[bool] = True
    sum_dtype: ClassVar[torch.dtype | None] = None
    is_cast: ClassVar[bool] = False
    block: int = 1
    correlated: bool = False

    @property
    def rounds(self) -> bool:
        """True if a sparse method rounds the elements it sends, so that part of each stays in the vector."""
        return False

    @property
    def sent_share(self) -> float:
        """Share of the elements that a message holds, if the settings determine it; otherwise 1."""
        return 1.0

    def limit(self, summands: int) -> float:
        """Return the largest magnitude that a message may hold if ``summands`` messages are summed in its dtype."""
        return math.inf

    def runs_on(self, device: torch.device) -> bool:
        """Return whether ``plan`` accepts this device here; most codecs run everywhere."""
        return True

    def refined(self, ranks: int) -> Codec:
        """Return the codec that encodes the sum of ``ranks`` messages; the codec itself for one rank.

        The ranks' own noise averages out over the ranks, but the noise of encoding their sum does not. So the codec of
        an unbiased method has at most ``1 / ranks`` of the messages' variance. A method with error feedback may return
        itself, because its residual also brings back what encoding the sum left out.

        Args:
            ranks: 1 or more.
        """
        return self

    @abstractmethod
    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Return a plan for vectors of this layout.

        Args:
            layout: layout of the vectors.
            device: device of the vectors. ``auto`` and the cost model ask for a plan on the device "meta", to read its
                sizes. So compute what depends on the layout alone on the CPU, and move it to ``device`` last.
            summands: number of messages that are summed in the messages' dtype; their sum must not overflow.
        """


def check_density(name: str, density: object, example: str) -> None:
    """Raise ValueError unless ``density`` is a share in (0, 1], written as a float.

    Args:
        name: the class's name.
        density: the user's value. An integer is taken for a percentage.
        example: what a usual density does.
    """
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 100:
        fix = example
    elif isinstance(density, int) or density > 1:
        fix = f"for {density:g} % write {density / 100:g}{'; 1.0 is all of it' if density == 1 else ''}"
    else:
        return
    raise ValueError(f"{name}(density={density!r}): density must be in (0, 1]; {fix}")
