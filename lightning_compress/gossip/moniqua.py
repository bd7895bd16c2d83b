"""Moniqua: means with the neighbours from the lowest bits of the parameters, without memory of earlier messages."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_compress.gossip.algorithm import check_share
from lightning_compress.gossip.lattice import ROUNDINGS, Rounding, relative_error

WIDTHS = (1, 2, 4, 8)
SLACK = {1: 0.15, 2: 0.4, 4: 1.0, 8: 1.0}
"""Default of ``slack``, by bits."""
DITHERED = 2
"""Most bits with which rounding is dithered by default."""


class Theta:
    """Bound on the difference of a parameter between two neighbours. The same on all ranks in every round."""

    def at(self, number: int, rate: float) -> float:
        """Return the bound of round ``number`` at this learning rate. 0: it is measured, or the learning rate is 0."""
        return 0.0


@dataclass(frozen=True)
class ByRound(Theta):
    """Bounds that hold from given rounds on, the first from round 0."""

    starts: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, number: int, rate: float) -> float:
        """See ``Theta``."""
        return self.values[bisect_right(self.starts, number) - 1]


@dataclass(frozen=True)
class ByRate(Theta):
    """A multiple of the learning rate, as in the paper's theorems: models differ by as much as they move."""

    factor: float

    def at(self, number: int, rate: float) -> float:
        """See ``Theta``."""
        return self.factor * rate


@dataclass(frozen=True)
class Estimated(Theta):
    """For each block, ``margin`` times the largest difference that was seen between any two neighbours.

    It is measured in the first round of each matrix of the topology, which averages whole float32 vectors. Then it
    follows the hashes: ranks compare the failed blocks in each of the first rounds, and later every ``every`` rounds.
    """

    margin: float = 1.25
    every: int = 4


@dataclass(frozen=True)
class Moniqua:
    """Send each parameter's place within an interval of width ``B = 2 theta / (1 - 2 delta)``, in 1 to 8 bits.

    The models of neighbours are close. If no parameter differs by theta or more, the receiver knows which of all
    numbers with this place is meant, to within ``delta B``, and needs no memory of earlier messages. ``delta`` is the
    rounding error as a share of the interval: ``2^-(bits + 1)``, or ``2^-bits`` for "stochastic". Both ends of an edge
    move by the same integer number of cells, in opposite directions, so the mean of the models does not change.

    Args:
        bits: for each parameter: 1, 2, 4 or 8.
        rounding: "nearest": to the middle of a cell. "dither": the same, with cells shifted at random, equally on all
            ranks; unbiased. "stochastic": up or down at random; unbiased, needs 2 bits or more. None: "dither" for 1
            and 2 bits, "nearest" for 4 and 8.
        slack: how far to move towards the neighbours, in (0, 1]: the mixing matrix is ``slack W + (1 - slack) I``. Few
            bits need less than 1, or noise grows faster than agreement. It does not apply to what is sent as float32,
            which has no noise. None: 1 for 8 and 4 bits, 0.4 for 2, 0.15 for 1.
        theta: largest difference of a parameter between neighbours. A number above 0; ``{"rounds": {0: 2.0, 1000:
            0.5}}``, from these rounds on; or ``{"rate": 20.0}``, times the learning rate, which must then be equal on
            all ranks (where it is 0, the last one above 0 counts; before that, float32 is sent). "estimated", or
            ``{"estimated": margin, "every": rounds}``: for each block of 4,096 parameters (the last block of a tensor
            is shorter), margin times the largest difference that was seen. The first round sends float32 and measures
            it; then it follows the hashes.
        verify: send a hash of 8 bytes for each block, and mix only blocks that both neighbours recovered. Other blocks
            are sent as float32 in both directions. The theta of such a block grows on all ranks at the next comparison:
            in each of the first rounds, then every 4th, or every 16th with a theta that you gave. It shrinks if no
            block failed, but not below a theta that you gave. Differences of more than 8 times theta must last for it
            to grow, so that one spike of a gradient leaves no noise behind. It costs a second message of 1 byte for
            each block, and the wait for it. Without it, a difference above theta spoils both models by a whole
            interval, unnoticed; theta must then be given.

    Raises:
        ValueError: a value is out of range, or bits and rounding give delta >= 1/2.

    Lu, De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020, arXiv 2002.11787. Its
    constants for theta, delta and slack are for the worst case; here they are settings.
    """

    name: ClassVar[str] = "moniqua"
    bits: int = 8
    rounding: Rounding | None = None
    slack: float | None = None
    theta: Any = "estimated"
    verify: bool = True

    def __post_init__(self) -> None:
        if self.way not in ROUNDINGS:
            raise ValueError(f"moniqua: rounding={self.rounding!r} must be one of {', '.join(ROUNDINGS)}, or null")
        if isinstance(self.bits, bool) or self.bits not in WIDTHS:
            raise ValueError(f"moniqua: bits={self.bits!r} must be one of {', '.join(map(str, WIDTHS))}")
        if self.delta >= 0.5:
            raise ValueError(
                f"moniqua: bits={self.bits} with rounding={self.way!r} has delta={self.delta:g}, and it must be "
                "below 1/2; take rounding='nearest' or 'dither', or 2 bits"
            )
        check_share("moniqua: slack", self.slack)
        if not isinstance(self.verify, bool):
            raise ValueError(f"moniqua: verify={self.verify!r} must be true or false")
        if isinstance(self.bound(), Estimated) and not self.verify:
            raise ValueError(
                "moniqua: theta='estimated' follows what the hashes tell, and verify=False sends none; give theta as a "
                "number, or verify=True"
            )

    @property
    def way(self) -> Rounding:
        """The rounding, with the default resolved."""
        return self.rounding or ("dither" if self.bits <= DITHERED else "nearest")

    @property
    def delta(self) -> float:
        """The largest error of a code, as a share of the interval."""
        return relative_error(self.bits, self.way)

    @property
    def share(self) -> float:
        """``slack``, with the default resolved."""
        return SLACK[self.bits] if self.slack is None else float(self.slack)

    def bound(self) -> Theta:
        """Return ``theta`` as an object."""
        return read_theta(self.theta)

    def step(self, theta: Tensor) -> Tensor:
        """Return the width of a cell for each theta; the interval B has ``2^bits`` cells."""
        return theta * float(2 / (1 - 2 * self.delta) / 2**self.bits)


