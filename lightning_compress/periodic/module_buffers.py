"""Buffers of a model: BatchNorm's running statistics are averaged over the ranks together with the parameters."""

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
"""BatchNorm's names of the buffers whose mean over the ranks is as good as each rank's own."""


@dataclass(frozen=True)
class BufferRules:
    """Which buffers are averaged over the ranks. All others are copied from rank 0, as DistributedDataParallel does.

    A mean is wrong for most buffers: singular vectors of spectral norm, codebooks and queues lose their norm. So by
    default only ``running_mean`` and ``running_var`` are averaged. Integer buffers are always copied from rank 0.

    Args:
        given: "mean" or "rank0" by shell-style pattern of buffer names; the first pattern that matches counts.

    Raises:
        ValueError: ``given`` is not a mapping, or has another value than these two.
    """

    given: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.given, Mapping) or not all(isinstance(pattern, str) for pattern in self.given):
            raise ValueError(
                f"buffers={self.given!r} must be a mapping of patterns of buffer names to 'mean' or 'rank0', such as "
                "{'*.codebook': 'mean'}"
            )
        for pattern, way in self.given.items():
            if way not in ("mean", "rank0"):
                raise ValueError(f"buffers: {pattern!r} has {way!r}, and must have 'mean' or 'rank0'")

    def check(self, buffers: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a pattern matches none of the model's floating-point buffers."""
        names = [_plain(name) for name, buffer in buffers.items() if _real(buffer).is_floating_point()]
        for pattern in self.given:
            if not any(fnmatchcase(name, pattern) for name in names):
                known = f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}" or "none"
                raise ValueError(
                    f"buffers: {pattern!r} matches no floating-point buffer of the model, which has {known}; correct "
                    "the pattern, or remove it"
                )

    def names(self, name: str) -> bool:
        """Return whether one of the user's patterns matches this buffer."""
        return any(fnmatchcase(_plain(name), pattern) for pattern in self.given)

    def averages(self, name: str, buffer: Tensor) -> bool:
        """Return whether this buffer is averaged."""
        if not _real(buffer).is_floating_point():
            return False
        usual = "mean" if name.rpartition(".")[2] in STATISTICS else "rank0"
        ways = (way for pattern, way in self.given.items() if fnmatchcase(_plain(name), pattern))
        return next(ways, usual) == "mean"


