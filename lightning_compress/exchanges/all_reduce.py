"""Messages that may be summed are summed by the transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import Collective, World
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.core.buffers import Messages
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.exchanges.base import Exchange, ExchangePlan
from lightning_compress.exchanges.cost import Cost
from lightning_compress.exchanges.message import MessagePlan, Section
from lightning_compress.exchanges.straight import Straight

PART = 1 << 20
"""Elements that are worth a message of their own: at 10 Gbit/s they travel for some milliseconds."""
MOST = 8
"""Messages at most."""


@dataclass(frozen=True)
class AllReduce(Exchange):
    """One all-reduce per dtype in the message; a rank sends ``2 (W - 1) / W`` messages.

    Only for methods whose messages may be summed: none, fp16, bf16, randomk. What the transport's own additions round
    off is no rank's residual: for a cast only the local half of the conservation law holds.
    """

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        if codec.sum_dtype is None:
            raise ValueError(
                f"exchange='all_reduce' adds messages up, and those of {codec} cannot be added; "
                "use exchange='auto', 'all_gather' or 'two_shot'"
            )

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        collective, device, meter = world
        parts = _parts(sections, device, collective.size)
        messages = [MessagePlan(part, device, meter, summands=collective.size) for part in parts]
        plan = _Plan(messages, collective, device)
        plan.dense_spans = [each.span for each in sections if isinstance(each.codec, Dense)]
        plan.straight = Straight.of(parts, plan.messages, world)
        return plan


def _parts(sections: Sequence[Section], device: torch.device, ranks: int) -> list[list[Section]]:
    """On a CPU long vectors go in parts, so that some travel while others are encoded and decoded."""
    numel = sum(section.layout.numel for section in sections)
    count = min(MOST, numel // PART)
    divisible = device.type == "cpu" and ranks > 1 and not any(section.codec.sparse for section in sections)
    if not divisible or count < 2:
        return [list(sections)]
    parts = [[section.shard(number, count) for section in sections] for number in range(count)]
    return [[section for section in part if section.layout.numel] for part in parts]


class _Plan(ExchangePlan):
    description = "all_reduce"

    def __init__(self, plans: Sequence[MessagePlan], collective: Collective, device: torch.device) -> None:
        self._collective = collective
        self._plans = [(plan, plan.sum_runs or ()) for plan in plans]
        self.messages = [Messages(1, plan.size, device) for plan in plans]
        runs = [run for _, each in self._plans for run in each]
        self.cost = Cost(
            bytes_sent=sum(all_reduce_bytes(run.stop - run.start, collective.size) for run in runs),
            rounds=len(self._plans[0][1]) * all_reduce_rounds(collective.size),  # parts wait for the wire, not again
            encodes=1.0,
            decodes=1.0,
            calls=len(plans),
        )

    @cached_property
    def _parts(self) -> list[tuple[MessagePlan, Tensor, list[Tensor]]]:
        """Each part's plan, message and what of it is summed."""
        parts = []
        for (plan, runs), messages in zip(self._plans, self.messages, strict=True):
            sums = [messages.all[0, run.start : run.stop].view(run.dtype) for run in runs]
            parts.append((plan, messages.all, sums))
        return parts

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        waits = []
        for number, (plan, message, sums) in enumerate(self._parts):
            own = mix(key, number) if number else key
            plan.share(own)
            plan.encode(vector, message[0], mix(own, rank), flag)
            waits.append([self._collective.begin_all_reduce(values) for values in sums])
        flag.zero_()
        for (plan, message, _), begun in zip(self._parts, waits, strict=True):
            for wait in begun:
                wait()
            flag.add_(plan.flags(message))
            plan.decode(message, out, 1 / size, accumulate=False)
