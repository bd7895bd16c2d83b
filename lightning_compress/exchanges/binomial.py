"""Encoded sums up a binomial tree of the ranks, and the message of its root down again.

What S-Caffe puts between the leaders of chains: Awan, Hamidouche, Hashmi, Panda, "S-Caffe: Co-designing MPI Runtimes
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
from lightning_compress.exchanges.base import Exchange, ExchangePlan, new_messages
from lightning_compress.exchanges.rounds import HEADER, Rounds, seal
from lightning_compress.exchanges.trees import levels_of, links
from lightning_compress.keys import mix
from lightning_compress.message import MessagePlan, Section
from lightning_compress.state import States


@dataclass(frozen=True)
class Binomial(Exchange):
    """A rank adds up its children's messages, encodes the sum for its parent, and gets what the root encoded.

    In ``2 log2 W`` rounds of one message each, of which a rank sends up to ``log2 W`` and half of the ranks one: for
    small messages, and leaders of nodes. Every rank encodes once, the whole vector; what that leaves of its sum stays
    in its own vector, so that nothing is lost. A number is encoded up to ``1 + log2 W`` times on its way (``two_shot``:
    twice), and what is left of it may wait on another rank than the one that sent it: sparse methods drop what others
    selected, which is another algorithm, and methods with a momentum of their own (``dgc``) are refused. ``auto`` never
    chooses it.
    """

    hands_over: ClassVar[bool] = True

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        if not codec.repeatable:
            raise ValueError(
                f"exchange='binomial' encodes sums of what was decoded, and {codec} would rescale them once more; "
                "use exchange='auto', 'all_reduce' or 'all_gather'"
            )

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        return _Plan(MessagePlan(sections, world.device, world.meter), world)


class _Plan(ExchangePlan):
    description = "binomial"

    def __init__(self, plan: MessagePlan, world: World) -> None:
        self._plan = plan
        self._collective = world.collective
        rank, size = world.collective.rank, world.collective.size
        self._levels = levels_of(rank, size)
        self._rounds = Rounds(world, 1)
        self._most = HEADER + plan.size
        self._send, self._receive = new_messages(2, self._most, world.device)
        levels, sent = len(self._levels), links(self._levels)
        tables = (levels + 2 if plan.variable else 1) if levels else 0
        message = HEADER + plan.expected_size
        self.bytes_sent = sent * message + tables * self._rounds.table_bytes
        self.waited_bytes = (2 * levels - sent) * message  # while a rank has nothing to send, others do
        self.rounds = 2 * levels + tables * all_gather_rounds(size)
        self.encodes, self.decodes, self.calls = 1.0 + levels, 1.0 + levels, 2 * (1 + levels)  # one after the other

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        self._plan.share(key)
        self._rounds.begin()
        self._up(vector, mix(key, rank), flag)
        length = self._encode(vector, mix(key, rank), flag) if rank == 0 else 0
        length = self._agree(length)[0]
        for level in reversed(self._levels):
            self._swap(length, level.child, level.parent, length, lambda *_: None)
            if level.parent is not None:  # to be passed on as it came
                self._send, self._receive = self._receive, self._send
        if self._levels:
            self._rounds.finish()
        message = self._send[None, HEADER:length]
        flag.copy_(self._plan.flags(message))
        self._plan.decode(message, out, 1 / size, accumulate=False)

    def _up(self, vector: Tensor, key: int, flag: Tensor) -> None:
        def add(_: int, body: Tensor) -> None:
            try:
                self._plan.decode(body[None], vector, 1.0, accumulate=True)
                flag.add_(self._plan.flags(body[None]))
            finally:  # what is not finite cannot be encoded
                self._plan.settle(vector, flag)

        for level in self._levels:
            length = 0 if level.parent is None else self._encode(vector, key, flag)
            lengths = self._agree(length)  # what all believe counts, of this rank too
            self._swap(lengths[self._collective.rank], level.parent, level.child, lengths[level.child or 0], add)

    def _encode(self, vector: Tensor, key: int, flag: Tensor) -> int:
        return seal(self._send, self._plan.encode(vector, self._send[HEADER:], key, flag))

    def _agree(self, length: int) -> list[int]:
        """Bytes of every rank's message, which are told where they vary."""
        if not self._levels or not self._plan.variable:
            return [length or self._most] * self._collective.size
        return [row[1] for row in self._rounds.agree([length], self._most)]

    def _swap(
        self, length: int, to: int | None, source: int | None, due: int, read: Callable[[int, Tensor], None]
    ) -> None:
        sends = {} if to is None else {to: self._send[:length]}
        self._rounds.swap(sends, {} if source is None else {source: self._receive[:due]}, read)
