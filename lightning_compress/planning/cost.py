"""What a step costs by the model of Hockney (latency and bandwidth), with the time that encoding takes.

Hockney, "The communication challenge for MPP", Parallel Computing 1994; Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from lightning_compress.exchanges.exchange import Cost


def _check(given: object, zero: bool = False) -> None:
    for name, value in vars(given).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (0 < value < math.inf or (zero and value == 0)):
            least = "0 or more" if zero else "above 0"
            raise ValueError(f"{type(given).__name__}({name}={value!r}): it must be a finite number, {least}")


@dataclass(frozen=True)
class Link:
    """What a rank's messages cross.

    Args:
        latency_s: seconds from sending a small message until it has arrived, above 0.
        bytes_per_s: that a rank sends in a second while all ranks send, above 0.

    Raises:
        ValueError: they are no such numbers.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check(self)

    def __str__(self) -> str:
        return f"{self.bytes_per_s * 8e-6:,.0f} Mbit/s and {self.latency_s * 1e6:,.0f} us"


@dataclass(frozen=True)
class Speeds:
    """How fast a rank's device runs a codec.

    Args:
        encode_s: seconds per element of the vector that is encoded.
        decode_s: seconds per element of the vector and message that is decoded.
        start_s: seconds that a call takes for nothing.

    Raises:
        ValueError: they are not finite numbers, 0 or more.
    """

    encode_s: float
    decode_s: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self, zero=True)


UNKNOWN = Link(1e-4, 1.25e8)
"""Taken where nothing may be measured: 1 Gbit/s, and 100 us, as an Ethernet of our days has."""
COPIES, CODES, LISTS = Speeds(0.4e-9, 0.4e-9), Speeds(2e-9, 1e-9), Speeds(2e-9, 0.1e-9)
"""Likewise: how fast a core copies float32, and how fast good codecs are; lists decode at once."""

Work = Sequence[tuple[int, Speeds]]
"""Elements, and how fast they are encoded and decoded."""


def wire_seconds(cost: Cost, link: Link, inside: Link | None = None, sharing: int = 1) -> float:
    """Time that messages travel.

    Args:
        cost: of the exchange.
        link: between ranks, or between nodes if ``inside`` is given.
        inside: between the ranks of a node.
        sharing: ranks whose messages share one network card.
    """
    inside = inside or link
    waits = (cost.rounds - cost.inner_rounds) * link.latency_s  # a message waits for those it depends on
    beyond = cost.bytes_sent - cost.inner_bytes
    outward = beyond * sharing / link.bytes_per_s  # the card sends for all of its ranks
    inward = cost.inner_rounds * inside.latency_s + cost.inner_bytes / inside.bytes_per_s  # no card is in between
    return waits + outward + inward


def device_seconds(cost: Cost, work: Work, copy_s: float = 0.0, sums: Work | None = None) -> float:
    """Time that the rank's device encodes and decodes, and can do nothing else.

    Args:
        cost: of the exchange.
        work: elements and speeds, of each section.
        copy_s: seconds per element that is copied.
        sums: the same of the codecs that encode sums; None: by the same ones.
    """
    once = 0.0
    for numel, speeds in work if sums is None else sums:
        once += numel * cost.sum_encodes * speeds.encode_s
        once += numel * cost.sum_decodes * speeds.decode_s
    for numel, speeds in work:
        once += numel * (cost.encodes - cost.sum_encodes) * speeds.encode_s  # as often as the pattern encodes it
        once += numel * (cost.decodes - cost.sum_decodes) * speeds.decode_s  # grows with the messages that arrive
        once += numel * cost.copies * copy_s  # what stays float32 passes through memory all the same
        once += cost.calls * speeds.start_s  # a shard of its own is a call of its own
    return once


def link_of(given: object) -> Link:
    """A link, or a mapping of its two numbers.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, Link):
        return given
    names = {each.name for each in fields(Link)}
    if not isinstance(given, Mapping) or set(given) != names:
        raise ValueError(
            f"link={given!r} must be null (it is measured), or say latency_s and bytes_per_s, such as "
            "{latency_s: 1e-4, bytes_per_s: 1.25e8} for Ethernet of 1 Gbit/s"
        )
    return Link(**given)
