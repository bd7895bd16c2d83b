"""Floating-point sums in rank order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_compress.collectives.collective import Collective, Operation


class OrderedCollective(Collective):
    """A collective that adds floating-point numbers in rank order, starting from rank 0.

    The order in which a plain all-reduce adds depends on an element's position in the tensor, so other buckets give
    other last bits. Here every rank sums one part of the tensor (all-to-all) and shares it (all-gather). This sends the
    same number of bytes, in two rounds.
    """

    def __init__(self, inner: Collective) -> None:
        self._inner = inner
        self._parts: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self.rank = inner.rank
        self.size = inner.size

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Sum over the ranks in the tensor's dtype, starting from rank 0; forward what does not depend on the order."""
        if operation != "sum" or not tensor.is_floating_point():
            self._inner.all_reduce(tensor, operation)
            return
        sent, received = self._memory(tensor)
        flat = sent.view(-1)
        flat[: tensor.numel()].copy_(tensor.reshape(-1))
        flat[tensor.numel() :].zero_()
        self._inner.all_to_all(sent, received)
        total = received[0]
        for row in received[1:]:
            total.add_(row)
        self._inner.all_gather(total, sent)
        tensor.copy_(flat[: tensor.numel()].view(tensor.shape))

    def _memory(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers that are sent and received, ``[size, part]`` each."""
        key = (tensor.numel(), tensor.dtype, tensor.device)
        if key not in self._parts:
            part = -(-tensor.numel() // self.size)
            self._parts[key] = (tensor.new_empty(self.size, part), tensor.new_empty(self.size, part))
        return self._parts[key]

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Forward to the inner collective."""
        self._inner.all_gather(tensor, out)

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """Forward to the inner collective."""
        self._inner.all_to_all(send, receive)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Forward to the inner collective."""
        self._inner.swap(sends, receives)

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """Return this rank's part, whose sums are in rank order too."""
        return OrderedCollective(self._inner.part(ranks))
