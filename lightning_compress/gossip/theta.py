"""Theta of Moniqua: by how much any parameter of two neighbours may differ. The same on all ranks in every round."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass


class Theta:
    """A bound for each round, from what all ranks have in common."""

    def at(self, number: int, rate: float) -> float:
        """The bound of round ``number`` at this learning rate; 0 where it is to be measured, or the rate is 0."""
        return 0.0


@dataclass(frozen=True)
class ByRound(Theta):
    """Bounds from rounds on; one alone is that of all."""

    starts: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, number: int, rate: float) -> float:
        """See ``Theta.at``."""
        return self.values[bisect_right(self.starts, number) - 1]


@dataclass(frozen=True)
class ByRate(Theta):
    """A multiple of the learning rate, as in the paper's theorems: models drift apart as fast as they move."""

    factor: float

    def at(self, number: int, rate: float) -> float:
        """See ``Theta.at``."""
        return self.factor * rate


@dataclass(frozen=True)
class Estimated(Theta):
    """By block: ``margin`` times the largest difference of any two neighbours that was seen.

    Measured in the first round of each matrix of a topology, in which whole float32 vectors are averaged. Then it
    follows the hashes: ranks compare what failed in the first rounds and every ``every``.
    """

    margin: float = 1.25
    every: int = 4


def read_theta(given: object) -> Theta:
    """Theta as users write it.

    Args:
        given: a number; ``{"rounds": {0: 2.0, 1000: 0.5}}``; ``{"rate": 20.0}``, times the learning rate;
            ``"estimated"``, or ``{"estimated": margin, "every": rounds}``.

    Raises:
        ValueError: it is none of these, or a number is out of range.
    """
    if isinstance(given, Theta):
        return given
    if given == "estimated":
        return Estimated()
    if isinstance(given, Mapping):
        if given.keys() == {"rate"}:
            return ByRate(_positive("the factor of the learning rate", given["rate"]))
        if given.keys() == {"rounds"} and isinstance(given["rounds"], Mapping) and given["rounds"]:
            return _by_round(given["rounds"])
        if {"estimated"} <= given.keys() <= {"estimated", "every"}:
            margin, every = _positive("the margin", given["estimated"]), given.get("every", Estimated.every)
            if margin <= 1:
                raise ValueError(f"theta: the margin {margin:g} must be above 1, since models drift on; try 1.25")
            if isinstance(every, bool) or not isinstance(every, int) or every < 1:
                raise ValueError(f"theta: every={every!r} must be a number of rounds, 1 or more")
            return Estimated(margin, every)
    elif not isinstance(given, str):
        return ByRound((0,), (_positive("it", given),))
    raise ValueError(
        f"theta={given!r}: give a bound above 0, {{'rounds': {{0: 2.0, 1000: 0.5}}}}, {{'rate': 20.0}}, "
        "'estimated', or {'estimated': 1.25, 'every': 4}"
    )


def _by_round(given: Mapping[object, object]) -> ByRound:
    starts = []
    for key in given:
        whole = isinstance(key, str) and key.isdigit()  # as JSON and YAML may write it
        if isinstance(key, bool) or not (whole or isinstance(key, int)):
            raise ValueError(f"theta: {key!r} is no round; write {{'rounds': {{0: 2.0, 1000: 0.5}}}}")
        starts.append(int(str(key)))
    pairs = sorted(zip(starts, given.values(), strict=True), key=lambda each: each[0])
    if pairs[0][0] != 0:
        raise ValueError(f"theta: the first bound is of round {pairs[0][0]}; say what it is from round 0 on")
    return ByRound(tuple(start for start, _ in pairs), tuple(_positive("it", value) for _, value in pairs))


def _positive(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"theta: {what} must be a number above 0, not {value!r}: models differ, or there is no need")
    return float(value)
