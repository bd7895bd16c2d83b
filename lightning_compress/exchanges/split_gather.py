"""Every rank owns a shard: it adds up what the ranks selected in it, and sends the sum to all, with nothing lost.

The split all-gather of SparCML (Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: High-Performance Sparse
Communication for Machine Learning", SC 2019, arXiv 1802.08021): sums are sparse as long as that is less, then dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import Codec, Dense
from lightning_compress.codecs.base import aligned
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import (
    all_gather_rounds,
    all_reduce_bytes,
    all_reduce_rounds,
    all_to_all_rounds,
)
from lightning_compress.exchanges import nonzeros
from lightning_compress.exchanges.base import (
    Exchange,
    ExchangePlan,
    agree_length,
    gather,
    length_bytes,
    length_rounds,
    longest,
    new_messages,
    rows,
    scatter,
)
from lightning_compress.keys import mix
from lightning_compress.message import MessagePlan, Section
from lightning_compress.state import States

WRITES, READS = (8.0, 4.0), (7.0, 4.5)
"""Times that copying takes, to write and to read numbers of which many are 0: by tensor operations, by a kernel."""
FLAG = 16
"""Bytes in front of a sum: the flag, and padding."""


@dataclass(frozen=True)
class SplitGather(Exchange):
    """All-to-all of shards, then all-gather of their sums, exact: a list, a bitmap or dense, whichever is least.

    For ``k`` of ``n`` elements a rank sends between ``4 k (W - 1) / W`` and ``2 k (W - 1) (1 + 1 / W)`` words of four
    bytes, and never more than half a dense all-reduce beyond its own ``2 k``: where many ranks select, all-gather goes
    on growing. What is selected arrives whole, so that nothing is lost twice.
    """

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        if not codec.sparse and not isinstance(codec, Dense):
            raise ValueError(
                "exchange='split_gather' sends sums as they are, which pays where few elements are sent; "
                f"{codec} sends all of them: use exchange='auto' or 'two_shot'"
            )

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        return _Plan(sections, world)


class _Plan(ExchangePlan):
    description = "split_gather"

    def __init__(self, sections: Sequence[Section], world: World) -> None:
        collective, device, meter = world
        size = collective.size
        parts = [[section.shard(rank, size) for section in sections] for rank in range(size)]
        self._shards = [MessagePlan(part, device, meter) for part in parts]
        self._places = [[slice(each.start, each.stop) for each in part] for part in parts]
        self._numels = [sum(each.layout.numel for each in part) for part in parts]
        self._collective = collective
        self._meter = meter
        self._largest = max(self._shards, key=lambda shard: shard.size)
        self._send = new_messages(size, self._largest.size, device)
        self._receive = torch.empty_like(self._send)
        self._sum = torch.zeros(max(self._numels), device=device)
        width = aligned(FLAG + nonzeros.HEADER + 4 * len(self._sum))
        self._message = new_messages(1, width, device)[0]
        self._messages = new_messages(size, width, device)
        first = (size - 1) * max(shard.expected_size for shard in self._shards) + length_bytes(self._largest, size)
        second = max(_expected(part, size) for part in parts)
        self.bytes_sent = first + (size - 1) * second + all_reduce_bytes(4, size)
        lengths = length_rounds(self._largest, size) + all_reduce_rounds(size)
        self.rounds = all_to_all_rounds(size) + lengths + all_gather_rounds(size)
        self.calls = 2 * size + 2
        fast = kernels.of(device) is not None
        self.copies = WRITES[fast] / size + READS[fast]  # the own shard's sum, and all sums

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        used = 0
        for peer, shard in enumerate(self._shards):
            shard.share(mix(key, peer))
            used = max(used, shard.encode(vector, self._send[peer, : shard.size], mix(key, rank, peer), flag))
        width = agree_length(self._largest, used, self._collective, out.device)
        received = rows(self._receive, size, width)
        self._collective.all_to_all(self._send[:, :width].contiguous(), received)
        own = self._shards[rank]
        flag.copy_(own.flags(received[:, : own.size]))
        problem = None
        try:
            own.decode(received[:, : own.size], out, 1 / size, accumulate=False)
        except ValueError as error:  # the other ranks wait for a sum
            problem = error
            flag.fill_(torch.inf)
        with self._meter.span("encode"):
            self._message[:4].view(torch.float32)[0] = flag
            end = FLAG + nonzeros.write(self._own(rank, out), self._message[FLAG:])
        width = longest(aligned(end), len(self._message), self._collective, out.device)
        messages = rows(self._messages, size, width)
        self._collective.all_gather(self._message[:width], messages)
        flag.zero_()
        with self._meter.span("decode"):
            for peer, message in enumerate(messages):
                theirs = message[:4].view(torch.float32)[0]
                if theirs.isinf():
                    raise problem or ValueError(f"rank {peer} was sent a message that it cannot read, and says why")
                flag.add_(theirs * 0.0)
                self._spread(peer, message[FLAG:], out)

    def _own(self, rank: int, out: Tensor) -> Tensor:
        """The sums of a shard, side by side."""
        if len(self._places[rank]) == 1:
            return out[self._places[rank][0]]
        sums = self._sum[: self._numels[rank]]
        gather(out, self._places[rank], sums)
        return sums

    def _spread(self, peer: int, message: Tensor, out: Tensor) -> None:
        if len(self._places[peer]) == 1:
            nonzeros.read(message, out[self._places[peer][0]])
            return
        sums = self._sum[: self._numels[peer]]
        nonzeros.read(message, sums)
        scatter(sums, self._places[peer], out)


def _expected(part: Sequence[Section], ranks: int) -> int:
    """Bytes of a sum, if the ranks select independently."""
    numel = sum(section.layout.numel for section in part)
    count = sum(section.layout.numel * (1 - (1 - section.codec.sent_share) ** ranks) for section in part)
    return FLAG + aligned(int(nonzeros.used_bytes(count, numel)))
