"""Messages that may be summed are summed by the transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.exchanges.base import Exchange, ExchangePlan, new_messages
from lightning_compress.keys import mix
from lightning_compress.message import MessagePlan, Section
from lightning_compress.meter import Meter
from lightning_compress.state import States


@dataclass(frozen=True)
class AllReduce(Exchange):
    """One all-reduce per dtype in the message; a rank sends ``2 (W - 1) / W`` messages.

    Only for methods whose messages may be summed: none, fp16, bf16. What the transport's own additions round off is
    no rank's residual: a cast owes the local half of the conservation law only.
    """

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        if codec.sum_dtype is None:
            raise ValueError(
                f"exchange='all_reduce' adds messages up, and those of {codec} cannot be added; "
                "use exchange='auto', 'all_gather' or 'two_shot'"
            )

    def plan(
        self,
        sections: Sequence[Section],
        collective: Collective,
        device: torch.device,
        meter: Meter,
        states: States | None = None,
    ) -> ExchangePlan:
        """See ``Exchange.plan``."""
        plan = _Plan(MessagePlan(sections, device, meter, summands=collective.size), collective, device)
        plan.dense_places = [slice(each.start, each.stop) for each in sections if isinstance(each.codec, Dense)]
        return plan


class _Plan(ExchangePlan):
    description = "all_reduce"

    def __init__(self, plan: MessagePlan, collective: Collective, device: torch.device) -> None:
        assert plan.sum_runs is not None
        self._plan = plan
        self._collective = collective
        self._messages = new_messages(1, plan.size, device)
        self._sums = [self._messages[0, run.start : run.stop].view(run.dtype) for run in plan.sum_runs]
        self.bytes_sent = sum(all_reduce_bytes(run.stop - run.start, collective.size) for run in plan.sum_runs)
        self.rounds = len(plan.sum_runs) * all_reduce_rounds(collective.size)

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        self._plan.share(key)
        self._plan.encode(vector, self._messages[0], mix(key, self._collective.rank), flag)
        for values in self._sums:
            self._collective.all_reduce(values)
        flag.copy_(self._plan.flags(self._messages))
        self._plan.decode(self._messages, out, 1 / self._collective.size, accumulate=False)
