"""Choose the exchange that keeps traffic low without losing anything twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_compress.codecs import Dense
from lightning_compress.codecs.base import ALIGNMENT, aligned
from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.base import Exchange, ExchangePlan
from lightning_compress.exchanges.two_shot import TwoShot
from lightning_compress.message import Section
from lightning_compress.meter import Meter

log = logging.getLogger(__name__)

TWO_SHOT_RANKS = 4
"""Below this, two-shot sends as much as all-gather and encodes twice."""


@dataclass(frozen=True)
class Auto(Exchange):
    """All-reduce for messages that may be summed; else all-gather up to 3 ranks and for sparsifiers; else two-shot.

    Where the compressed exchange would send as many bytes as a float32 all-reduce (a sparsifier at many ranks), the
    group travels dense: nothing is lost and nothing is slower. The choice is logged once per group on rank 0.
    """

    def plan(
        self, sections: Sequence[Section], collective: Collective, device: torch.device, meter: Meter
    ) -> ExchangePlan:
        """See ``Exchange.plan``."""
        plan = self._choose(sections, collective.size).plan(sections, collective, device, meter)
        reason = ""
        if plan.bytes_sent > dense_bytes(sections, collective.size):
            reason = f" of float32, since {plan.description} would send {plan.bytes_sent:,} bytes"
            dense = [Section(Dense(), section.layout, section.start) for section in sections]
            plan = AllReduce().plan(dense, collective, device, meter)
        if collective.rank == 0:
            count = sum(section.layout.numel for section in sections)
            log.info("%s%s: %s bytes a rank for %s elements", plan.description, reason, f"{plan.bytes_sent:,}", count)
        return plan

    @staticmethod
    def _choose(sections: Sequence[Section], ranks: int) -> Exchange:
        codecs = {section.codec for section in sections}
        if all(codec.sum_dtype for codec in codecs):
            return AllReduce()
        if ranks < TWO_SHOT_RANKS or any(codec.sparse for codec in codecs):
            return AllGather()
        return TwoShot()


def dense_bytes(sections: Sequence[Section], ranks: int) -> int:
    """Bytes that one of ``ranks`` sends when these sections travel as float32 in an all-reduce."""
    return all_reduce_bytes(ALIGNMENT + sum(aligned(4 * section.layout.numel) for section in sections), ranks)
