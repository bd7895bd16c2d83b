"""The specification that every codec keeps.

A codec turns a vector into a message and back. It is pure and rank-local: it knows no process group.

* ``encode`` *moves* content: what is in the message is no longer in the vector, so that
  ``vector_after + decode(message) == vector_before`` (to float32 rounding relative to the block's largest value;
  exactly, for a sparsifier). Error feedback is then only "keep the vector".
* Values too large for the message's format saturate, and the rest stays in the vector.
* ``message_size`` follows from the layout and the settings alone; every byte of the message is written. A method of
  variable length says so: then ``message_size`` is the capacity, ``used`` what the last ``encode`` wrote, what does not
  fit stays in the vector, and ``decode`` is given rows that may end anywhere from there to the capacity.
* A ``FusedPlan`` is told where a sum is to be encoded, or what stays is of no use; for others sums are added up before.
* Randomness comes from ``key`` and from nothing else: equal vectors and keys give equal bytes.
* ``encode`` may be given any finite vector; ``decode`` may be given any bytes. It never reads or writes outside of its
  buffers, ends, and either makes some numbers of them (not finite ones, perhaps) or refuses with ``ValueError``; then
  ``out`` is undefined, and the plan goes on working. On an accelerator, which is not waited for, indices are clamped.
* What all ranks must draw alike (the elements of a random-k) is drawn in ``share``, which is given the same key
  on all ranks before a step's first ``encode`` or ``decode``.
* Codecs that are ``correlated`` round by random bits that ranks have in common, each at another offset, where the
  exchange has said so by ``correlate``; by those of ``key`` elsewhere. Either way a message is right on average.
* Steady state allocates nothing of the vector's size: scratch belongs to the plan.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.core.random import Stream
from lightning_compress.kernels import Summands as Summands

ALIGNMENT = 16
"""Sections of a message start at multiples of this many bytes."""


def aligned(size: int) -> int:
    """``size`` in bytes, rounded up to the alignment of a section."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Plan(ABC):
    """A codec made ready for one layout on one device; holds the scratch memory.

    Args:
        layout: what the vector is made of.

    Attributes:
        message_size: bytes of a message, or the most that one may take.
        variable: messages differ in length.
        in_pieces: ``decode`` takes a list of tensors, too.
    """

    message_size: int
    in_pieces: bool = False
    variable: bool = False
    _shared: Stream | None = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def used(self) -> int:
        """Bytes of the message that ``encode`` wrote last."""
        return self.message_size

    @property
    def expected_size(self) -> int:
        """Bytes that a message usually takes, from which exchanges are chosen."""
        return self.message_size

    def share(self, key: int) -> None:  # noqa: B027  # most draw nothing in common
        """Draw what the ranks must have in common; ``key`` is the same on all of them, and another one each step."""

    def correlate(self, key: int, place: int, places: int) -> None:
        """Draw the random bits of a ``correlated`` codec, until this is called again, from a stream of several ranks.

        Their offsets divide [0, 1) evenly: so errors of equal numbers cancel, but for ``1 / places`` of a step, while
        each rank's own bits are as uniform as before.

        Args:
            key: the same on all of them, and another one each step.
            place: of this rank, another one on each: 0 to ``places - 1``.
            places: how many there are.
        """
        self._shared = Stream.shared(key, place, places)

    def stream(self, key: int) -> Stream:
        """Where ``encode``, given this key, draws the random bits by which it rounds."""
        return self._shared or Stream(key)

    @abstractmethod
    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """Move content from the vector into the message.

        Args:
            vector: float32 ``[numel]``; holds afterwards what the message does not.
            message: uint8 ``[message_size]``, wholly overwritten.
            key: unsigned 64-bit number from which all randomness is drawn.
        """

    @abstractmethod
    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write ``weight`` times the sum of the decoded messages, summed in the order of the rows.

        Args:
            messages: uint8 ``[M, message_size]``, M >= 0; rows may be strided.
            out: float32 ``[numel]``; where ``in_pieces`` it may be a list of a tensor for each segment that is not
                empty, in order, in which nothing accumulates.
            weight: factor of the sum.
            accumulate: add to ``out`` instead of overwriting it.

        Raises:
            ValueError: a message is none that ``encode`` makes, and that was seen.
        """

    def check(self, vector: Tensor | None, messages: Tensor) -> None:
        """Refuse a vector or messages that are not of this plan; what is inside of messages is checked as it is read.

        Raises:
            ValueError: a length or a dtype is not the plan's, as for a truncated message.
        """
        if vector is not None and (vector.shape != (self.layout.numel,) or vector.dtype != torch.float32):
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


class FusedPlan(Plan):
    """A plan that saves passes over memory where a sum is to be encoded, or what stays is of no use."""

    @abstractmethod
    def encode(self, vector: Tensor, message: Tensor, key: int, keep: bool = True, summands: Summands = None) -> None:
        """Move content from the vector into the message.

        Args:
            vector: see ``Plan.encode``.
            message: likewise.
            key: likewise.
            keep: what stays is used; if not, the vector may hold anything afterwards.
            summands: two vectors whose sum is to be encoded, whatever ``vector`` holds before.
        """

    def take(self, vector: Tensor, message: Tensor, summands: Summands) -> None:
        """``check``, and add the summands up, for a plan that has no pass that does.

        Raises:
            ValueError: see ``check``.
        """
        self.check(vector, message)
        if summands is not None:
            torch.add(*summands, out=vector)


class Kernel(Protocol):
    """What encodes and decodes in one pass on an accelerator; see ``FusedPlan``. Vectors are not empty."""

    def encode(self, vector: Tensor, summands: Summands, message: Tensor, stream: Stream, keep: bool) -> None:
        """Write all of a message; random bits come from the stream."""

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write, or add, the weighted sum of messages ``[M, message_size]``, whose rows may be strided."""


