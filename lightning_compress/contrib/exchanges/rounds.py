"""Rounds of point-to-point messages of varying length, after which either all ranks continue or all raise.

Before a round, an all-gather of a few bytes tells all ranks the lengths of all messages, so that no rank waits for
bytes that are never sent. Every message has a checksum, because a message to a single rank cannot be compared between
ranks. A rank that receives a damaged message reports it in the next table, and then all ranks raise.

    message: | checksum, 4 bytes | padding to 16 bytes | body |
    table:   a row for each rank: | a word, int64; below 0: this rank could not read a message | sizes, int64 |
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.codec import ALIGNMENT, aligned
from lightning_compress.collectives import World
from lightning_compress.exchanges.remote_error import DeferredError

HEADER = 16
REFUSED = -1


class Rounds:
    """The rounds of one exchange on one rank.

    Args:
        world: the ranks.
        messages: largest number of messages that a rank sends in a round.
    """

    def __init__(self, world: World, messages: int) -> None:
        self._collective, device, self._meter = world
        size = self._collective.size
        self._table = torch.zeros(size, 1 + messages, dtype=torch.int64, device=device)
        self._error = DeferredError()
        self.table_bytes = (size - 1) * self._table[0].nbytes

    def begin(self) -> None:
        """Begin a step: forget the errors of the last one."""
        self._error = DeferredError()

    def agree(self, sizes: Sequence[int], most: int, word: int = 0) -> list[list[int]]:
        """Exchange the lengths of all messages. Collective: every rank must call it.

        Args:
            sizes: bytes of this rank's messages.
            most: largest number of bytes of any rank's message, equal on all ranks.
            word: another number for all ranks, 0 or more.

        Returns:
            word and sizes of every rank. Use these for this rank, too.

        Raises:
            ValueError: a rank could not read a message, or reports an impossible size; on every rank.
        """
        row = torch.zeros_like(self._table[0])
        row[: 1 + len(sizes)] = torch.tensor([REFUSED if self._error.own else word, *sizes], dtype=torch.int64)
        self._collective.all_gather(row, self._table)
        rows: list[list[int]] = self._table.tolist()
        self._error.check(word < 0 for word, *_ in rows)
        for rank, (_, *lengths) in enumerate(rows):
            for length in lengths:
                if not 0 <= length <= most or length % ALIGNMENT:
                    raise ValueError(f"rank {rank} reports a message of {length} bytes, which must be at most {most}")
        return rows

    def swap(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], read: Callable[[int, Tensor], None]
    ) -> None:
        """Send sealed messages, and read the received ones in the order of their ranks.

        Args:
            sends: uint8 messages by rank, of the lengths that ``agree`` returned.
            receives: uint8 buffers by rank, of the lengths that ``agree`` returned.
            read: called with a rank and the body of its message. The next ``agree`` reports its ValueError.
        """
        self._collective.swap(sends, receives)
        with self._meter.decode:
            for peer in sorted(receives):
                if not self._error.own:
                    with self._error.deferred():
                        read(peer, _opened(receives[peer], peer))

    def finish(self) -> None:
        """Raise ValueError on every rank if a rank could not read a message. Collective: every rank must call it."""
        self.agree([], 0)
        if self._error.own:
            raise self._error.own


def new_messages(count: int, size: int, device: torch.device) -> Tensor:
    """Return buffers for ``count`` messages, filled with zeros, because encoding writes no padding."""
    return torch.zeros(count, size, dtype=torch.uint8, device=device)


def seal(message: Tensor, used: int) -> int:
    """Write the checksum of a body of ``used`` bytes; return the bytes of the message."""
    end = HEADER + aligned(used)
    message[HEADER + used : end] = 0
    message[:4].view(torch.int32)[0] = _checksum(message[HEADER:end])
    return end


def _opened(message: Tensor, peer: int) -> Tensor:
    body = message[HEADER:]
    if len(message) < HEADER or int(message[:4].view(torch.int32)[0]) != _checksum(body):
        raise ValueError(f"the message of rank {peer} was changed on the way; it is damaged")
    return body


def _checksum(body: Tensor) -> int:
    crc = zlib.crc32(body.cpu().numpy().data)
    return int(np.uint32(crc).view(np.int32))
