"""Rounds of point-to-point messages whose lengths vary, after which all ranks go on or all stop.

Before a round every rank tells all others how long its messages are (an all-gather of a few bytes): no rank waits for
bytes that do not come, whatever a rank said. Every message carries a checksum, since what goes to one rank only cannot
be compared: a message that was changed on the way, or that cannot be read, is told in the next table, and then all
ranks raise.

    message: | checksum, 4 bytes | padding to 16 bytes | body |
    table:   a row a rank: | a word, int64; below 0: this rank could not read a message | sizes, int64 |
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
        messages: what a rank sends in a round, at most.
    """

    def __init__(self, world: World, messages: int) -> None:
        self._collective, device, self._meter = world
        size = self._collective.size
        self._table = torch.zeros(size, 1 + messages, dtype=torch.int64, device=device)
        self._error = DeferredError()
        self.table_bytes = (size - 1) * self._table[0].nbytes

    def begin(self) -> None:
        """Forget what was refused in the step before."""
        self._error = DeferredError()

    def agree(self, sizes: Sequence[int], most: int, word: int = 0) -> list[list[int]]:
        """Tell all ranks how long this rank's messages are.

        Args:
            sizes: bytes of this rank's messages.
            most: bytes that a message of any rank takes at most, equal on all ranks.
            word: something else that all should know, 0 or more.

        Returns:
            word and sizes of every rank; this rank's too, which are the ones that count.

        Raises:
            ValueError: a rank could not read a message, or says what no message takes; on every rank.
        """
        row = torch.zeros_like(self._table[0])
        row[: 1 + len(sizes)] = torch.tensor([REFUSED if self._error else word, *sizes], dtype=torch.int64)
        self._collective.all_gather(row, self._table)
        rows: list[list[int]] = self._table.tolist()
        self._error.check(word < 0 for word, *_ in rows)
        for rank, (_, *lengths) in enumerate(rows):
            for length in lengths:
                if not 0 <= length <= most or length % ALIGNMENT:
                    raise ValueError(f"rank {rank} says that its message takes {length} bytes; {most} is the most")
        return rows

    def swap(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], read: Callable[[int, Tensor], None]
    ) -> None:
        """Send sealed messages, and read those of others in the order of their ranks.

        Args:
            sends: uint8, as long as ``agree`` told.
            receives: buffers, as long as the senders told.
            read: is given a rank and the body of its message; a ValueError is told in the next ``agree``.
        """
        self._collective.swap(sends, receives)
        with self._meter.decode:
            for peer in sorted(receives):
                if not self._error:
                    with self._error.deferred():
                        read(peer, _opened(receives[peer], peer))

    def finish(self) -> None:
        """See that every rank could read what it was sent.

        Raises:
            ValueError: one could not; on every rank.
        """
        self.agree([], 0)
        self._error.raise_own()


def new_messages(count: int, size: int, device: torch.device) -> Tensor:
    """Buffers for ``count`` messages; zero, since encoding writes no padding."""
    return torch.zeros(count, size, dtype=torch.uint8, device=device)


def seal(message: Tensor, used: int) -> int:
    """Write the checksum of a body of ``used`` bytes, behind the header; returns bytes of the message."""
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
