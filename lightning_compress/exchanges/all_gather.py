"""Send every message to every rank; each rank decodes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, World
from lightning_compress.collectives.counting import all_gather_rounds
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.core.workspace import Messages
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan, length_cost, longest
from lightning_compress.exchanges.message import MessagePlan, Out, Section
from lightning_compress.kernels import Summands


@dataclass(frozen=True)
class AllGather(Exchange):
    """One all-gather, then one fused decode; a rank sends ``W - 1`` messages.

    Each vector is encoded once, so there is only one encoding error. Best for up to three ranks, and for sparse
    messages.
    """

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        return _Plan(MessagePlan(sections, world.device, world.meter), world.collective, world.device)


class _Plan(ExchangePlan):
    description = "all_gather"

    def __init__(self, plan: MessagePlan, collective: Collective, device: torch.device) -> None:
        self._plan = plan
        self._collective = collective
        self._own = Messages(1, plan.size, device)
        self._messages = Messages(collective.size, plan.size, device)
        size = collective.size
        self.in_pieces = plan.in_pieces
        self.cost = length_cost(plan, size) + Cost(
            bytes_sent=(size - 1) * plan.expected_size,
            rounds=all_gather_rounds(size),
            encodes=1.0,
            decodes=float(size),
            calls=2,
        )

    def mean(self, vector: Tensor, out: Out, key: int, flag: Tensor, summands: Summands = None) -> None:
        rank, size = self._collective.rank, self._collective.size
        self._plan.agree(key, rank, size)
        message = self._own.all[0]
        used = self._plan.encode(vector, message, mix(key, rank), flag, keep=False, summands=summands)
        width = self._plan.size
        if self._plan.variable:
            width = longest(used, width, self._collective, vector.device)
        messages = self._messages.all.view(-1)[: size * width].view(size, width)
        self._collective.all_gather(message[:width], messages)
        flag.copy_(self._plan.flags(messages))
        self._plan.decode(messages, out, 1 / size, accumulate=False)
