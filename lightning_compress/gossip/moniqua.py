"""Moniqua: means with neighbours from the lowest bits of parameters, without any memory of what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_compress.gossip.lattice import ROUNDINGS, Rounding, relative_error
from lightning_compress.gossip.theta import Estimated, Theta, read_theta

WIDTHS = (1, 2, 4, 8)
SLACK = {1: 0.15, 2: 0.4, 4: 1.0, 8: 1.0}
"""How far to move by default, by bits."""
DITHERED = 2
"""Bits up to which rounding is dithered by default."""


@dataclass(frozen=True)
class Moniqua:
    """Send each parameter's place within an interval of width ``B = 2 theta / (1 - 2 delta)``, with 1 to 8 bits.

    Neighbours' models are near: if no parameter differs by theta or more, the interval tells which of all numbers with
    this place is meant, to ``delta B``, and no memory of earlier messages is needed. ``delta`` is the error of the
    rounding: ``2^-(bits + 1)`` of the interval, or ``2^-bits`` for "stochastic". Both sides of an edge move by the same
    difference of whole numbers, so the mean of the models stays where it is.

    Args:
        bits: of a parameter: 1, 2, 4 or 8.
        rounding: "nearest", to the middles of cells; "dither", the same with random cells that all ranks have in
            common, right on average; "stochastic", up or down at random, likewise, which takes at least 2 bits. None:
            "dither" for 1 and 2 bits, "nearest" for 4 and 8.
        slack: how far to move towards the neighbours by codes, in (0, 1]: the mixing matrix is ``slack W + (1 - slack)
            I``. Few bits need less than 1, or noise grows faster than agreement. What is sent as float32 has no noise,
            and is averaged in full. None: 1 for 8 and 4 bits, 0.4 for 2, 0.15 for 1.
        theta: by how much parameters of neighbours differ at most: a number; ``{"rounds": {0: 2.0, 1000: 0.5}}``;
            ``{"rate": 20.0}``, times the learning rate, which must then be the same on all ranks (where it is 0, times
            the last one above 0, before which float32 is sent); or "estimated", or ``{"estimated": margin, "every":
            rounds}``: for each block of 4,096 parameters, a tensor's last one shorter, margin times the largest
            difference that was seen. It is measured in the first round, which sends float32, and then follows what
            the hashes tell.
        verify: send a hash of 8 bytes for each block, and mix only what both neighbours recovered. What they did not
            goes as float32, in both directions. Theta of that block grows for all at the next comparison, in the first
            rounds and every 4th, and shrinks by a tenth when none failed. A theta that was given does not shrink below
            its value. Costs a message of a byte for each hash and waiting for it. Without it a difference above theta
            spoils both models by a whole interval, and nobody learns of it; theta must then be given.

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
        if self.slack is not None and (
            isinstance(self.slack, bool) or not isinstance(self.slack, int | float) or not 0 < self.slack <= 1
        ):
            raise ValueError(f"moniqua: slack={self.slack!r} must be in (0, 1], or null for what suits the bits")
        if not isinstance(self.verify, bool):
            raise ValueError(f"moniqua: verify={self.verify!r} must be true or false")
        if isinstance(self.bound(), Estimated) and not self.verify:
            raise ValueError(
                "moniqua: theta='estimated' follows what the hashes tell, and verify=False sends none; give theta as a "
                "number, or verify=True"
            )

    @property
    def way(self) -> Rounding:
        """The rounding."""
        return self.rounding or ("dither" if self.bits <= DITHERED else "nearest")

    @property
    def delta(self) -> float:
        """The largest error of a code, as a share of the interval."""
        return relative_error(self.bits, self.way)

    @property
    def share(self) -> float:
        """How far to move towards the neighbours."""
        return SLACK[self.bits] if self.slack is None else float(self.slack)

    def bound(self) -> Theta:
        """Theta, read."""
        return read_theta(self.theta)

    def step(self, theta: Tensor) -> Tensor:
        """The width of a cell: there are ``2^bits`` of them in the interval B."""
        return theta * float(2 / (1 - 2 * self.delta) / 2**self.bits)
