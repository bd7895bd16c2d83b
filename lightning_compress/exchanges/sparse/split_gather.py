"""Every rank owns a shard. It sums the elements that the ranks selected in it, and sends the exact sum to all.

This is the split all-gather of SparCML (Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: High-Performance
Sparse Communication for Machine Learning", SC 2019, arXiv 1802.08021). Sums are sent as sparse or dense, whichever is
smaller. Shards are cut so that the ranks selected equally many elements in each, as in Ok-Topk (Li, Hoefler,
"Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, arXiv 2201.07598).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import Codec, Dense
from lightning_compress.codecs.codec import aligned
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import (
    all_gather_rounds,
    all_reduce_bytes,
    all_reduce_rounds,
    all_to_all_rounds,
)
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.core.workspace import Growing, Messages
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan, longest
from lightning_compress.exchanges.head import LENGTH
from lightning_compress.exchanges.message import MessagePlan, Section, zero_nonfinite
from lightning_compress.exchanges.remote_error import FLAG, DeferredError, flags_of
from lightning_compress.exchanges.sparse import coding
from lightning_compress.exchanges.sparse.coding import SparseVector

WRITES, READS = (8.0, 4.0), (7.0, 4.5)
"""The time to write and to read a sparse vector, in multiples of copying it: by tensor operations, by a kernel."""


@dataclass(frozen=True)
class SplitGather(Exchange):
    """All-to-all of the elements selected in each shard, then all-gather of the exact sums of the shards.

    Both messages are lists, bitmaps or dense, whichever is smallest. For ``k`` of ``n`` elements, a rank sends between
    ``4 k (W - 1) / W`` and ``2 k (W - 1) (1 + 1 / W)`` words of four bytes, and never more than half a dense all-reduce
    plus its own ``2 k``. With all-gather, traffic would keep growing with the number of ranks. Each rank selects from
    its whole vector, as for ``all_gather``. So the same elements are applied for any number of ranks, and every
    selected element arrives: nothing is dropped twice. Shards end where equal shares of the ranks' selections end on
    average, so that frequently used rows of an embedding are shared out too.

        to an owner: one list per section | ...
        to all:      flag | padding to 16 bytes | sums of each section | ...
    """

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        check_selective("split_gather", codec)

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        return _Plan(sections, world)


class _Plan(ExchangePlan):
    description = "split_gather"

    def __init__(self, sections: Sequence[Section], world: World) -> None:
        collective, device, meter = world
        size = collective.size
        self._collective = collective
        self._meter = meter
        self._plan = MessagePlan(sections, device, meter)
        self._own = Messages(1, self._plan.size, device)
        self._send, self._receive = Growing(device), Growing(device)
        numels = [span.stop - span.start for span in self._plan.spans]
        self._most = sum(aligned(coding.most_bytes(numel) + coding.bitmap_bytes(numel)) for numel in numels)
        first, second = _expected(sections, size)
        agreeing = all_reduce_bytes(8 * (len(numels) * (size - 1) + 1), size) + 2 * all_reduce_bytes(LENGTH, size)
        fast = kernels.compiler(device) == "numba"
        self.cost = Cost(
            bytes_sent=(size - 1) * (first + second) + agreeing,
            rounds=all_to_all_rounds(size) + 3 * all_reduce_rounds(size) + all_gather_rounds(size),
            encodes=1.0,
            decodes=1.0,
            copies=WRITES[fast] * (1 + 1 / size) + READS[fast],  # own selection, own shard's sum, all sums
            calls=2,
        )

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        self._plan.share(key)
        self._plan.encode(vector, self._own.all[0], mix(key, rank), flag)
        self._plan.decode(self._own.all, out, 1.0, accumulate=False)
        rooms = [out[span] for span in self._plan.spans]
        with self._meter.encode:
            selected = [SparseVector.of(room) for room in rooms]
        bounds = self._bounds(selected, flag)
        parts = zip(*(_cut(each, edges) for each, edges in zip(selected, bounds, strict=True)), strict=True)
        received = self._to_owners([list(part) for part in parts] or [[]] * size)
        shards = [
            [room[edges[peer] : edges[peer + 1]] for room, edges in zip(rooms, bounds, strict=True)]
            for peer in range(size)
        ]
        error = DeferredError()
        with error.deferred(), self._meter.decode:
            _add(received, shards[rank])
        for message, shard in zip(self._to_all(shards, error), shards, strict=True):
            with self._meter.decode:
                _read(message, shard)
        for room in rooms:
            zero_nonfinite(room.mul_(1 / size), flag)

    def _bounds(self, selected: Sequence[SparseVector], flag: Tensor) -> list[list[int]]:
        """Return where shards begin and end in each section, equal on all ranks. Sums the flags on the way."""
        size, numels = self._collective.size, [each.numel for each in selected]
        bad = flag.isnan().long().view(1)
        table = torch.cat([*(_quantiles(each, size) for each in selected), bad])
        self._collective.all_reduce(table)
        *sums, any_bad = table.tolist()
        flag.fill_(torch.nan if any_bad else 0.0)
        bounds = []
        for number, numel in enumerate(numels):
            section_sums = sums[number * (size - 1) : (number + 1) * (size - 1)]
            cuts = (min(max(0, total // size), numel) for total in section_sums)
            bounds.append([0, *accumulate(cuts, max), numel])  # ascending, for any bytes
        return bounds

    def _to_owners(self, parts: Sequence[Sequence[SparseVector]]) -> Tensor:
        """Send each shard's elements to its owner, and return what this rank receives, one row per rank.

        Args:
            parts: for each shard, the selected elements of each section.
        """
        size, used = self._collective.size, max(sum(aligned(part.used_bytes) for part in each) for each in parts)
        width = longest(used, self._most, self._collective, self._own.device)
        send, received = self._send.rows(size, max(width, used)), self._receive.rows(size, width)
        with self._meter.encode:
            for row, each in zip(send, parts, strict=True):
                end = 0
                for part in each:
                    end += aligned(part.write(row[end:]))
        self._collective.all_to_all(send[:, :width].contiguous(), received)
        return received

    def _to_all(self, shards: Sequence[Sequence[Tensor]], error: DeferredError) -> Tensor:
        """Send this rank's sums to all, and return the sums of all shards, one row per shard.

        Raises:
            ValueError: an owner could not read a message; raised on every rank.
        """
        size = self._collective.size
        most = FLAG + max(sum(aligned(coding.most_bytes(len(part))) for part in shard) for shard in shards)
        message, end = self._send.rows(1, most)[0], FLAG
        with self._meter.encode:
            error.mark(message[:4].view(torch.float32).zero_())
            for sums in shards[self._collective.rank]:
                end += aligned(coding.write(sums, message[end:]))
        width = longest(end, most, self._collective, message.device)
        messages = self._receive.rows(size, width)
        self._collective.all_gather(message[:width], messages)
        error.check(flags_of(messages).isinf().tolist())
        return messages[:, FLAG:]


def check_selective(name: str, codec: Codec) -> None:
    """Raise ValueError if the codec sends most elements."""
    if not codec.sparse and codec.sum_dtype != torch.float32 and not isinstance(codec, Dense):
        raise ValueError(
            f"exchange={name!r} sends exact sums, which pays only for few elements, and "
            f"{codec} sends all of them; use exchange='auto' or 'two_shot'"
        )


def expected_count(sections: Sequence[Section], ranks: int) -> float:
    """Return the expected number of elements in the union of ``ranks`` selections, independent or equal ones."""
    count = 0.0
    for section in sections:
        choices = (
            ranks if section.codec.sum_dtype is None else 1
        )  # summable messages hold the same elements on all ranks
        count += section.layout.numel * (1 - (1 - section.codec.sent_share) ** choices)
    return count


def _quantiles(selected: SparseVector, parts: int) -> Tensor:
    """Return indices that cut a sparse vector into equal shares, int64 ``[parts - 1]``; ties go to equal lengths."""
    count, numbers = len(selected.values), torch.arange(1, parts, dtype=torch.int64, device=selected.values.device)
    even = numbers * selected.numel // parts
    if selected.indices is None or not count:
        return even
    before = (numbers * count + parts - 1) // parts  # elements before each cut
    ends = torch.cat([selected.indices, selected.indices.new_tensor([selected.numel])])
    return torch.minimum(torch.maximum(even, ends[before - 1] + 1), ends[before])


def _cut(selected: SparseVector, bounds: Sequence[int]) -> list[SparseVector]:
    """Return the parts of a sparse vector between consecutive bounds."""
    edges = zip(pairwise(bounds), pairwise(selected.cuts(bounds)), strict=True)
    return [selected.part(start, stop, first, last) for (start, stop), (first, last) in edges]


def _add(received: Tensor, sums: Sequence[Tensor]) -> None:
    """Sum the received lists in rank order.

    Raises:
        ValueError: a message is damaged.
    """
    for section in sums:
        section.zero_()
    for row in received:
        end = 0
        for section in sums:
            part = SparseVector.read(row[end:], len(section))
            part.add_to(section)
            end += aligned(part.used_bytes)


def _read(message: Tensor, sums: Sequence[Tensor]) -> None:
    """Write all sums of a shard, zeros too.

    Raises:
        ValueError: the message is damaged.
    """
    end = 0
    for section in sums:
        end += aligned(coding.read(message[end:], section))


def _expected(sections: Sequence[Section], ranks: int) -> tuple[int, int]:
    """Return the expected bytes of the longest list and of the longest sum, for independent selections."""
    # The averaged cuts balance the sums of shards, but not one rank's lists: their longest is a matter of chance.
    spread = NormalDist().inv_cdf((ranks**2 - 0.375) / (ranks**2 + 0.25)) * (1 - 1 / ranks)
    first, second = 0, FLAG
    for section in sections:
        numel = -(-section.layout.numel // ranks)
        selected, summed = (min(numel, expected_count([section], each) / ranks) for each in (1, ranks))
        most = min(selected + spread * math.sqrt(selected), numel)
        if numel:
            first += aligned(int(coding.used_bytes(most, numel, exact=True)))
            second += aligned(int(coding.used_bytes(summed, numel)))
    return first, second
