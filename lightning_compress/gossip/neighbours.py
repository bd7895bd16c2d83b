"""The transport of gossip: one message to every neighbour, and theirs, with the bytes of each link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.gossip.topology import Topology


class Neighbours:
    """What a rank says to its neighbours; all ranks call the same functions in the same rounds.

    Args:
        collective: over the ranks, in an order of its own: no other traffic goes this way.
        topology: who is whose neighbour.

    Attributes:
        sent: bytes by neighbour, over all rounds.
    """

    def __init__(self, collective: Collective, topology: Topology) -> None:
        self.collective = collective
        self.topology = topology
        self.rank, self.size = collective.rank, collective.size
        self.sent: Counter[int] = Counter()
        self._memory: dict[tuple[int, torch.dtype, torch.device, int], Tensor] = {}

    @property
    def bytes_sent(self) -> int:
        """To all neighbours."""
        return self.sent.total()

    def weights(self, number: int) -> dict[int, float]:
        """The neighbours of round ``number``, with their weights."""
        return self.topology.weights(self.rank, number)

    def tell(self, message: Tensor, number: int) -> dict[int, Tensor]:
        """The same message to all neighbours; theirs, of the same length.

        Args:
            message: contiguous ``[n]``.
            number: of the round.

        Returns:
            by neighbour; overwritten by the next call with this length.
        """
        peers = self.weights(number)
        received = {peer: self._room(message, slot) for slot, peer in enumerate(peers)}
        self.swap(dict.fromkeys(peers, message), received)
        return received

    def tell_any(self, message: Tensor, number: int) -> dict[int, Tensor]:
        """As ``tell``, for messages whose lengths differ: those travel first, as 8 bytes."""
        own = torch.tensor([len(message)], dtype=torch.int64, device=message.device)
        lengths = {peer: int(length) for peer, length in self.tell(own, number).items()}
        received = {peer: message.new_empty(length) for peer, length in lengths.items()}
        self.swap(dict.fromkeys(lengths, message), received)
        return received

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Something else to each; see ``Collective.swap``."""
        for peer, message in sends.items():
            self.sent[peer] += message.numel() * message.element_size()
        self.collective.swap(sends, receives)

    def greatest(self, values: Tensor) -> Tensor:
        """The largest over all ranks, element by element: a collective call of a few bytes."""
        if self.size > 1:
            self.collective.all_reduce(values, "max")
        return values

    def _room(self, like: Tensor, slot: int) -> Tensor:
        key = (like.numel(), like.dtype, like.device, slot)
        if key not in self._memory:
            self._memory[key] = torch.empty_like(like)
        return self._memory[key]
