"""Buffers of a model (running statistics): averaged over the ranks where the models are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_reduce_bytes


class Buffers:
    """The buffers of one model on this rank, and what the ranks had in common last.

    Args:
        named: of the model.
        ranks: to average over.

    Attributes:
        common: what was averaged last, by name.
        sums: what was taken, or its average, by the dtype that it is added up in.
        nbytes: that this rank sends to average them.
    """

    def __init__(self, named: Mapping[str, Tensor], ranks: Collective) -> None:
        self._named, self._ranks = dict(named), ranks
        self.common = {name: tensor.detach().clone() for name, tensor in self._named.items()}
        self.sums: dict[torch.dtype, Tensor] = {}
        self.nbytes = sum(all_reduce_bytes(each.nbytes, ranks.size) for each in self._collect().values())

    def _collect(self) -> dict[torch.dtype, Tensor]:
        parts: dict[torch.dtype, list[Tensor]] = {}
        for tensor in self._named.values():
            parts.setdefault(_wide(tensor), []).append(tensor.detach().reshape(-1).to(_wide(tensor)))
        return {dtype: torch.cat(each) for dtype, each in parts.items()}

    def look(self) -> None:
        """Take what they are now."""
        self.sums = self._collect()

    def average(self) -> None:
        """Average what was taken; the largest of numbers that are whole. A collective call."""
        for dtype, each in self.sums.items():
            if dtype.is_floating_point:
                self._ranks.all_reduce(each)
                each /= self._ranks.size
            else:
                self._ranks.all_reduce_max(each)

    def use(self, alpha: float) -> None:
        """Go on from the average, and a share ``alpha`` of what they are by now.

        Averages that are not finite are left out on all ranks, which go on from what they had in common.
        """
        places = dict.fromkeys(self.sums, 0)
        for name, tensor in self._named.items():
            dtype = _wide(tensor)
            start = places[dtype]
            places[dtype] = start + tensor.numel()
            mean = self.sums[dtype][start : places[dtype]].view(tensor.shape)
            if not dtype.is_floating_point:
                self.common[name].copy_(mean)
                tensor.copy_(torch.maximum(tensor.to(dtype), mean))
            elif mean.isfinite().all():
                self.common[name].copy_(mean)
                tensor.lerp_(self.common[name], 1 - alpha)
            else:
                tensor.copy_(self.common[name])


def _wide(tensor: Tensor) -> torch.dtype:
    """In which buffers of this dtype are added up or compared."""
    if tensor.dtype.is_floating_point:
        return torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.int64