class Buffers:
    """The buffers of one model on this rank, and the values that the ranks last had in common.

    Buffers that are the same on all ranks, such as masks, are not sent. Only their digests are, 16 bytes each.

    Args:
        named: returns the model's current buffers by name; a module may replace the tensor of a buffer.
        ranks: to average over; nothing else is sent in it at the same time.
        rules: which buffers are averaged, and which are copied from rank 0.

    Attributes:
        common: the last synchronised values, by name.
        sums: the collected values or their average: one flat tensor for each dtype in which buffers are added up.
    """

    def __init__(self, named: Callable[[], Mapping[str, Tensor]], ranks: Collective, rules: BufferRules) -> None:
        self._find, self._ranks = named, ranks
        self.common = {name: buffer.detach().clone() for name, buffer in named().items()}
        self._averaged = {name for name, buffer in self.common.items() if rules.averages(name, buffer)}
        self.sums: dict[torch.dtype, Tensor] = {}

    def _named(self) -> dict[str, Tensor]:
        """Return the current tensors of the buffers that the model had at first.

        Raises:
            ValueError: a buffer was removed, or has another shape or dtype.
        """
        now = self._find()
        for name, common in self.common.items():
            buffer = now.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (common.shape, common.dtype):
                said = "is gone" if buffer is None else f"became {buffer.dtype} of shape {tuple(buffer.shape)}"
                raise ValueError(
                    f"the buffer {name!r} {said}; it was {common.dtype} of shape {tuple(common.shape)} when the fit "
                    "began, and is averaged over the ranks. Keep its shape and dtype, or use a plain attribute"
                )
        return {name: now[name].detach() for name in self.common}

    def collect(self) -> None:
        """Copy the buffers' current values into ``sums``."""
        parts: dict[torch.dtype, list[Tensor]] = {}
        for buffer in map(_real, self._named().values()):
            parts.setdefault(_wide(buffer), []).append(buffer.reshape(-1).to(_wide(buffer)))
        self.sums = {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}

    def _parts(self, sums: Mapping[torch.dtype, Tensor]) -> dict[str, Tensor]:
        """Return each buffer's part ``[n]`` of ``sums``, by name; the parts share its memory."""
        places, parts = dict.fromkeys(sums, 0), {}
        for name, common in self.common.items():
            buffer = _real(common)
            dtype = _wide(buffer)
            start, places[dtype] = places[dtype], places[dtype] + buffer.numel()
            parts[name] = sums[dtype][start : places[dtype]]
        return parts

    def average(self) -> None:
        """Replace the collected values by their mean over the ranks, or by rank 0's. Collective: every rank calls it.

        Raises:
            ExchangeError: a rank died, or did not come in time.
        """
        if not self.common:
            return
        with errors.explained("averaging the buffers", self._ranks.rank):
            copied = {dtype: tensor.cpu() for dtype, tensor in self.sums.items()}  # one wait for the device each
            digests = [consensus.digest(part.view(torch.uint8).numpy().data) for part in self._parts(copied).values()]
            device = next(iter(self.sums.values())).device
            equal = consensus.same(torch.tensor(digests, dtype=torch.int64, device=device), self._ranks).tolist()
            parts = self._parts(self.sums)
            differing = [name for name, same in zip(parts, equal, strict=True) if not same]
            for dtype in self.sums:
                names = [name for name in differing if parts[name].dtype == dtype]
                self._average([parts[name] for name in names if name in self._averaged])
                self._share([parts[name] for name in names if name not in self._averaged])

    def _average(self, parts: list[Tensor]) -> None:
        """Replace each part by its mean over the ranks on which it is finite, or by NaN if it is finite on none."""
        if not parts:
            return
        finite = torch.stack([part.isfinite().all() for part in parts])
        values = [torch.where(good, part, 0) for part, good in zip(parts, finite, strict=True)]
        *sums, counts = sums_of([*values, finite], self._ranks, parts[0].dtype)
        for part, total, count in zip(parts, sums, counts, strict=True):
            torch.div(total, count, out=part)

    def _share(self, parts: list[Tensor]) -> None:
        """Replace each part by rank 0's: a sum with zeros, which every transport can do."""
        if parts:
            values = [torch.zeros_like(part) if self._ranks.rank else part for part in parts]
            for part, total in zip(parts, sums_of(values, self._ranks, parts[0].dtype), strict=True):
                part.copy_(total)

    def use(self, alpha: float) -> None:
        """Set averaged buffers to ``alpha * current + (1 - alpha) * average``, and the others to rank 0's.

        An average that is not finite is ignored: all ranks go back to the last common value.
        """
        parts = self._parts(self.sums)
        floats = [name for name, part in parts.items() if part.is_floating_point()]
        flags = torch.stack([parts[name].isfinite().all() for name in floats]).tolist() if floats else []
        finite = dict(zip(floats, flags, strict=True))
        for name, current in self._named().items():
            buffer, common = _real(current), _real(self.common[name])
            if finite.get(name, True):
                common.copy_(parts[name].view(buffer.shape))
            if alpha and name in self._averaged and finite[name]:
                buffer.copy_(torch.where(buffer.isfinite(), buffer, common)).lerp_(common, 1 - alpha)
            elif self._ranks.rank or not alpha or not finite.get(name, True):
                buffer.copy_(common)  # rank 0 keeps its own, which may have counted on during the delay


def mean_buffers(named: Mapping[str, Tensor], ranks: Collective, rules: BufferRules) -> dict[str, Tensor]:
    """Return the buffers' means over the ranks, or rank 0's values, as new tensors. Collective: every rank calls it."""
    copies = {name: buffer.detach().clone() for name, buffer in named.items()}
    buffers = Buffers(lambda: copies, ranks, rules)
    buffers.collect()
    buffers.average()
    buffers.use(0.0)
    return buffers.common


def _plain(name: str) -> str:
    """Return the name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def _real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which such buffers are added up and compared."""
    if tensor.dtype.is_floating_point:
        return torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.uint8 if tensor.dtype in (torch.bool, torch.uint8) else torch.int64
