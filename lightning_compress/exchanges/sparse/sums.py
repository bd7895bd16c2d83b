"""Sums of numbers of which few are not 0: ascending places and values while these are few, else all of them.

The streams of SparCML (Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, SC 2019, arXiv 1802.08021). A sum becomes
dense where its two parts have half of all places together, which bounds their union without counting it, and stays so.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_compress.exchanges.sparse import coding


class Coding(Protocol):
    """How sums are written; see ``coding``."""

    def most_bytes(self, numel: int, /) -> int: ...  # noqa: D102

    def write(self, values: Tensor, message: Tensor, /) -> int: ...  # noqa: D102

    def write_entries(self, places: Tensor, values: Tensor, numel: int, message: Tensor, /) -> int: ...  # noqa: D102

    def read_entries(self, message: Tensor, numel: int, /) -> tuple[Tensor | None, Tensor]: ...  # noqa: D102


class SparseSum:
    """A sum under way.

    Args:
        room: float32 ``[numel]``, contiguous: what the sum begins with, and where it is when it is dense.
        way: how it is written.

    Attributes:
        places: int64 ``[count]``, ascending, or None where the sum is dense.
        values: the numbers there; all of them where the sum is dense.
    """

    def __init__(self, room: Tensor, way: Coding = coding) -> None:
        self._room, self._way = room, way
        self._take(coding.places_of(room), None)

    def _take(self, places: Tensor | None, values: Tensor | None) -> None:
        few = places is not None and 2 * len(places) < len(self._room)
        if few:
            self.values = self._room[places] if values is None else values
        elif values is not None:
            self._spread(places, values)
        self.places = places if few else None
        if not few:
            self.values = self._room

    def add(self, message: Tensor) -> None:
        """Add what ``write`` wrote elsewhere.

        Raises:
            ValueError: the message is damaged.
        """
        places, values = self._entries(message)
        if self.places is None or places is None or 2 * (len(self.places) + len(places)) >= len(self._room):
            self.spread()
            self.places, self.values = None, self._room
            self._room.add_(values) if places is None else self._room.index_add_(0, places, values)
        else:
            self.places, self.values = merged(self.places, self.values, places, values)

    def load(self, message: Tensor) -> None:
        """Take what ``write`` wrote elsewhere in place of what was here.

        Raises:
            ValueError: the message is damaged.
        """
        self._take(*self._entries(message))

    def write(self, message: Tensor) -> int:
        """Write it; returns bytes of the message."""
        if self.places is None:
            return self._way.write(self._room, message)
        return self._way.write_entries(self.places, self.values, len(self._room), message)

    def spread(self) -> None:
        """Write all numbers to where the sum began, if they are not there."""
        if self.places is not None:
            self._spread(self.places, self.values)

    def _entries(self, message: Tensor) -> tuple[Tensor | None, Tensor]:
        places, values = self._way.read_entries(message, len(self._room))
        coding.check_ascending(places, len(self._room))
        return places, values

    def _spread(self, places: Tensor | None, values: Tensor) -> None:
        if places is None:
            self._room.copy_(values)
        else:
            self._room.zero_().index_copy_(0, places, values)


def merged(places: Tensor, values: Tensor, others: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Add two lists: int64 places, ascending in each, and float32 values; what adds up to 0 stays in the list."""
    at = torch.searchsorted(places, others)
    known = torch.zeros_like(at, dtype=torch.bool)
    inside = at < len(places)
    known[inside] = places[at[inside]] == others[inside]
    sums = values.clone()
    sums[at[known]] += theirs[known]
    new = ~known
    slots = at[new]
    slots += torch.arange(len(slots), device=slots.device)
    old = torch.ones(len(places) + len(slots), dtype=torch.bool, device=slots.device)
    old[slots] = False
    both, all_values = places.new_empty(len(old)), values.new_empty(len(old))
    both[slots], both[old] = others[new], places
    all_values[slots], all_values[old] = theirs[new], sums
    return both, all_values
