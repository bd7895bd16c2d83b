"""Buffers of a model (running statistics): averaged over the ranks where the models are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_reduce_bytes


class Buffers:
    """The buffers of one model on this rank, and what the ranks had in common last.

    Args:
        named: those of the model as they are now: a module may put another tensor in a buffer's place.
        ranks: to average over.

    Attributes:
        common: what was averaged last, by name.
        sums: what was taken, or its average, by the dtype that it is added up in.
        nbytes: that this rank sends to average them.
    """

    def __init__(self, named: Callable[[], Mapping[str, Tensor]], ranks: Collective) -> None:
        self._find, self._ranks = named, ranks
        self.common = {name: tensor.detach().clone() for name, tensor in named().items()}
        self.sums: dict[torch.dtype, Tensor] = {}
        self.nbytes = sum(all_reduce_bytes(each.nbytes, ranks.size) for each in self._collect().values())

    def _named(self) -> dict[str, Tensor]:
        """Those that there were at first.

        Raises:
            ValueError: one is gone, or of another shape or dtype.
        """
        now = self._find()
        for name, common in self.common.items():
            found = now.get(name)
            if found is None or (found.shape, found.dtype) != (common.shape, common.dtype):
                said = "is gone" if found is None else f"became {found.dtype} of shape {tuple(found.shape)}"
                raise ValueError(
                    f"the buffer {name!r} {said}; it was {common.dtype} of shape {tuple(common.shape)} when the fit "
                    "began, and is averaged over the ranks; keep its shape and dtype, or keep it in a plain attribute"
                )
        return {name: now[name].detach() for name in self.common}

    def _collect(self) -> dict[torch.dtype, Tensor]:
        parts: dict[torch.dtype, list[Tensor]] = {}
        for tensor in map(_real, self._named().values()):
            parts.setdefault(_wide(tensor), []).append(tensor.reshape(-1).to(_wide(tensor)))
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
        for name, whole in self._named().items():
            tensor, common = _real(whole), _real(self.common[name])
            dtype = _wide(tensor)
            start = places[dtype]
            places[dtype] = start + tensor.numel()
            mean = self.sums[dtype][start : places[dtype]].view(tensor.shape)
            if not dtype.is_floating_point:
                common.copy_(mean)
                tensor.copy_(torch.maximum(tensor.to(dtype), mean))
            elif mean.isfinite().all():
                common.copy_(mean)
                tensor.lerp_(common, 1 - alpha)
            else:
                tensor.copy_(common)


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    """In which buffers of this dtype are added up or compared."""
    if tensor.dtype.is_floating_point:
        return torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.int64
