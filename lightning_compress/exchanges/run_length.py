"""Sums in which runs of zeros are counted, all the way.

Hofmann, Ruenger, "MPI Reduction Operations for Sparse Floating-point Data", EuroPVM/MPI 2008.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_compress.collectives import World
from lightning_compress.exchanges import runs
from lightning_compress.exchanges.base import Exchange, ExchangePlan
from lightning_compress.exchanges.compact import expected_count
from lightning_compress.exchanges.recursive_doubling import DoublingPlan
from lightning_compress.message import Section
from lightning_compress.state import States


@dataclass(frozen=True)
class RunLength(Exchange):
    """The rounds of ``recursive_doubling``, with runs of zeros counted and the numbers between them as they are.

    For gradients that are 0 in stretches (rows of an embedding, units that were never active) and whole elsewhere: a
    number takes 4 bytes, a run 8, and a sum without any zero 8 bytes more than its numbers. So any method may use it,
    ``none`` too. Sums are exact, and nothing is lost twice.
    """

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        sizes = [section.layout.numel for section in sections]

        def used(ranks: int) -> float:
            shares = [expected_count([each], ranks) / max(1, each.layout.numel) for each in sections]
            parts = [runs.expected_bytes(numel, share) for numel, share in zip(sizes, shares, strict=True)]
            return runs.HEADER + 8 * any(share == 1 for share in shares) + sum(parts)

        return DoublingPlan("run_length", runs, used, sections, world)
