"""The narrow interface between exchanges and transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

Operation = Literal["sum", "max"]
"""How an all-reduce combines the ranks' tensors, element by element."""
Overlapping = Literal["all_reduce", "all_gather", "all_to_all", "swap"]
"""The collectives that ``Collective.begin`` starts."""
Wait = Callable[[], object]
"""Waits for a collective that was started; on NCCL, only the device's stream waits."""


class Collective(ABC):
    """Collectives among ``size`` ranks, issued by all of them in the same order, and synchronous but for ``begin``.

    Attributes:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
    """

    rank: int
    size: int

    @property
    def uncounted(self) -> Collective:
        """The same collective without byte counting, for messages outside of a step."""
        return self

    @abstractmethod
    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Sum or maximise over the ranks, in place, in the tensor's dtype; every rank gets the same bits."""

    def begin(self, name: Overlapping, *arguments: Any) -> Wait:
        """Start a collective that may overlap with later ones, which every rank starts in the same order.

        Args:
            name: of the method.
            arguments: of the method. Until the wait is over, its tensors must not be used.
        """
        getattr(self, name)(*arguments)
        return lambda: None

    def begin_rows(self, tensor: Tensor, rows: Mapping[int, Tensor]) -> Wait:
        """Start to send a tensor to all ranks, where that of each rank has a length of its own; see ``begin``.

        Args:
            tensor: what this rank sends; it may be empty.
            rows: by rank, this one included, where its tensor goes. All ranks know all lengths.
        """
        rows[self.rank].copy_(tensor)
        others = [peer for peer in rows if peer != self.rank]
        sends = {peer: tensor for peer in others if tensor.numel()}
        return self.begin("swap", sends, {peer: rows[peer] for peer in others if rows[peer].numel()})

    def prepare(self, name: Overlapping, *arguments: Any) -> Callable[[], Wait]:
        """Return what begins a collective with these tensors as often as it is called; see ``begin``."""
        return partial(self.begin, name, *arguments)

    def broadcast(self, tensor: Tensor, device: torch.device) -> None:
        """Copy rank 0's bytes to all ranks, in place, through a device: a sum with zeros, which every transport has."""
        data = tensor.detach().reshape(-1).contiguous().to(device, copy=True).view(torch.uint8)
        if self.rank:
            data.zero_()
        self.all_reduce(data)
        with torch.no_grad():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    @abstractmethod
    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Collect ``tensor [n]`` of every rank in ``out [size, n]``, in rank order."""

    @abstractmethod
    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """Send row r of ``send [size, n]`` to rank r; row r of ``receive [size, n]`` comes from rank r."""

    @abstractmethod
    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send point to point: ``sends[r]`` goes to rank r, and ``receives[r]`` is filled with what rank r sends.

        All ranks call it in every round, possibly with empty mappings. Both sides know a tensor's length and dtype.
        Tensors are contiguous, and none is for the rank itself.
        """

    @abstractmethod
    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """Return this rank's part of the world, with ranks and size of its own; all ranks pass the same partition.

        A collective call.

        Args:
            ranks: of each part, in order; every rank is in exactly one part.
        """

    def apart(self) -> Collective:
        """Return a separate collective of the same ranks, independent of this one's messages, until ``close``.

        A collective call.
        """
        return self.part([range(self.size)])

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Release what ``apart`` created."""
