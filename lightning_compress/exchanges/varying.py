"""Messages of varying length between all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.codecs.codec import ALIGNMENT, aligned
from lightning_compress.collectives import Collective
from lightning_compress.collectives.collective import Wait
from lightning_compress.collectives.counting import all_to_all_rounds
from lightning_compress.exchanges.exchange import Cost, impossible
from lightning_compress.exchanges.head import LENGTH
from lightning_compress.exchanges.message import MessagePlan

_Table = list[list[int]]
_MORE = 256
"""A message is expected to be longer than the last one by at most this part of it."""


class Varying:
    """Sends a message to every other rank. Nobody waits for lengths before the messages are on their way.

    Both ends expect that a message is about as long as the last one, and it begins to travel at that length, beside the
    lengths. Where one is longer, the rest follows; this is rare, because gradients change little from step to step.

    Args:
        collective: the ranks.
        device: of the messages.
        usual: bytes of the first message to each rank from each rank, ``[size][size]``.
        most: the largest valid lengths, likewise.
        alike: a rank sends the same message to all.
    """

    def __init__(
        self,
        collective: Collective,
        device: torch.device,
        usual: Sequence[Sequence[int]],
        most: Sequence[Sequence[int]],
        alike: bool = False,
    ) -> None:
        self._collective, self._alike, size = collective, alike, collective.size
        self._most = torch.tensor(most, dtype=torch.int64)
        self._expected = self._room_for(torch.tensor(usual, dtype=torch.int64))
        self._own = torch.zeros(1 if alike else size, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(size, len(self._own), dtype=torch.int64, device=device)

    @classmethod
    def of(
        cls, plans: Sequence[MessagePlan], collective: Collective, device: torch.device, owners: bool = False
    ) -> Varying | None:
        """Return what sends messages of these plans; None if their lengths are fixed.

        Args:
            plans: of the message to each rank; or, with ``owners``, of that from each rank.
            collective: the ranks.
            device: of the messages.
            owners: see ``plans``.
        """
        if not any(plan.variable for plan in plans):
            return None
        ranks = range(collective.size)

        def table(sizes: list[int]) -> list[list[int]]:
            return [[sizes[one if owners else peer] * (owners or one != peer) for peer in ranks] for one in ranks]

        usual = table([aligned(plan.expected_size) for plan in plans])
        return cls(collective, device, usual, table([plan.size for plan in plans]), owners)

    def _room_for(self, lengths: Tensor) -> Tensor:
        room = (lengths + lengths // _MORE + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return torch.minimum(room, self._most)

    def begin(self, messages: Mapping[int, Tensor], used: Mapping[int, int], rows: Tensor) -> Wait:
        """Begin to send, and return what waits until all has arrived.

        Args:
            messages: uint8, to each other rank; if they are alike, the own one by this rank. Of the largest length.
            used: bytes of each, a multiple of the alignment.
            rows: uint8 ``[size, n]``, which receive the messages; if they are alike, the own one too.
        """
        expected = self._expected.tolist()
        told = [*used] if self._alike else range(len(expected))
        self._own.copy_(torch.tensor([used.get(peer, 0) for peer in told], dtype=torch.int64))
        # straight to each rank: an all-gather would wait in every rank behind messages of other parts
        sizes = self._collective.begin_rows(self._own, dict(enumerate(self._lengths)))
        arrived = self._move(messages, rows, [[0] * len(expected)] * len(expected), expected)

        def wait() -> None:
            sizes()
            arrived()
            self._rest(messages, rows, expected)

        return wait

    def _move(self, messages: Mapping[int, Tensor], rows: Tensor, first: _Table, last: _Table) -> Wait:
        """Begin to send a part of each message: its bytes by sender and receiver."""
        rank = self._collective.rank
        receives = {peer: rows[peer, first[peer][rank] : last[peer][rank]] for peer in range(len(first))}
        sends = {peer: each[first[rank][peer] : last[rank][peer]] for peer, each in messages.items()}
        if self._alike:
            return self._collective.begin_rows(sends[rank], receives)
        del receives[rank]
        given = ({peer: each for peer, each in both.items() if len(each)} for both in (sends, receives))
        return self._collective.begin("swap", *given)

    def _rest(self, messages: Mapping[int, Tensor], rows: Tensor, expected: _Table) -> None:
        """Send what is longer than expected.

        Raises:
            ValueError: a rank reports an impossible length; raised on every rank.
        """
        lengths = self._lengths.cpu().expand(len(expected), len(expected))
        wrong = (lengths < 0) | (lengths > self._most) | (lengths % ALIGNMENT > 0)
        if wrong.any():
            raise impossible(int(lengths[wrong][0]), int(self._most.max()))
        longer = bool((lengths > torch.tensor(expected, dtype=torch.int64)).any())
        self._expected = self._room_for(lengths)
        if longer:
            self._move(messages, rows, expected, lengths.tolist())()


def lengths_cost(variable: bool, ranks: int, alike: bool) -> Cost:
    """Return what it costs each of ``ranks`` ranks to tell the lengths, which travel beside the messages."""
    if not variable:
        return Cost()
    return Cost(bytes_sent=(ranks - 1) * (1 if alike else ranks) * LENGTH, rounds=all_to_all_rounds(ranks))
