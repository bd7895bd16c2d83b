"""What a vector consists of: which elements of which parameters, and where."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Segment:
    """Elements ``[start, stop)`` of one parameter, at ``offset`` of a vector.

    Args:
        name: of the parameter.
        shape: of the whole parameter, even if only part of it is in the vector.
        offset: index of the first of these elements in the vector.
        start: first element of the flattened parameter.
        stop: one past the last element of the flattened parameter.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    start: int
    stop: int

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @cached_property
    def end(self) -> int:
        """One past the last element's index in the vector."""
        return self.offset + self.numel

    @cached_property
    def span(self) -> slice:
        """Its elements of the vector."""
        return slice(self.offset, self.end)


@dataclass(frozen=True)
class Layout:
    """Segments that fill a vector without gaps, in order."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
        """Return the layout of whole parameters, given as ``(name, shape)``, one after the other."""
        segments, offset = [], 0
        for name, shape in parameters:
            numel = math.prod(shape)
            segments.append(Segment(name, tuple(shape), offset, 0, numel))
            offset += numel
        return cls(tuple(segments))

    @cached_property
    def numel(self) -> int:
        """Length of the vector."""
        return self.segments[-1].end if self.segments else 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(segment.name for segment in self.segments)

    def cut(self, start: int, stop: int) -> Layout:
        """Return the layout of ``vector[start:stop]``; its segments keep their names, shapes and ranges."""
        parts = []
        for segment in self.segments:
            first, last = max(segment.offset, start), min(segment.end, stop)
            if first < last:
                shift = first - segment.offset
                parts.append(
                    Segment(
                        segment.name,
                        segment.shape,
                        first - start,
                        segment.start + shift,
                        segment.start + shift + last - first,
                    )
                )
        return Layout(tuple(parts))
