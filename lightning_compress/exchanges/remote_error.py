"""How ranks end alike where one of them is sent a message that it cannot read.

That rank still sends what the others wait for, and makes the flag in front of it infinite, or a word of the next table
negative. Once all ranks were told, all raise: that rank its own error, the others that there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

FLAG = 16
"""Bytes in front of a body: the flag, float32, and padding."""
UNREADABLE = "was sent a message that it cannot read, and says why"


class Refusal:
    """What this rank could not read in one step, until all ranks were told."""

    def __init__(self) -> None:
        self._problem: ValueError | None = None

    def __bool__(self) -> bool:
        return self._problem is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the first ValueError of what is done inside: other ranks wait for a message of this one."""
        try:
            yield
        except ValueError as error:
            self._problem = self._problem or error

    def mark(self, flag: Tensor) -> None:
        """Make the flag of the next message infinite, if there is something to tell."""
        if self:
            flag.fill_(torch.inf)

    def check(self, told: Iterable[bool]) -> None:
        """Stop where a rank refused.

        Args:
            told: whether a rank refused, of each rank, as all ranks were told.

        Raises:
            ValueError: one did; on every rank.
        """
        for rank, refused in enumerate(told):
            if refused:
                self.stop(f"rank {rank} {UNREADABLE}")

    def stop(self, told: str) -> NoReturn:
        """Raise this rank's own error, or what it was told.

        Raises:
            ValueError: always.
        """
        raise self._problem or ValueError(told)

    def close(self) -> None:
        """All ranks were told, whatever this one has heard of it.

        Raises:
            ValueError: this rank refused.
        """
        if self:
            self.stop("")


def flags_of(messages: Tensor) -> Tensor:
    """The flags in front of bodies, uint8 ``[M, FLAG + size]``: float32 ``[M]``."""
    return messages[:, :4].contiguous().view(torch.float32)[:, 0]