def read_theta(theta: object) -> Theta:
    """Return the ``Theta`` for what a user wrote.

    Args:
        theta: see ``Moniqua``.

    Raises:
        ValueError: it has none of these forms, or a number is out of range.
    """
    if isinstance(theta, Theta):
        return theta
    if theta == "estimated":
        return Estimated()
    if isinstance(theta, Mapping):
        if theta.keys() == {"rate"}:
            return ByRate(_positive("the factor of the learning rate", theta["rate"]))
        if theta.keys() == {"rounds"} and isinstance(theta["rounds"], Mapping) and theta["rounds"]:
            return _by_round(theta["rounds"])
        if {"estimated"} <= theta.keys() <= {"estimated", "every"}:
            margin, every = _positive("the margin", theta["estimated"]), theta.get("every", Estimated.every)
            if margin <= 1:
                raise ValueError(f"theta: the margin {margin:g} must be above 1, since models drift apart; try 1.25")
            if isinstance(every, bool) or not isinstance(every, int) or every < 1:
                raise ValueError(f"theta: every={every!r} must be a number of rounds, 1 or more")
            return Estimated(margin, every)
    elif not isinstance(theta, str):
        return ByRound((0,), (_positive("it", theta),))
    raise ValueError(
        f"theta={theta!r}: give a bound above 0, {{'rounds': {{0: 2.0, 1000: 0.5}}}}, {{'rate': 20.0}}, "
        "'estimated', or {'estimated': 1.25, 'every': 4}"
    )


def _by_round(bounds: Mapping[object, object]) -> ByRound:
    values = {}
    for key, value in bounds.items():
        digits = isinstance(key, str) and key.isdigit()  # JSON and YAML may write the round as text
        if isinstance(key, bool) or not (digits or isinstance(key, int)):
            raise ValueError(f"theta: {key!r} is no round; write {{'rounds': {{0: 2.0, 1000: 0.5}}}}")
        values[int(str(key))] = _positive("it", value)
    starts = sorted(values)
    if starts[0] != 0:
        raise ValueError(f"theta: the first bound is of round {starts[0]}; add the bound for round 0")
    return ByRound(tuple(starts), tuple(values[start] for start in starts))


def _positive(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"theta: {what} must be a number above 0, not {value!r}, and finite")
    return float(value)
