"""Sends encoded sums up a binomial tree of the ranks, and the message of its root back down.

S-Caffe uses it between the leaders of chains: Awan, Hamidouche, Hashmi, Panda, "S-Caffe: Co-designing MPI Runtimes
and Caffe for Scalable Deep Learning on Modern GPU Clusters", PPoPP 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import all_gather_rounds
from lightning_compress.contrib.exchanges.rounds import HEADER, Rounds, new_messages, seal
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan, Sums, read_sums, sections_of_sums
from lightning_compress.exchanges.message import MessagePlan, Section


@dataclass(frozen=True)
class Level:
    """A rank's part in one level of the tree.

    Args:
        parent: rank that receives this rank's sum, or None.
        child: rank whose sum this rank receives, or None.
    """

    parent: int | None
    child: int | None


def levels_of(rank: int, size: int) -> list[Level]:
    """Return the levels from the leaves to the root: ``ceil(log2(size))`` on every rank."""
    levels = []
    for distance in (1 << bit for bit in range((size - 1).bit_length())):
        offset = rank % (2 * distance)
        parent = rank - distance if offset == distance else None
        child = rank + distance if offset == 0 and rank + distance < size else None
        levels.append(Level(parent, child))
    return levels


def summands(rank: int, size: int) -> int:
    """Return the number of ranks in the sum that a rank sends to its parent, or the root to all."""
    return min(rank & -rank, size - rank) if rank else size


@dataclass(frozen=True)
class Binomial(Exchange):
    """Each rank adds its children's messages, sends the encoded sum to its parent, and receives the root's message.

    It takes ``2 log2 W`` rounds of one message each. A rank sends up to ``log2 W`` of them, half of the ranks only one.
    It suits small messages, and the leaders of nodes. Every rank encodes its whole vector once; what the message loses
    stays in its own vector, so that nothing is lost. A number is encoded up to ``1 + log2 W`` times on its way
    (``two_shot``: twice), and its residual may stay on another rank than the one that sent it. Sparse methods drop
    elements that other ranks selected, which is another algorithm; ``dgc`` with masking is refused. ``auto`` never
    chooses this exchange.

    The noise of unbiased methods averages out over the ranks, except the noise of encoding sums. So a sum of m ranks is
    encoded by a finer codec (``Codec.refined``), as in ``two_shot``. The variance is then at most ``1 + log2 W / 2``
    times that of ``all_gather``.

    Args:
        sums: codec of the sums. "refined": for unbiased methods, ``fft`` and ``dct``, more bits for sums of more
            ranks. "same": as for the ranks' own messages. Or a codec for all sums.

    Raises:
        ValueError: sums is none of these.
    """

    moves_residual: ClassVar[bool] = True
    sums: Sums = "refined"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", read_sums("Binomial", self.sums))  # frozen

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        if not codec.reencodable:
            raise ValueError(
                f"exchange='binomial' encodes decoded sums again, and {codec} would rescale them twice; "
                "use exchange='auto', 'all_reduce' or 'all_gather'"
            )
        if codec.correlated:
            raise ValueError(
                f"exchange='binomial' encodes sums of few ranks at a time, so correlated errors do not cancel: {codec} "
                "gains nothing by correlated=True; leave it out, or use exchange='auto', 'all_gather' or 'two_shot'"
            )

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        size = world.collective.size
        by_codecs: dict[tuple[Codec, ...], MessagePlan] = {}
        plans = []
        for rank in range(size):
            own = sections_of_sums(sections, summands(rank, size), self.sums)
            codecs = tuple(section.codec for section in own)
            if codecs not in by_codecs:
                by_codecs[codecs] = MessagePlan(own, world.device, world.meter)
            plans.append(by_codecs[codecs])
        return _Plan(plans, world, size if self.sums == "refined" else 1)


class _Plan(ExchangePlan):
    description = "binomial"

    def __init__(self, plans: Sequence[MessagePlan], world: World, sum_ranks: int) -> None:
        self._plans = plans  # by rank: of the sum that it sends to its parent, or the root to all
        self._collective = world.collective
        rank, size = world.collective.rank, world.collective.size
        self._levels = levels_of(rank, size)
        self._rounds = Rounds(world, 1)
        self._lengths = [HEADER + plan.size for plan in plans]
        expected = [HEADER + plan.expected_size for plan in plans]
        self._most, self._variable = max(self._lengths), any(plan.variable for plan in plans)
        self._send, self._receive = new_messages(2, self._most, world.device)
        levels = len(self._levels)
        tables = (levels + 2 if self._variable else 1) if levels else 0
        sent = sum(each.child is not None for each in self._levels) * expected[0] + (expected[rank] if rank else 0)
        self.cost = Cost(
            bytes_sent=sent + tables * self._rounds.table_bytes,
            rounds=2 * levels + tables * all_gather_rounds(size),
            encodes=1.0 + levels,  # in sequence
            decodes=1.0 + levels,
            sum_encodes=1.0 * levels,
            sum_decodes=1.0 * levels,
            calls=2 * (1 + levels),
        )
        self.sum_ranks = sum_ranks

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        for plan in set(self._plans):
            plan.share(key)
        self._rounds.begin()
        self._up(vector, mix(key, rank), flag)
        length = self._encode(vector, mix(key, rank), flag) if rank == 0 else 0
        length = self._agree(length)[0]
        for level in reversed(self._levels):
            self._swap(length, level.child, level.parent, length, lambda *_: None)
            if level.parent is not None:  # the received message is passed on unchanged
                self._send, self._receive = self._receive, self._send
        if self._levels:
            self._rounds.finish()
        message = self._send[None, HEADER:length]
        self._plans[0].head.read(message, flag.zero_())
        self._plans[0].decode(message, out, 1 / size, accumulate=False)

    def _up(self, vector: Tensor, key: int, flag: Tensor) -> None:
        def add(child: int, body: Tensor) -> None:
            plan = self._plans[child]
            try:
                plan.decode(body[None], vector, 1.0, accumulate=True)
                plan.head.read(body[None], flag)
            finally:  # numbers that are not finite cannot be encoded
                plan.zero_nonfinite(vector, flag)

        for level in self._levels:
            length = 0 if level.parent is None else self._encode(vector, key, flag)
            lengths = self._agree(length)  # the agreed lengths count, for this rank too
            self._swap(lengths[self._collective.rank], level.parent, level.child, lengths[level.child or 0], add)

    def _encode(self, vector: Tensor, key: int, flag: Tensor) -> int:
        plan = self._plans[self._collective.rank]
        self._send.zero_()  # a message of another plan may have left bytes between sections
        return seal(self._send, plan.encode(vector, self._send[HEADER : HEADER + plan.size], key, flag))

    def _agree(self, length: int) -> list[int]:
        """Return the bytes of every rank's message; they are exchanged if they vary."""
        if not self._levels or not self._variable:
            return self._lengths
        return [row[1] for row in self._rounds.agree([length], self._most)]

    def _swap(
        self, length: int, to: int | None, source: int | None, due: int, read: Callable[[int, Tensor], None]
    ) -> None:
        sends = {} if to is None else {to: self._send[:length]}
        self._rounds.swap(sends, {} if source is None else {source: self._receive[:due]}, read)
