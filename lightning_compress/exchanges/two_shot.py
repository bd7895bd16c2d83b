"""Every rank owns a shard: it sums the others' messages for it, encodes the sum, and sends that to all.

This is the double quantisation of 1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014) with one residual: the
owner's own shard enters raw, and what the second encode leaves stays in that shard of the owner's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.exchanges.base import Exchange, ExchangePlan, new_messages
from lightning_compress.keys import mix
from lightning_compress.message import MessagePlan, Section
from lightning_compress.meter import Meter


@dataclass(frozen=True)
class TwoShot(Exchange):
    """All-to-all of shards, then all-gather of the encoded sums; a rank sends ``2 (W - 1) / W`` messages.

    Traffic and decoding per rank do not grow with the ranks. Encodes twice: for sparsifiers the second stage drops
    what the first one kept, which is another algorithm; ``auto`` never chooses it for them.
    """

    def plan(
        self, sections: Sequence[Section], collective: Collective, device: torch.device, meter: Meter
    ) -> ExchangePlan:
        """See ``Exchange.plan``."""
        size = collective.size
        shards = [[section.shard(rank, size) for section in sections] for rank in range(size)]
        return _Plan([MessagePlan(shard, device, meter) for shard in shards], collective, device)


class _Plan(ExchangePlan):
    description = "two_shot"

    def __init__(self, shards: list[MessagePlan], collective: Collective, device: torch.device) -> None:
        self._shards = shards
        self._collective = collective
        width = max(shard.size for shard in shards)
        self._send = new_messages(collective.size, width, device)
        self._receive = new_messages(collective.size, width, device)
        self._sum = new_messages(1, width, device)
        self.bytes_sent = 2 * (collective.size - 1) * width

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        own = self._shards[rank]
        for peer, shard in enumerate(self._shards):
            if peer != rank:
                shard.encode(vector, self._send[peer, : shard.size], mix(key, rank, peer), flag)
        self._collective.all_to_all(self._send, self._receive)
        for others in (self._receive[:rank, : own.size], self._receive[rank + 1 :, : own.size]):
            own.decode(others, vector, 1.0, accumulate=True)
            flag.add_(own.flags(others))
        own.encode(vector, self._sum[0, : own.size], mix(key, rank, size), flag)
        self._collective.all_gather(self._sum[0], self._receive)
        for peer, shard in enumerate(self._shards):
            shard.decode(self._receive[peer : peer + 1, : shard.size], out, 1 / size, accumulate=False)
            flag.add_(shard.flags(self._receive[peer : peer + 1, : shard.size]))
