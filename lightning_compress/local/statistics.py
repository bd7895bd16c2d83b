"""Buffers of a model (running statistics): averaged over the ranks where the models are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.core import failures


class Buffers:
    """The buffers of one model on this rank, and what the ranks had in common last.

    Those that are the same on all ranks, as masks are, do not travel: their digests do, 16 bytes each.

    Args:
        named: those of the model as they are now: a module may put another tensor in a buffer's place.
        ranks: to average over.

    Attributes:
        common: what was averaged last, by name.
        sums: what was taken, or its average, by the dtype that it is added up in.
        nbytes: that this rank sent to average them last.
    """

    def __init__(self, named: Callable[[], Mapping[str, Tensor]], ranks: Collective) -> None:
        self._find, self._ranks = named, ranks
        self.common = {name: tensor.detach().clone() for name, tensor in named().items()}
        self.sums: dict[torch.dtype, Tensor] = {}
        self.nbytes = 0

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

    def _parts(self, sums: Mapping[torch.dtype, Tensor]) -> dict[str, Tensor]:
        """What was taken of each, or its average, by name: ``[n]``, in the memory of ``sums``, or of a copy of them."""
        places, found = dict.fromkeys(sums, 0), {}
        for name, common in self.common.items():
            tensor = _real(common)
            wide = _wide(tensor)
            dtype = wide if wide in sums else torch.int64  # where earlier checkpoints have those of one byte
            start = places[dtype]
            places[dtype] = start + tensor.numel()
            found[name] = sums[dtype][start : places[dtype]]
        return found

    def average(self) -> None:
        """Average what was taken; the largest of numbers that are whole. A collective call.

        Raises:
            ExchangeError: a rank died, or did not come in time.
        """
        self.nbytes = 0
        if not self.common:
            return
        with failures.explained("averaging the buffers", self._ranks.rank):
            copied = {dtype: each.cpu() for dtype, each in self.sums.items()}  # a wait for the device each
            marks = [_digest(part) for part in self._parts(copied).values()]
            signed = [marks, [-each for each in marks]]
            said = torch.tensor(signed, device=next(iter(self.sums.values())).device)
            self._reduce(said, self._ranks.all_reduce_max)
            differ = (said[0] != -said[1]).tolist()
            parts = [part for part, differs in zip(self._parts(self.sums).values(), differ, strict=True) if differs]
            for dtype in self.sums:
                if same := [part for part in parts if part.dtype == dtype]:
                    self._average(same)

    def _average(self, parts: list[Tensor]) -> None:
        together = torch.cat(parts)
        if together.is_floating_point():
            self._reduce(together, self._ranks.all_reduce)
            together /= self._ranks.size
        else:
            self._reduce(together, self._ranks.all_reduce_max)
        for part, each in zip(parts, together.split([len(part) for part in parts]), strict=True):
            part.copy_(each)

    def _reduce(self, numbers: Tensor, reduce: Callable[[Tensor], None]) -> None:
        reduce(numbers)
        self.nbytes += all_reduce_bytes(numbers.nbytes, self._ranks.size)

    def use(self, alpha: float) -> None:
        """Go on from the average, and a share ``alpha`` of what they are by now.

        Averages that are not finite are left out on all ranks, which go on from what they had in common.
        """
        parts = self._parts(self.sums)
        floats = [name for name, part in parts.items() if part.is_floating_point()]
        flags = torch.stack([parts[name].isfinite().all() for name in floats]).tolist() if floats else []
        finite = dict(zip(floats, flags, strict=True))
        for name, whole in self._named().items():
            tensor, common = _real(whole), _real(self.common[name])
            mean = parts[name].view(tensor.shape)
            if not mean.is_floating_point():
                common.copy_(mean)
                tensor.copy_(torch.maximum(tensor.to(mean.dtype), mean))
            elif finite[name]:
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
    return torch.uint8 if tensor.dtype in (torch.bool, torch.uint8) else torch.int64


def _digest(tensor: Tensor) -> int:
    """Of 56 bits, of a tensor of the CPU: running statistics differ in every round, which must never go unseen."""
    numbers = tensor.view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(numbers.data, digest_size=7).digest(), "little")
