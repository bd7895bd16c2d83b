"""The parameters that ranks average, as one vector, and what to go back to where they are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.gossip.algorithm import LARGEST


class Flat:
    """A rank's parameters as a vector, which between two rounds holds the model that the last one left.

    Args:
        layout: of whole parameters, in order.
        device: where they are.
        statistics: ends of the names of what norms count: a batch that is not finite spoils it for good.

    Attributes:
        vector: float32 ``[numel]``.
    """

    def __init__(self, layout: Layout, device: torch.device, statistics: tuple[str, ...]) -> None:
        self._names = layout.names
        self.vector = torch.zeros(layout.numel, device=device)
        self._views = [self.vector[each.span].view(each.shape) for each in layout.segments]
        self._ends = statistics
        self._statistics: dict[str, Tensor] = {}

    def keep(self, named: Mapping[str, Tensor]) -> None:
        """Note a model, to go back to it; ``named``: parameters and buffers."""
        self.gather(named)
        self._statistics = {name: each.clone() for name, each in named.items() if name.endswith(self._ends)}

    def gather(self, named: Mapping[str, Tensor]) -> None:
        """Copy from the parameters."""
        if self._views:
            torch._foreach_copy_(self._views, self._parameters(named))

    def scatter(self, named: Mapping[str, Tensor]) -> None:
        """Copy to the parameters."""
        if self._views:
            torch._foreach_copy_(self._parameters(named), self._views)

    def heal(self, named: Mapping[str, Tensor]) -> bool:
        """Go back to the last round's parameters, or to statistics of norms, where the present ones are not finite.

        No neighbour learns of them then, and what an algorithm keeps is as if this rank had not moved.

        Returns:
            whether that was so.
        """
        counted = {name: named[name] for name in self._statistics if name in named}
        healthy = _finite(counted.values())
        for name, each in counted.items():
            kept = self._statistics[name]
            kept.copy_(each) if healthy else each.copy_(kept)
        if _finite(self._parameters(named)):
            return not healthy
        self.scatter(named)
        return True

    def _parameters(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        return [named[name].detach() for name in self._names]


def _finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number is NaN, infinite, or so large that a mean with neighbours could overflow."""
    filled = [each for each in tensors if each.numel()]
    if not filled:
        return True
    largest = torch.stack([each.float() for each in torch._foreach_norm(filled, math.inf)]).max()
    return bool(largest < LARGEST)  # which NaN is not
