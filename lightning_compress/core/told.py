"""What ranks tell each other in the heads of their messages, as kernels read it for whom it concerns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Rows of gradients, of which some are unused.

    Attributes:
        firsts: of each gradient, the index of its first row in ``used``.
        counts: of each gradient, how many rows of one length it has; 0 if it is used.
        used: uint8, 0 for unused rows.
        kept: of each gradient, the row that says whether any rank has it, or -1; if none has, states stay as they were.
        rest: float32 ``[numel]``, a state that becomes zeros in unused rows, or None.
        before: float32 ``[numel]``, what ``rest`` was.
    """

    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    used: Tensor
    kept: tuple[int, ...]
    rest: Tensor | None = None
    before: Tensor | None = None


class Told(NamedTuple):
    """Messages that arrived, and whose heads are read by whoever writes the means.

    Attributes:
        messages: uint8 ``[W, size]``; each begins with its flag, float32.
        bits: for each row of ``Rows.used``, the bit that says whether it is used, counted from the first byte on.
        several: how many messages have such a bit: all of them at the same place, or 1.
    """

    messages: Tensor
    bits: tuple[int, ...]
    several: int


class Fold(NamedTuple):
    """What the owner of a shard has of the messages that it adds up, besides their sections.

    Attributes:
        rank: of this process, whose row of the messages is ignored.
        own: uint8 ``[size]``, the message with the sum. Its head is this rank's, and becomes that of the sum.
        flag: float32 scalar, 0.0 or NaN; becomes NaN if a flag or a sum is not finite.
        mask: uint8, becomes zeros.
        bits: the first byte of the bits in each head.
        bytes: how many bytes of bits the own head has.
    """

    rank: int
    own: Tensor
    flag: Tensor
    mask: Tensor
    bits: int
    bytes: int


class Bits(NamedTuple):
    """For each gradient, where a bit says whether it is used.

    Attributes:
        memory: uint8 ``[n, size]``, in each of which a gradient's bit is at the same place; one that is set is enough.
        places: of each gradient, its bit, counted from the first byte on; -1 if it is used.
        kept: of each gradient, the bit that says whether any rank has it, or -1; see ``Rows``.
    """

    memory: Tensor
    places: tuple[int, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, rows: Rows, told: Told | None) -> Bits:
        """Return those of gradients that are one row each."""
        firsts = list(zip(rows.firsts, rows.counts, strict=True))
        if told is None:
            return cls(rows.used[None], tuple(8 * first if count else -1 for first, count in firsts), rows.kept)
        places = tuple(told.bits[first] if count else -1 for first, count in firsts)
        kept = tuple(told.bits[row] if row >= 0 else -1 for row in rows.kept)
        return cls(told.messages[: told.several], places, kept)


class Opening(NamedTuple):
    """The heads of the messages that a rank is about to send, for the kernel that gathers what they are about.

    Attributes:
        messages: uint8 ``[n, size]``, each for one peer.
        own: uint8 ``[size]``, has the head for this rank itself in place of its row of ``messages``.
        rank: of this process; -1 if there is no such row.
        rows: int32 ``[n, 1 + most]``, of each head how many bits it has, and which row of the mask each is about.
        bits: the first byte of the bits.
        mask: uint8, zeros before and after: the rows that are used on this rank.
        arrived: int32 ``[1]``, 0 before and after.
    """

    messages: Tensor
    own: Tensor
    rank: int
    rows: Tensor
    bits: int
    mask: Tensor
    arrived: Tensor
