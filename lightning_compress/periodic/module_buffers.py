"""Buffers of a model: BatchNorm's running statistics are averaged over the ranks where the models are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, consensus
from lightning_compress.collectives.coalesced import sums_of
from lightning_compress.core import errors

STATISTICS = ("running_mean", "running_var")
"""What BatchNorm calls the buffers of which a mean over the ranks is as good as each."""


@dataclass(frozen=True)
class BufferRules:
    """Which buffers are averaged over the ranks. The others are rank 0's, as in DistributedDataParallel.

    A mean is wrong for most buffers: singular vectors of spectral norm, codebooks and queues lose their norm. So
    only ``running_mean`` and ``running_var`` are averaged by default. Whole numbers are rank 0's always.

    Args:
        given: "mean" or "rank0" by shell-style pattern of the buffers' names; the first pattern that matches counts.

    Raises:
        ValueError: ``given`` is not a mapping, or holds another word.
    """

    given: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.given, Mapping) or not all(isinstance(each, str) for each in self.given):
            raise ValueError(
                f"buffers={self.given!r} must be a mapping of patterns of buffer names to 'mean' or 'rank0', such as "
                "{'*.codebook': 'mean'}"
            )
        for pattern, way in self.given.items():
            if way not in ("mean", "rank0"):
                raise ValueError(f"buffers: {pattern!r} has {way!r}, and must have 'mean' or 'rank0'")

    def check(self, buffers: Mapping[str, Tensor]) -> None:
        """Refuse patterns that match none of a model's floating-point buffers.

        Raises:
            ValueError: there is one.
        """
        names = [_plain(name) for name, each in buffers.items() if _real(each).is_floating_point()]
        for pattern in self.given:
            if not any(fnmatchcase(name, pattern) for name in names):
                there = f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}" or "none"
                raise ValueError(
                    f"buffers: {pattern!r} matches no floating-point buffer of the model, which has {there}; correct "
                    "the pattern, or remove it"
                )

    def names(self, name: str) -> bool:
        """Whether the user has said what becomes of this buffer."""
        return any(fnmatchcase(_plain(name), pattern) for pattern in self.given)

    def averages(self, name: str, buffer: Tensor) -> bool:
        """Whether this buffer is averaged."""
        if not _real(buffer).is_floating_point():
            return False
        usual = "mean" if name.rpartition(".")[2] in STATISTICS else "rank0"
        ways = (way for pattern, way in self.given.items() if fnmatchcase(_plain(name), pattern))
        return next(ways, usual) == "mean"


class Buffers:
    """The buffers of one model on this rank, and what the ranks had in common last.

    Those that are the same on all ranks, as masks are, do not travel: their digests do, 16 bytes each.

    Args:
        named: those of the model as they are now: a module may put another tensor in a buffer's place.
        ranks: to average over; in which nothing else is sent at the same time.
        rules: which of them are averaged, and which are rank 0's.

    Attributes:
        common: what was averaged last, by name.
        sums: what was taken, or its average, by the dtype that it is added up in.
    """

    def __init__(self, named: Callable[[], Mapping[str, Tensor]], ranks: Collective, rules: BufferRules) -> None:
        self._find, self._ranks = named, ranks
        self.common = {name: tensor.detach().clone() for name, tensor in named().items()}
        self._averaged = {name for name, tensor in self.common.items() if rules.averages(name, tensor)}
        self.sums: dict[torch.dtype, Tensor] = {}

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
            dtype = _wide(tensor)
            start, places[dtype] = places[dtype], places[dtype] + tensor.numel()
            found[name] = sums[dtype][start : places[dtype]]
        return found

    def average(self) -> None:
        """Replace what was taken by its mean over the ranks, or by rank 0's. A collective call.

        Raises:
            ExchangeError: a rank died, or did not come in time.
        """
        if not self.common:
            return
        with errors.explained("averaging the buffers", self._ranks.rank):
            copied = {dtype: each.cpu() for dtype, each in self.sums.items()}  # a wait for the device each
            marks = [consensus.digest(each.view(torch.uint8).numpy().data) for each in self._parts(copied).values()]
            device = next(iter(self.sums.values())).device
            alike = consensus.same(torch.tensor(marks, device=device), self._ranks).tolist()
            parts = self._parts(self.sums)
            travels = [name for name, same in zip(parts, alike, strict=True) if not same]
            for dtype in self.sums:
                both = [name for name in travels if parts[name].dtype == dtype]
                self._average([parts[name] for name in both if name in self._averaged])
                self._share([parts[name] for name in both if name not in self._averaged])

    def _average(self, parts: list[Tensor]) -> None:
        """Leave the mean over those ranks whose numbers are finite; NaN where none has any."""
        if not parts:
            return
        finite = torch.stack([part.isfinite().all() for part in parts])
        own = [torch.where(good, part, 0) for part, good in zip(parts, finite, strict=True)]
        *sums, counts = sums_of([*own, finite], self._ranks, parts[0].dtype)
        for part, total, count in zip(parts, sums, counts, strict=True):
            torch.div(total, count, out=part)

    def _share(self, parts: list[Tensor]) -> None:
        """Leave rank 0's: a sum with zeros, which every transport has."""
        if parts:
            own = [torch.zeros_like(part) if self._ranks.rank else part for part in parts]
            for part, each in zip(parts, sums_of(own, self._ranks, parts[0].dtype), strict=True):
                part.copy_(each)

    def use(self, alpha: float) -> None:
        """Go on from the average, and a share ``alpha`` of what they are by now; or from rank 0's.

        Numbers that are not finite are left out on all ranks, which go on from what they had in common.
        """
        parts = self._parts(self.sums)
        floats = [name for name, part in parts.items() if part.is_floating_point()]
        flags = torch.stack([parts[name].isfinite().all() for name in floats]).tolist() if floats else []
        finite = dict(zip(floats, flags, strict=True))
        for name, whole in self._named().items():
            tensor, common = _real(whole), _real(self.common[name])
            if finite.get(name, True):
                common.copy_(parts[name].view(tensor.shape))
            if alpha and name in self._averaged and finite[name]:
                tensor.copy_(torch.where(tensor.isfinite(), tensor, common)).lerp_(common, 1 - alpha)
            elif self._ranks.rank or not alpha or not finite.get(name, True):
                tensor.copy_(common)  # but rank 0 goes on with its own, in which it counted on meanwhile


def mean_buffers(named: Mapping[str, Tensor], ranks: Collective, rules: BufferRules) -> dict[str, Tensor]:
    """Means of buffers over the ranks, or rank 0's, by name, as new tensors; a collective call."""
    copies = {name: each.detach().clone() for name, each in named.items()}
    buffers = Buffers(lambda: copies, ranks, rules)
    buffers.look()
    buffers.average()
    buffers.use(0.0)
    return buffers.common


def _plain(name: str) -> str:
    """Without what torch.compile puts into names."""
    return name.replace("_orig_mod.", "")


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    """In which buffers of this dtype are added up or compared."""
    if tensor.dtype.is_floating_point:
        return torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.uint8 if tensor.dtype in (torch.bool, torch.uint8) else torch.int64
