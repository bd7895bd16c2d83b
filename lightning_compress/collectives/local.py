"""One rank: every collective is the identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_compress.collectives.collective import Collective, Operation


class LocalCollective(Collective):
    """A world of one process."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Leave the tensor unchanged."""

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Copy the tensor into its row."""
        out[0].copy_(tensor)

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """Copy the only row."""
        receive.copy_(send)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Do nothing: there is no other rank."""

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """Return this collective: there is only one part."""
        return self
