"""The narrow transport that exchanges talk to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


class Collective(ABC):
    """Synchronous collectives among ``size`` ranks, issued by all of them in the same order.

    Attributes:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
    """

    rank: int
    size: int

    @property
    def uncounted(self) -> Collective:
        """The same collective without byte counting, for communication outside of a step."""
        return self

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place, in the tensor's own dtype; every rank gets the same bits."""

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], object]:
        """``all_reduce`` that may overlap with later ones; the tensor is ready when the returned function returns."""
        self.all_reduce(tensor)
        return lambda: None

    @abstractmethod
    def all_reduce_max(self, tensor: Tensor) -> None:
        """The largest over the ranks, element by element, in place."""

    def begin_all_reduce_max(self, tensor: Tensor) -> Callable[[], object]:
        """``all_reduce_max`` that may overlap with later ones, as ``begin_all_reduce``."""
        self.all_reduce_max(tensor)
        return lambda: None

    def broadcast(self, tensor: Tensor, device: torch.device) -> None:
        """Rank 0's bytes to all, in place, by way of a device: a sum with zeros, which every transport has."""
        data = tensor.detach().reshape(-1).contiguous().to(device, copy=True).view(torch.uint8)
        if self.rank:
            data.zero_()
        self.all_reduce(data)
        with torch.no_grad():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    @abstractmethod
    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Collect ``tensor [n]`` of every rank in ``out [size, n]``, in the order of the ranks."""

    @abstractmethod
    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """Row r of ``send [size, n]`` goes to rank r; row r of ``receive [size, n]`` came from rank r."""

    @abstractmethod
    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Point to point: ``sends[r]`` goes to rank r, and what rank r sends here comes to ``receives[r]``.

        All ranks call it in every round, perhaps with nothing; both sides know how long a tensor is and its dtype.
        Tensors are contiguous, and none is for the rank itself.
        """

    @abstractmethod
    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """This rank's part of the world, with its own ranks and size; a collective call, with one partition for all.

        Args:
            ranks: of each part, in order; every rank is in one of them.
        """

    def apart(self) -> Collective:
        """The same ranks, in whose collectives others do not matter; until ``close``. A collective call."""
        return self.part([range(self.size)])

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Give back what ``apart`` took."""
