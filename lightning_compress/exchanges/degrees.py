"""In how many ranks each layer of a butterfly cuts what is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

PACKET = 65536
"""Bytes from which on a message is worth its start: half a millisecond at 1 Gbit/s."""


def chosen(ranks: int, volume: Callable[[int], float]) -> tuple[int, ...]:
    """Degrees of the layers, whose product is ``ranks``.

    In each layer the largest degree whose messages still have ``PACKET`` bytes; where there is none, the largest prime
    factor of what is left.

    Args:
        ranks: to factor.
        volume: bytes that a rank has left once so many ranks were merged, the same on all ranks.
    """
    degrees, left = [], ranks
    while left > 1:
        fit = [each for each in divisors(left) if volume(ranks // left) / each >= PACKET]
        degrees.append(max(fit, default=max(each for each in divisors(left) if _prime(each))))
        left //= degrees[-1]
    return tuple(sorted(degrees, reverse=True))


def check_degrees(degrees: Sequence[int], ranks: int) -> None:
    """Refuse degrees that make up another number of ranks.

    Raises:
        ValueError: they do; the message lists those that do not.
    """
    if math.prod(degrees) != ranks:
        fitting = "; ".join(str(each) for each in factorings(ranks)[:8])
        raise ValueError(
            f"Butterfly(degrees={tuple(degrees)}): their product is {math.prod(degrees)}, and there are {ranks} ranks; "
            f"use one of: {fitting}, or null"
        )


def divisors(number: int) -> list[int]:
    """Those above 1, ascending."""
    return [each for each in range(2, number + 1) if number % each == 0]


def factorings(number: int, most: int | None = None) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of numbers above 1, the largest first."""
    if number == 1:
        return [()]
    fitting = [each for each in divisors(number)[::-1] if most is None or each <= most]
    return [(first, *rest) for first in fitting for rest in factorings(number // first, first)]


def _prime(number: int) -> bool:
    return divisors(number) == [number]
