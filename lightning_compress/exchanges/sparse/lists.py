"""Numbers at ascending places, cut into stretches, sent, and united: what a butterfly routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.exchanges.sparse import coding


@dataclass(frozen=True)
class Listed:
    """Numbers of a stretch of ``numel``: int64 ``[count]``, ascending, or None for all places; float32 ``[count]``."""

    numel: int
    places: Tensor | None
    values: Tensor

    @classmethod
    def of(cls, vector: Tensor) -> Listed:
        """What is not 0."""
        places = coding.places_of(vector)
        return cls(len(vector), None, vector) if len(places) == len(vector) else cls.at(places, vector)

    @classmethod
    def at(cls, places: Tensor | None, vector: Tensor) -> Listed:
        """What stands at places."""
        return cls(len(vector), places, vector if places is None else vector[places])

    @classmethod
    def read(cls, message: Tensor, numel: int) -> Listed:
        """What ``write`` wrote.

        Raises:
            ValueError: the message is damaged.
        """
        places, values = coding.read_entries(message, numel, exact=True)
        coding.check_ascending(places, numel)
        return cls(numel, places, values)

    def write(self, message: Tensor) -> int:
        """Write it all; returns bytes of the message."""
        if self.places is None:
            return coding.write_all(self.values, message)
        return coding.write_entries(self.places, self.values, self.numel, message, exact=True)

    def cuts(self, bounds: Sequence[int]) -> list[int]:
        """How many of the numbers stand before each of some places."""
        if self.places is None:
            return list(bounds)
        return [int(cut) for cut in torch.searchsorted(self.places, torch.tensor(bounds, device=self.places.device))]

    def part(self, start: int, stop: int, first: int, last: int) -> Listed:
        """The numbers ``[first, last)``, which are those of the places from ``start`` to ``stop``."""
        places = None if self.places is None else self.places[first:last] - start
        if places is not None and len(places) == stop - start:
            places = None
        return Listed(stop - start, places, self.values[first:last])

    @property
    def used_bytes(self) -> int:
        """Bytes of the message that ``write`` writes."""
        return int(coding.used_bytes(len(self.values), self.numel, exact=True))

    def add_to(self, out: Tensor) -> None:
        """Add the numbers to all of the stretch."""
        if self.places is None:
            out.add_(self.values)
        else:
            out.index_add_(0, self.places, self.values)

    def spread(self, out: Tensor) -> None:
        """Write all numbers of the stretch, zeros too."""
        if self.places is None:
            out.copy_(self.values)
        else:
            out.zero_()
            out[self.places] = self.values


def united(parts: Sequence[Listed]) -> tuple[Tensor | None, list[Tensor | None]]:
    """All places of lists of the same stretch, and where among them each list's are; None: all, in order."""
    numel = parts[0].numel
    if any(part.places is None for part in parts):
        return None, [part.places for part in parts]
    marks = torch.zeros(numel, dtype=torch.bool, device=parts[0].values.device)
    for part in parts:
        marks[part.places] = True
    places = marks.nonzero().flatten()
    if len(places) == numel:
        return None, [part.places for part in parts]
    return places, [torch.searchsorted(places, part.places) for part in parts if part.places is not None]


def added(values: Sequence[Tensor], positions: Sequence[Tensor | None], count: int) -> Tensor:
    """``[count]`` sums of numbers at positions, in the order of the lists."""
    total = values[0].new_zeros(count)
    for each, where in zip(values, positions, strict=True):
        if where is None:
            total.add_(each)
        else:
            total.index_add_(0, where, each)
    return total


def joined(parts: Sequence[Listed]) -> Listed:
    """Lists of stretches that follow one another, as one."""
    values, numel = torch.cat([part.values for part in parts]), sum(part.numel for part in parts)
    if all(part.places is None for part in parts):
        return Listed(numel, None, values)
    places, start = [], 0
    for part in parts:
        inside = torch.arange(part.numel, device=values.device) if part.places is None else part.places
        places.append(inside + start)
        start += part.numel
    return Listed(numel, torch.cat(places), values)
