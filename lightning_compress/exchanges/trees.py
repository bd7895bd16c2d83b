"""Who talks to whom on a binomial tree of ranks, whose root is rank 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """A rank's part in one level; None: it has none.

    Args:
        parent: gets this rank's sum.
        child: whose sum this rank gets.
    """

    parent: int | None
    child: int | None


def levels_of(rank: int, size: int) -> list[Level]:
    """From the leaves to the root: as many on all ranks as the logarithm of ``size``, rounded up."""
    levels = []
    for distance in (1 << bit for bit in range((size - 1).bit_length())):
        place = rank % (2 * distance)
        parent = rank - distance if place == distance else None
        child = rank + distance if place == 0 and rank + distance < size else None
        levels.append(Level(parent, child))
    return levels


def summands(rank: int, size: int) -> int:
    """Of how many ranks the sum is that a rank sends to its parent, and the root to all."""
    return min(rank & -rank, size - rank) if rank else size


def links(levels: list[Level]) -> int:
    """With how many others a rank talks, one message each way."""
    return sum((level.parent is not None) + (level.child is not None) for level in levels)
