"""Every rank owns a shard: it sums the others' messages for it, encodes the sum, and sends that to all.

This is the double quantisation of 1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014) with one residual: the
owner's own shard enters raw, and what the second encode leaves stays in that shard of the owner's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.collectives import Collective
from lightning_compress.exchanges.base import (
    Exchange,
    ExchangePlan,
    agree_length,
    length_bytes,
    new_messages,
    rows,
)
from lightning_compress.keys import mix
from lightning_compress.message import MessagePlan, Section
from lightning_compress.meter import Meter


@dataclass(frozen=True)
class TwoShot(Exchange):
    """All-to-all of shards, then all-gather of the encoded sums; a rank sends ``2 (W - 1) / W`` messages.

    Traffic and decoding per rank do not grow with the ranks. Encodes twice: for sparsifiers the second stage drops
    what the first one kept, which is another algorithm; ``auto`` never chooses it for them.
    """

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        if not codec.repeatable:
            raise ValueError(
                f"exchange='two_shot' encodes sums of what was decoded, and {codec} would rescale them once more; "
                "use exchange='auto', 'all_reduce' or 'all_gather'"
            )

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
        expected = max(shard.expected_size for shard in shards)
        self._all = max(shards, key=lambda shard: shard.size)
        self.bytes_sent = 2 * ((collective.size - 1) * expected + length_bytes(self._all, collective.size))

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        own = self._shards[rank]
        used = 0
        for peer, shard in enumerate(self._shards):
            shard.share(mix(key, peer))
            if peer != rank:
                used = max(used, shard.encode(vector, self._send[peer, : shard.size], mix(key, rank, peer), flag))
        width = self._width(used)
        received = rows(self._receive, size, width)
        self._collective.all_to_all(self._send[:, :width].contiguous(), received)
        for others in (received[:rank, : own.size], received[rank + 1 :, : own.size]):
            own.decode(others, vector, 1.0, accumulate=True)
            flag.add_(own.flags(others))
        width = self._width(own.encode(vector, self._sum[0, : own.size], mix(key, rank, size), flag))
        received = rows(self._receive, size, width)
        self._collective.all_gather(self._sum[0, :width], received)
        for peer, shard in enumerate(self._shards):
            message = received[peer : peer + 1, : shard.size]
            shard.decode(message, out, 1 / size, accumulate=False)
            flag.add_(shard.flags(message))

    def _width(self, used: int) -> int:
        """Bytes of each rank's row."""
        return agree_length(self._all, used, self._collective, self._send.device)
