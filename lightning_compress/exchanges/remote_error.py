"""How all ranks raise together when one of them receives a message that it cannot read.

That rank still sends what the others wait for, with an infinite flag, or with a negative word in the next table. Once
all ranks have seen it, all raise: that rank its own error, the others a message that names the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

FLAG = 16
"""Bytes before a message's body: the flag, float32, and padding."""
UNREADABLE = "received a message that it cannot read; see its own error"


class DeferredError:
    """The first error of this rank in a step, raised only after all ranks know of it.

    Attributes:
        own: the error, or None.
    """

    def __init__(self) -> None:
        self.own: ValueError | None = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep the first ValueError raised inside, because other ranks wait for this rank's next message."""
        try:
            yield
        except ValueError as error:
            self.own = self.own or error

    def mark(self, flag: Tensor) -> None:
        """Make the flag of the next message infinite if there is an error."""
        if self.own:
            flag.fill_(torch.inf)

    def check(self, failed: Iterable[bool]) -> None:
        """Raise ValueError if any rank failed.

        Args:
            failed: for each rank, whether it reported an error; equal on all ranks.
        """
        for rank, has_failed in enumerate(failed):
            if has_failed:
                self.raise_or(f"rank {rank} {UNREADABLE}")

    def raise_or(self, message: str) -> NoReturn:
        """Raise this rank's own error, or ValueError with ``message`` if it has none."""
        raise self.own or ValueError(message)


def flags_of(messages: Tensor) -> Tensor:
    """Return the flags of messages, uint8 ``[M, FLAG + size]``, as float32 ``[M]``."""
    return messages[:, :4].contiguous().view(torch.float32)[:, 0]
