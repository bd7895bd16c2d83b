"""Predict the time of an exchange by the model of Hockney (latency and bandwidth), plus encoding time.

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
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < math.inf or (zero and value == 0)):
            least = "0 or more" if zero else "above 0"
            raise ValueError(f"{type(given).__name__}({name}={value!r}): it must be a finite number, {least}")


@dataclass(frozen=True)
class Link:
    """The link that a rank's messages cross.

    Args:
        latency_s: seconds until a small message has arrived, above 0.
        bytes_per_s: bytes that a rank sends per second while all ranks send, above 0.

    Raises:
        ValueError: one of them is not a finite number above 0.
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
        encode_s: seconds per encoded element.
        decode_s: seconds per decoded element, for each message.
        start_s: constant seconds per call.

    Raises:
        ValueError: one of them is not a finite number, 0 or more.
    """

    encode_s: float
    decode_s: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self, zero=True)


UNKNOWN = Link(1e-4, 1.25e8)
"""The link assumed where nothing may be measured: 1 Gbit/s and 100 us, common for Ethernet."""
COPIES, CODES, LISTS = Speeds(0.4e-9, 0.4e-9), Speeds(2e-9, 1e-9), Speeds(2e-9, 0.1e-9)
ENTROPY = Speeds(2.7e-9, 1.8e-9)
"""Speeds assumed where nothing may be measured: of copying float32, of good codecs, of sparse ones, which decode fast,
and of Huffman codes. One core."""

Work = Sequence[tuple[int, Speeds]]
"""Numbers of elements, each with the speeds of its codec."""


def wire_seconds(cost: Cost, link: Link, inside: Link | None = None, sharing: int = 1) -> float:
    """Return the seconds that messages travel.

    Args:
        cost: the exchange's cost.
        link: between ranks; between nodes if ``inside`` is given.
        inside: between the ranks of a node; None: as ``link``.
        sharing: ranks that share one network card.
    """
    inside = inside or link
    waits = (cost.rounds - cost.inner_rounds) * link.latency_s  # each round waits for the one before
    beyond = cost.bytes_sent - cost.inner_bytes
    outward = beyond * sharing / link.bytes_per_s  # the card sends for all ranks of the node
    inward = cost.inner_rounds * inside.latency_s + cost.inner_bytes / inside.bytes_per_s  # no card is involved
    return waits + outward + inward


def device_seconds(cost: Cost, work: Work, copy_s: float = 0.0, sums: Work | None = None) -> float:
    """Return the seconds that the rank's device encodes, decodes and copies.

    Args:
        cost: the exchange's cost.
        work: elements and speeds of each section.
        copy_s: seconds per copied element.
        sums: elements and speeds of the codecs that encode sums; None: as ``work``.
    """
    once = 0.0
    for numel, speeds in work if sums is None else sums:
        once += numel * cost.sum_encodes * speeds.encode_s
        once += numel * cost.sum_decodes * speeds.decode_s
    for numel, speeds in work:
        once += numel * (cost.encodes - cost.sum_encodes) * speeds.encode_s  # as often as the exchange encodes it
        once += numel * (cost.decodes - cost.sum_decodes) * speeds.decode_s  # grows with the messages that arrive
        once += numel * cost.copies * copy_s  # uncompressed values pass through memory too
        once += cost.calls * speeds.start_s  # each shard is a separate call
    return once


def overlapped_seconds(wire_s: float, device_s: float, parts: int) -> float:
    """Return the seconds of an exchange in parts, of which some travel while others are encoded or decoded.

    Args:
        wire_s: seconds that all of it travels.
        device_s: seconds that the device works.
        parts: of the vector; 0 or 1: one waits for the other.
    """
    return max(wire_s, device_s) + min(wire_s, device_s) / max(1, parts)


def link_of(given: object) -> Link:
    """Return a link, built from a mapping of its two numbers if necessary.

    Raises:
        ValueError: ``given`` is neither a link nor such a mapping.
    """
    if isinstance(given, Link):
        return given
    names = {each.name for each in fields(Link)}
    if not isinstance(given, Mapping) or set(given) != names:
        raise ValueError(
            f"link={given!r}: use null (it is measured), or a mapping of latency_s and bytes_per_s, such as "
            "{latency_s: 1e-4, bytes_per_s: 1.25e8} for 1 Gbit/s Ethernet"
        )
    return Link(**given)
