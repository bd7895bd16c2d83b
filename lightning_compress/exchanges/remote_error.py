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
    """The first error of this rank in a step, raised only after all ranks know of it; false while there is none."""

    def __init__(self) -> None:
        self._error: ValueError | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep the first ValueError raised inside, because other ranks wait for this rank's next message."""
        try:
            yield
        except ValueError as error:
            self._error = self._error or error

    def mark(self, flag: Tensor) -> None:
        """Make the flag of the next message infinite if there is an error."""
        if self:
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
        raise self._error or ValueError(message)

    def raise_own(self) -> None:
        """Raise this rank's error, if there is one. Call it once all ranks were sent the mark."""
        if self._error:
            raise self._error


def flags_of(messages: Tensor) -> Tensor:
    """Return the flags of messages, uint8 ``[M, FLAG + size]``, as float32 ``[M]``."""
    return messages[:, :4].contiguous().view(torch.float32)[:, 0]
