"""Messages of varying length between all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.codecs.codec import ALIGNMENT, aligned
from lightning_compress.collectives import Collective
from lightning_compress.collectives.collective import Wait
from lightning_compress.collectives.counting import all_gather_rounds
from lightning_compress.exchanges.exchange import Cost
from lightning_compress.exchanges.head import LENGTH
from lightning_compress.exchanges.message import MessagePlan

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
        self._collective, size = collective, collective.size
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
            return [[sizes[one if owners else peer] * (one != peer) for peer in ranks] for one in ranks]

        usual = table([aligned(plan.expected_size) for plan in plans])
        return cls(collective, device, usual, table([plan.size for plan in plans]), owners)

    def _room_for(self, lengths: Tensor) -> Tensor:
        room = (lengths + lengths // _MORE + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return torch.minimum(room, self._most)

    def begin(self, messages: Mapping[int, Tensor], used: Mapping[int, int], rows: Tensor) -> Wait:
        """Begin to send, and return what waits until all has arrived.

        Args:
            messages: uint8, to each other rank.
            used: bytes of each, a multiple of the alignment.
            rows: uint8 ``[size, n]``; those of other ranks receive their messages.
        """
        rank, expected = self._collective.rank, self._expected.tolist()
        lengths = [used.get(peer, 0) for peer in range(len(expected))]
        self._own.copy_(torch.tensor(lengths if len(self._own) > 1 else max(lengths)))
        sizes = self._collective.begin("all_gather", self._own, self._lengths)
        sends = {peer: message[: expected[rank][peer]] for peer, message in messages.items()}
        receives = {peer: rows[peer, : expected[peer][rank]] for peer in messages}
        arrived = self._collective.begin("swap", sends, receives)

        def wait() -> None:
            sizes()
            arrived()
            self._rest(messages, rows, expected)

        return wait

    def _rest(self, messages: Mapping[int, Tensor], rows: Tensor, expected: list[list[int]]) -> None:
        """Send what is longer than expected.

        Raises:
            ValueError: a rank reports an impossible length; raised on every rank.
        """
        rank, size = self._collective.rank, self._collective.size
        lengths = self._lengths.cpu().expand(size, size) * (1 - torch.eye(size, dtype=torch.int64))
        wrong = (lengths < 0) | (lengths > self._most) | (lengths % ALIGNMENT > 0)
        if wrong.any():
            raise ValueError(
                f"a rank reports a message of {int(lengths[wrong][0])} bytes; the maximum is {int(self._most.max())}, "
                f"in multiples of {ALIGNMENT}"
            )
        known = lengths.tolist()
        self._expected = self._room_for(lengths)
        if any(known[one][peer] > expected[one][peer] for one in range(len(known)) for peer in range(len(known))):
            sends = {peer: each[expected[rank][peer] : known[rank][peer]] for peer, each in messages.items()}
            receives = {peer: rows[peer, expected[peer][rank] : known[peer][rank]] for peer in messages}
            self._collective.swap(
                {peer: each for peer, each in sends.items() if len(each)},
                {peer: each for peer, each in receives.items() if len(each)},
            )


def lengths_cost(variable: bool, ranks: int, alike: bool) -> Cost:
    """Return what it costs each of ``ranks`` ranks to tell the lengths, which travel beside the messages."""
    if not variable:
        return Cost()
    return Cost(bytes_sent=(ranks - 1) * (1 if alike else ranks) * LENGTH, rounds=all_gather_rounds(ranks))
