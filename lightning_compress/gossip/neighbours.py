"""The transport of gossip: each rank exchanges messages with its neighbours; bytes are counted by link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.gossip.topology import Topology


class Neighbours:
    """A rank's links to its neighbours. All ranks must call the same methods in the same rounds.

    Args:
        collective: over the ranks; nothing else is sent in it.
        topology: who is whose neighbour.

    Attributes:
        sent: bytes by neighbour, over all rounds.
    """

    def __init__(self, collective: Collective, topology: Topology) -> None:
        self.collective, self.topology = collective, topology
        self.rank, self.size = collective.rank, collective.size
        self.sent: Counter[int] = Counter()
        self._memory: dict[tuple[int, torch.dtype, torch.device, int], Tensor] = {}

    @property
    def bytes_sent(self) -> int:
        """Bytes to all neighbours, over all rounds."""
        return self.sent.total()

    def weights(self, number: int) -> dict[int, float]:
        """Return the weights of the neighbours in round ``number``, by rank."""
        return self.topology.weights(self.rank, number)

    def exchange(self, message: Tensor, number: int) -> dict[int, Tensor]:
        """Send one message to all neighbours, and return theirs, which have the same length.

        Args:
            message: contiguous ``[n]``.
            number: of the round.

        Returns:
            messages ``[n]`` by neighbour. The next call with this length overwrites them.
        """
        peers = self.weights(number)
        received = {peer: self._room(message, slot) for slot, peer in enumerate(peers)}
        self.swap(dict.fromkeys(peers, message), received)
        return received

    def exchange_any(self, message: Tensor, number: int) -> dict[int, Tensor]:
        """Do as ``exchange`` for messages of different lengths, which are sent first, in 8 bytes."""
        length = torch.tensor([len(message)], dtype=torch.int64, device=message.device)
        lengths = {peer: int(theirs) for peer, theirs in self.exchange(length, number).items()}
        received = {peer: message.new_empty(count) for peer, count in lengths.items()}
        self.swap(dict.fromkeys(lengths, message), received)
        return received

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send a different message to each neighbour; see ``Collective.swap``."""
        for peer, message in sends.items():
            self.sent[peer] += message.numel() * message.element_size()
        self.collective.swap(sends, receives)

    def greatest(self, values: Tensor) -> Tensor:
        """Replace each value by its largest over all ranks, not only neighbours, and return them. Collective."""
        if self.size > 1:
            self.collective.all_reduce(values, "max")
        return values

    def _room(self, like: Tensor, slot: int) -> Tensor:
        key = (like.numel(), like.dtype, like.device, slot)
        if key not in self._memory:
            self._memory[key] = torch.empty_like(like)
        return self._memory[key]
