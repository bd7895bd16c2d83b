"""Cut a long vector into parts, so that some travel while others are encoded or decoded."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_compress.collectives import World
from lightning_compress.exchanges.message import Section

PART, BYTES = 1 << 20, 1 << 19
"""The fewest elements of a part, and the fewest bytes of its message: shorter ones cost more time than they save."""
MOST = 8
"""The maximum number of parts of a vector."""


def part_count(sections: Sequence[Section], size: int, world: World) -> int:
    """Return the number of parts: one on an accelerator, and where a cut would change which elements are sent.

    Args:
        sections: what the vector consists of.
        size: bytes of its message.
        world: the ranks.
    """
    numel = sum(section.layout.numel for section in sections)
    divisible = world.device.type == "cpu" and world.collective.size > 1
    divisible = divisible and not any(section.codec.sparse for section in sections)
    return max(1, min(MOST, numel // PART, size // BYTES)) if divisible else 1


def parts_of(sections: Sequence[Section], count: int) -> list[list[Section]]:
    """Return ``count`` parts of nearly equal size, without empty sections; the sections themselves for one part."""
    if count == 1:
        return [list(sections)]
    parts = [[section.shard(number, count) for section in sections] for number in range(count)]
    return [[section for section in part if section.layout.numel] for part in parts]