class KernelPlan(FusedPlan):
    """A plan all of whose work a kernel does.

    Args:
        layout: what the vector is made of.
        size: bytes of a message.
        kernel: made for such messages.
    """

    def __init__(self, layout: Layout, size: int, kernel: Kernel) -> None:
        super().__init__(layout)
        self.message_size, self._kernel = size, kernel

    def encode(self, vector: Tensor, message: Tensor, key: int, keep: bool = True, summands: Summands = None) -> None:
        """See ``Plan.encode``."""
        self.check(vector, message)
        if self.layout.numel:
            self._kernel.encode(vector, summands, message, self.stream(key), keep)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        if self.layout.numel:
            self._kernel.decode(messages, out, weight, accumulate)


class Method:
    """A codec or a reducer; a frozen dataclass of its settings.

    Attributes:
        contractive: the method is biased and only sound with error feedback (which is then on by default).
        elementwise: every element is treated alone, so that small parameters need no special care.
        keeps_zeros: what is zero in the vector (on all ranks, for a reducer) is zero in what is decoded, or in the
            mean, exactly, whatever stands beside it.
        conserves: what is not sent stays in the vector; else the output is no mean.
    """

    contractive: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    keeps_zeros: ClassVar[bool] = False
    conserves: ClassVar[bool] = True

    @property
    def safe_with_adam(self) -> bool:
        """Whether the method does no harm beside an optimizer with adaptive learning rates."""
        return not self.contractive


class Codec(Method, ABC):
    """A compression method that is pure and rank-local.

    Attributes:
        sparse: messages hold few elements; encoding a sum again would lose some (a lossy second stage).
        repeatable: what was decoded may be encoded again, as an owner does with the sum of others' messages.
        sum_dtype: the dtype in which messages may be summed element by element (``decode`` of the sum is the sum of
            the decodes), or None where they may not.
        casts: a message is the elements in ``sum_dtype``, no more, as far as they are within the limit.
        block: shards are cut at multiples of this many elements.
        correlated: errors of the ranks' messages cancel in part; see ``Plan.correlate``.
    """

    sparse: ClassVar[bool] = False
    repeatable: ClassVar[bool] = True
    sum_dtype: ClassVar[torch.dtype | None] = None
    casts: ClassVar[bool] = False
    block: int = 1
    correlated: bool = False

    @property
    def rounds(self) -> bool:
        """Whether a sparse method sends its elements rounded, so that something of each stays in the vector."""
        return False

    @property
    def sent_share(self) -> float:
        """Of the elements, what a message holds, as far as the settings tell; 1 where it holds all, or they do not."""
        return 1.0

    def limit(self, summands: int) -> float:
        """The largest magnitude that a message holds if ``summands`` of them are added up in its own dtype."""
        return math.inf

    def refined(self, ranks: int) -> Codec:
        """The codec by which an exchange encodes the sum of what so many ranks sent; itself for one.

        Private noise averages out over the ranks, but that of encoding their sum does not: so an unbiased method's
        codec of sums has no more variance than is left of the messages' own, a share of ``1 / ranks``. A method with
        error feedback, which brings back what it leaves of a sum too, may be its own.

        Args:
            ranks: 1 or more.
        """
        return self

    @abstractmethod
    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout.

        Args:
            layout: what the vectors are made of.
            device: where they are.
            summands: how many messages are summed in the message's own dtype; their sum must not overflow.
        """
