"""Choose the exchange that keeps traffic low without losing anything twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.codecs import Dense
from lightning_compress.codecs.base import ALIGNMENT, aligned
from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.base import Exchange, ExchangePlan
from lightning_compress.exchanges.split_gather import SplitGather
from lightning_compress.exchanges.two_shot import TwoShot
from lightning_compress.keys import mix
from lightning_compress.message import Section
from lightning_compress.meter import Meter
from lightning_compress.state import States

log = logging.getLogger(__name__)

TWO_SHOT_RANKS = 4
"""Below this, two-shot sends as much as all-gather and encodes twice."""

WORTH = 65536
"""Bytes that one more collective must save: half a millisecond at 1 Gbit/s, about what a collective takes to begin."""


@dataclass(frozen=True)
class Auto(Exchange):
    """All-reduce for messages that may be summed; else all-gather up to 3 ranks, and two-shot from 4 on.

    For sparse messages it is all-gather or split-gather from 4 ranks on, whichever is expected to send less.
    Where the compressed exchange would send more bytes than a float32 all-reduce (a sparsifier at many ranks), or there
    is only one rank, the group travels dense: nothing is lost and nothing is slower. Sections of several methods share
    one message, or go each the way that suits it where that saves enough. The choice is logged once a group on rank 0.
    """

    def plan(
        self,
        sections: Sequence[Section],
        collective: Collective,
        device: torch.device,
        meter: Meter,
        states: States | None = None,
    ) -> ExchangePlan:
        """See ``Exchange.plan``."""
        ways: dict[tuple[Exchange, ...], list[Section]] = {}
        for section in sections:
            ways.setdefault(self._choose([section], collective.size), []).append(section)
        plan = _together(self._choose(sections, collective.size), sections, collective, device, meter)
        if len(ways) > 1:
            apart = _Apart([_together(way, each, collective, device, meter) for way, each in ways.items()])
            if apart.bytes_sent + WORTH * (len(ways) - 1) < plan.bytes_sent:
                plan = apart
        if collective.rank == 0:
            count = sum(section.layout.numel for section in sections)
            log.info("%s: %s bytes a rank for %s elements", plan.description, f"{plan.bytes_sent:,}", count)
        return plan

    @staticmethod
    def _choose(sections: Sequence[Section], ranks: int) -> tuple[Exchange, ...]:
        """Those of which the one is taken that sends least."""
        codecs = {section.codec for section in sections}
        if all(codec.sum_dtype for codec in codecs):
            return (AllReduce(),)
        if ranks < TWO_SHOT_RANKS:
            return (AllGather(),)
        if not any(codec.sparse for codec in codecs):
            return (TwoShot(),)
        selective = all(codec.sparse or isinstance(codec, Dense) for codec in codecs)
        return (AllGather(), SplitGather()) if selective else (AllGather(),)


def _together(
    ways: tuple[Exchange, ...], sections: Sequence[Section], collective: Collective, device: torch.device, meter: Meter
) -> ExchangePlan:
    """One message, dense where that is less."""
    plans = [way.plan(sections, collective, device, meter) for way in ways]
    plan = min(plans, key=lambda each: each.bytes_sent)
    if collective.size > 1 and plan.bytes_sent <= dense_bytes(sections, collective.size):
        return plan
    dense = AllReduce().plan(
        [Section(Dense(), each.layout, each.start) for each in sections], collective, device, meter
    )
    dense.description += f" of float32, since {plan.description} would send {plan.bytes_sent:,} bytes"
    return dense


class _Apart(ExchangePlan):
    """Several messages, one after the other."""

    def __init__(self, plans: Sequence[ExchangePlan]) -> None:
        self._plans = plans
        self.bytes_sent = sum(plan.bytes_sent for plan in plans)
        self.description = ", ".join(plan.description for plan in plans)
        self.dense_places = [place for plan in plans for place in plan.dense_places]

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        for number, plan in enumerate(self._plans):
            plan.mean(vector, out, mix(key, number), flag)


def dense_bytes(sections: Sequence[Section], ranks: int) -> int:
    """Bytes that one of ``ranks`` sends when these sections travel as float32 in an all-reduce."""
    return all_reduce_bytes(ALIGNMENT + sum(aligned(4 * section.layout.numel) for section in sections), ranks)
