"""The transport of gossip: each rank exchanges messages with its neighbours; bytes are counted by link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.collectives.collective import Wait
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

    def kept(self, number: int) -> float:
        """Return the share of its own vector that this rank keeps in round ``number``."""
        return self.topology.kept(self.rank, number)

    def targets(self, number: int) -> list[int]:
        """Return the ranks that receive from this one in round ``number``; on symmetric graphs those of ``weights``."""
        return self.topology.targets(self.rank, number)

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
        self._count(sends)
        self.collective.swap(sends, receives)

    def begin(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Wait:
        """Start a ``swap``, and return what waits for it. Until then its tensors must not be used."""
        self._count(sends)
        return self.collective.begin("swap", sends, receives)

    def _count(self, sends: Mapping[int, Tensor]) -> None:
        for peer, message in sends.items():
            self.sent[peer] += message.numel() * message.element_size()

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
