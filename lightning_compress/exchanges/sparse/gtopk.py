"""The k largest elements of the sum, by way of the k largest of every sum on a tree of the ranks.

Shi, Wang, Zhao, Tang, Wang, Tang, Chu, "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks", ICDCS 2019, arXiv 1901.04359.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.codecs.base import aligned
from lightning_compress.collectives import World
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.exchanges.base import Exchange, ExchangePlan, new_messages
from lightning_compress.exchanges.binomial import levels_of, links
from lightning_compress.exchanges.cost import Cost
from lightning_compress.exchanges.message import MessagePlan, Section, settle
from lightning_compress.exchanges.sparse import coding
from lightning_compress.exchanges.sparse.lists import Listed, added, united
from lightning_compress.exchanges.sparse.rounds import HEADER, Rounds, seal
from lightning_compress.exchanges.sparse.selection import (
    Compact,
    check_fed_back,
    check_selective,
    expected_count,
    keeps_all,
)


@dataclass(frozen=True)
class GTopK(Exchange):
    """Up a binomial tree, where each merge keeps the largest elements of the sum of two, and down again.

    A merge keeps as many elements of each section as the fuller of its two halves has: k for a codec that sends k, so
    that no message grows and a rank sends at most ``2 k (1 + log2 W)`` words of four bytes, and most send ``4 k``.
    The authors' bookkeeping loses what one subtree dropped and another one kept; here a merge gives what it drops to
    the residual of the rank that merged, so that the sum over the ranks is exact. What is sent dense stays whole.

    It is another algorithm than the sum of what was selected: elements wait longer, and on another rank than the one
    that sent them. So ``dgc`` with masking cannot use it, and ``auto`` never chooses it.
    """

    hands_over: ClassVar[bool] = True

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        check_selective("gtopk", codec)
        check_fed_back("gtopk", codec)

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        return _Plan(sections, world)


class _Plan(ExchangePlan):
    description = "gtopk"

    def __init__(self, sections: Sequence[Section], world: World) -> None:
        collective, device, meter = world
        self._collective = collective
        self._meter = meter
        self._plan = MessagePlan(sections, device, meter)
        self._compact, self._left = Compact(sections, device), Compact(sections, device)
        ends = [0, *accumulate(section.layout.numel for section in sections)]
        self._cuts = torch.tensor(ends, device=device)
        self._whole = [keeps_all(section.codec) for section in sections]
        self._levels = levels_of(collective.rank, collective.size)
        self._rounds = Rounds(world, 1)
        self._own = new_messages(1, self._plan.size, device)
        numel = self._compact.numel
        most = HEADER + aligned(coding.HEADER + coding.bitmap_bytes(numel) + 4 * numel)
        self._send, self._receive = new_messages(2, most, device)
        levels = len(self._levels)
        message = HEADER + aligned(int(coding.used_bytes(expected_count(sections, 1), numel, exact=True)))
        self.cost = Cost(
            bytes_sent=links(self._levels) * message + ((levels + 2) * self._rounds.table_bytes if levels else 0),
            rounds=3 * levels + 2 if levels else 0,
            encodes=1.0,
            decodes=2.0 + levels,
            calls=2,
            waited_bytes=(2 * levels - links(self._levels)) * message,
        )

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        self._plan.share(key)
        self._plan.encode(vector, self._own[0], mix(key, rank), flag)
        self._plan.decode(self._own, out, 1.0, accumulate=False)
        room = self._compact.take(out)
        if self._levels:
            with self._meter.span("encode"):
                held = Listed.of(room)
            self._rounds.begin()
            total = self._down(self._up(held, vector, flag))
            self._rounds.finish()
            total.spread(room)
        settle(room.mul_(1 / size), flag)
        self._compact.put(room, out)

    def _up(self, held: Listed, vector: Tensor, flag: Tensor) -> Listed:
        """Send to the parent, once the children have sent to this rank; returns what is held then."""
        rank = self._collective.rank
        for number, level in enumerate(self._levels):
            to, source = level.parent, level.child
            rows = self._agree(held if to is not None else None, 0 if number else int(flag.isnan()))
            if not number:
                flag.fill_(torch.nan if any(row[0] for row in rows) else 0.0)
            got: list[Listed] = []
            self._swap(rows[rank][1], [] if to is None else [to], source, rows[source or 0][1], got)
            if got:
                with self._meter.span("decode"):
                    held, dropped = merged(held, got[0], self._cuts, self._whole)
                    self._keep(dropped, vector)
        return held

    def _down(self, total: Listed) -> Listed:
        """Pass the sum of rank 0 on; returns it."""
        rows = self._agree(total if self._collective.rank == 0 else None, 0)
        for level in reversed(self._levels):
            to, source = [] if level.child is None else [level.child], level.parent
            got: list[Listed] = []
            self._swap(rows[0][1], to, source, rows[0][1], got)
            if got:
                total = got[0]
            if source is not None:  # to be passed on as it came
                self._send, self._receive = self._receive, self._send
        return total

    def _agree(self, held: Listed | None, word: int) -> list[list[int]]:
        used = 0
        if held is not None:
            with self._meter.span("encode"):
                used = seal(self._send, held.write(self._send[HEADER:]))
        return self._rounds.agree([used], len(self._send), word)

    def _swap(self, size: int, to: Sequence[int], source: int | None, length: int, got: list[Listed]) -> None:
        receives = {} if source is None else {source: self._receive[:length]}

        def read(_: int, body: Tensor) -> None:
            got.append(Listed.read(body, self._compact.numel))

        self._rounds.swap(dict.fromkeys(to, self._send[:size]), receives, read)

    def _keep(self, dropped: Listed, vector: Tensor) -> None:
        """What a merge drops goes out again with a later gradient of this rank."""
        assert dropped.indices is not None
        left = self._left.take(vector)
        left.index_add_(0, dropped.indices, dropped.values)
        self._left.put(left, vector)


def merged(one: Listed, other: Listed, cuts: Tensor, whole: Sequence[bool]) -> tuple[Listed, Listed]:
    """The largest elements of a sum, and the others.

    Args:
        one: the first summand.
        other: the second one.
        cuts: int64 ``[sections + 1]``: where sections begin and end. Of each as many elements are kept as the summand
            has that has more of them; of equal ones the first.
        whole: sections of which all are kept.
    """
    indices, (mine, theirs) = united([one, other])
    if indices is None:
        indices = torch.arange(one.numel, device=one.values.device)
    values = added([one.values, other.values], [mine, theirs], len(indices))
    edges = torch.searchsorted(indices, cuts).tolist()
    counts = [each.cuts(cuts.tolist()) for each in (one, other)]
    kept = torch.zeros(len(indices), dtype=torch.bool, device=indices.device)
    for number, (first, last) in enumerate(pairwise(edges)):
        k = max(each[number + 1] - each[number] for each in counts)
        if whole[number]:
            kept[first:last] = True
        else:
            order = values[first:last].abs().sort(descending=True, stable=True).indices
            kept[order[:k] + first] = True
    few = Listed(one.numel, None if bool(kept.all()) and len(kept) == one.numel else indices[kept], values[kept])
    return few, Listed(one.numel, indices[~kept], values[~kept])
