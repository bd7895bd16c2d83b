"""Send every message to every rank; each rank decodes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, World
from lightning_compress.collectives.counting import all_gather_rounds
from lightning_compress.core.random import mix
from lightning_compress.core.source import Source
from lightning_compress.core.state import States
from lightning_compress.core.told import Opening, Told
from lightning_compress.core.workspace import Messages
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan
from lightning_compress.exchanges.head import bits_of, opening_of
from lightning_compress.exchanges.message import MessagePlan, Out, Section
from lightning_compress.exchanges.parts import part_count, parts_of
from lightning_compress.exchanges.varying import Varying, lengths_cost


@dataclass(frozen=True)
class AllGather(Exchange):
    """One all-gather, then one fused decode; a rank sends ``W - 1`` messages.

    Each vector is encoded once, so there is only one encoding error. Best for up to three ranks, and for sparse
    messages.
    """

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        whole = MessagePlan(sections, world.device, world.meter, marked=True)
        count = part_count(sections, whole.size, world)
        cut = parts_of(sections, count)
        parts = [whole] if count == 1 else [MessagePlan(part, world.device, world.meter, marked=True) for part in cut]
        plan = _Plan(parts, world.collective, world.device)
        plan.marked = all(section.marks for section in sections)
        return plan


class _Plan(ExchangePlan):
    description = "all_gather"

    def __init__(self, plans: Sequence[MessagePlan], collective: Collective, device: torch.device) -> None:
        self._collective = collective
        size, first = collective.size, plans[0]
        self._parts = [(plan, Messages(1, plan.size, device), Messages(size, plan.size, device)) for plan in plans]
        self._varying = [Varying.of([plan] * size, collective, device, owners=True) for plan in plans]
        self.cost = lengths_cost(first.variable, size, True) + Cost(
            bytes_sent=(size - 1) * sum(plan.expected_size for plan in plans),
            rounds=all_gather_rounds(size),  # parts share the wire
            encodes=1.0,
            decodes=float(size),
            calls=2 * len(plans),
            parts=len(plans),
        )

    def mean(self, vector: Tensor, out: Out, key: int, flag: Tensor, source: Source | None = None) -> None:
        rank, size = self._collective.rank, self._collective.size
        begun = []
        late = self.tells and len(self._parts) == 1 and not self._parts[0][0].variable
        for number, (plan, own, all_messages) in enumerate(self._parts):
            part_key = mix(key, number) if number else key
            if plan.draws_alike:
                plan.agree(part_key, rank, size)
            plan.head.written = self.opened
            message = own.all[0]
            used = plan.encode(vector, message, mix(part_key, rank), flag, False, source, late)
            messages = all_messages.all
            if varying := self._varying[number]:
                wait = varying.begin({rank: message}, {rank: used}, messages)
            else:
                wait = self._collective.begin("all_gather", message, messages)
            begun.append((messages, wait))
        for (plan, _, _), (messages, wait) in zip(self._parts, begun, strict=True):
            wait()
            if not late:
                plan.head.read(messages, flag)
            plan.decode(messages, out, 1 / size, accumulate=False)
        self.told = Told(messages, self._bits, size) if late else None

    @cached_property
    def opening(self) -> Opening | None:
        """See ``ExchangePlan.opening``."""
        (plan, own, _), *more = self._parts
        return None if more or plan.variable else opening_of([plan.head], own.all, own.all[0], -1)

    @cached_property
    def _bits(self) -> tuple[int, ...]:
        """See ``Told``."""
        return bits_of([(self._parts[0][0].head, 0)])
