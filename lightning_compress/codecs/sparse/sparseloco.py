"""The largest elements of every block, places and values in a few bits: SparseLoCo's messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan
from lightning_compress.codecs.packing.planes import Planes, code_dtype
from lightning_compress.core.layout import Layout
from lightning_compress.core.workspace import CHUNK, pieces, scratch

LEVELS = 4
SIGMAS = 6.0
"""The bins span so many standard deviations of what is kept."""
FEWEST = 4
"""Of a block, however short: the bins cannot tell two values apart."""


@dataclass(frozen=True)
class SparseLoCo(Codec):
    """Send the ``k`` elements of largest magnitude of each block, places in 12 bits and values in 2: 0.219 bits each.

    Blocks are cut within a parameter (or the part of it that is in the vector); its last one, if it is shorter, keeps
    as large a share, ``max(4, ceil(k * length / block))``. The first ones among equals are kept. A value becomes the
    mean of its bin. The four bins are 1.5 standard deviations wide, with the mean of what is kept of the parameter
    in the middle of the third: below -2.25 deviations from it, to -0.75, to 0.75, and above. As most of what is kept
    is about as large, the first two are the negative values, the last one the positive ones. Where zeros are kept,
    their bin decodes to 0. What values lose by this stays in the vector, as what is not sent; the method is biased and
    needs error feedback.

    A message is four means as float32 for each parameter, then the places within their blocks, then the bins, both
    packed by planes, the first code lowest: ``log2(block) + 2`` bits for each element that is kept, and 128 for each
    parameter. It is made for what was learned in some tens of local steps, with a residual that decays by 0.95 a round.

    Args:
        k: elements that are kept of a block, 4 (least sent) to ``block`` (all, in two bits).
        block: a power of two, 64 to 65536; larger ones choose more freely, for more bits of a place.

    Raises:
        ValueError: a setting is none of these.

    Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
    arXiv 2508.15706; bins and their means as in its authors' code, one-covenant/templar.
    """

    name: ClassVar[str] = "sparseloco"
    contractive: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    k: int = 64
    block: int = 4096

    def __post_init__(self) -> None:
        block = self.block
        if isinstance(block, bool) or not isinstance(block, int) or not 64 <= block <= 65536 or block & (block - 1):
            raise ValueError(f"SparseLoCo(block={block!r}): block must be a power of two, 64 to 65536; try 4096")
        if isinstance(self.k, bool) or not isinstance(self.k, int) or not FEWEST <= self.k <= block:
            raise ValueError(
                f"SparseLoCo(k={self.k!r}): k must be {FEWEST} to block, {block}; {max(FEWEST, block // 64)} "
                "sends about one element in 64"
            )

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return self.k / self.block

    @property
    def rounds(self) -> bool:
        """See ``Codec``."""
        return True

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return _SparseLoCoPlan(layout, device, self.k, self.block)


@dataclass(frozen=True)
class _Blocks:
    """Blocks of equal length, side by side from ``start`` on, and where those elements stand that they keep."""

    start: int
    count: int
    length: int
    keep: int
    slots: slice

    def of(self, vector: Tensor) -> Tensor:
        """These blocks, ``[count, length]``."""
        return vector[self.start : self.start + self.count * self.length].view(self.count, self.length)


def _blocks(layout: Layout, k: int, block: int, most: int) -> Iterator[tuple[int, _Blocks]]:
    """Of each segment, by its number: whole blocks, at most ``most`` elements at a time, then a shorter one."""
    filled = 0
    segments = [segment for segment in layout.segments if segment.numel]
    for number, segment in enumerate(segments):
        whole, rest = divmod(segment.numel, block)
        runs = [(each.start, each.stop - each.start, block) for each in pieces(whole, max(1, most // block))]
        for first, count, length in [*runs, *([(whole, 1, rest)] if rest else [])]:
            keep = min(length, max(FEWEST, math.ceil(k * length / block)))
            slots = slice(filled, filled + count * keep)
            yield number, _Blocks(segment.offset + first * block, count, length, keep, slots)
            filled = slots.stop


class _SparseLoCoPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, k: int, block: int) -> None:
        super().__init__(layout)
        host = device.type == "cpu"
        found = list(_blocks(layout, k, block, CHUNK if host else layout.numel))
        self._blocks = [each for _, each in found]
        slots = [[each.slots for owner, each in found if owner == number] for number in {owner for owner, _ in found}]
        self._parts = [slice(each[0].start, each[-1].stop) for each in slots]
        total = self._parts[-1].stop if found else 0
        self._bits = (block - 1).bit_length()
        self._places, self._codes = Planes(self._bits, total), Planes(2, total)
        self._head = 4 * LEVELS * len(self._parts)
        self.message_size = self._head + self._places.size + self._codes.size
        dtype = torch.int32 if layout.numel < 2**31 else torch.int64
        self._firsts, self._lasts = (torch.zeros(total, dtype=dtype, device=device) for _ in range(2))
        for each in self._blocks:
            starts = torch.arange(each.count, dtype=dtype, device=device).mul_(each.length).add_(each.start)
            self._firsts[each.slots].view(each.count, each.keep).copy_(starts.unsqueeze(1))
            self._lasts[each.slots] = each.length - 1
        self._choose = _Chooser().choose if host else _sorted

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan.encode``."""
        self.check(vector, message)
        if not self._blocks:
            return
        places, codes = self._room(vector.device)
        total = len(self._firsts)
        for each in self._blocks:
            self._choose(each.of(vector), places[each.slots].view(each.count, each.keep))
        index = places[:total] + self._firsts
        values = vector.index_select(0, index)
        levels = values.new_empty(len(self._parts), LEVELS)
        for part, table in zip(self._parts, levels, strict=True):
            values[part], codes[part] = _binned(values[part], table)
        vector.index_add_(0, index, values, alpha=-1)
        message[: self._head] = levels.view(-1).view(torch.uint8)
        self._places.write(places, slice(0, total), message[self._head :])
        self._codes.write(codes, slice(0, total), message[self._head + self._places.size :])

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        if not accumulate:
            out.zero_()
        places, codes = self._room(out.device)
        total = len(self._firsts)
        for message in messages if self._blocks else ():
            self._places.read(places, slice(0, total), message[self._head :])
            self._codes.read(codes, slice(0, total), message[self._head + self._places.size :])
            index = torch.minimum(places[:total], self._lasts).add_(self._firsts)  # inside, whatever was sent
            levels = message[: self._head].clone().view(torch.float32).view(-1, LEVELS)  # rows begin anywhere
            values = torch.cat([table[codes[part].int()] for part, table in zip(self._parts, levels, strict=True)])
            out.index_add_(0, index, values, alpha=weight)

    def _room(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For places and bins, 0 beyond their number."""
        size = -(-len(self._firsts) // 8) * 8
        places = scratch(f"sparseloco places, {self._bits} bits", size, code_dtype(self._bits), device)
        codes = scratch("sparseloco codes", size, torch.uint8, device)
        places[len(self._firsts) :], codes[len(self._firsts) :] = 0, 0
        return places, codes


def _binned(values: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The means that float32 values become, and the bins that they are in; the means are written to ``levels``."""
    wide = values.double()
    shift = wide.mean()
    width = SIGMAS / LEVELS * ((wide - shift).square().sum() / max(1, len(wide) - 1)).sqrt()
    bins = ((wide - shift) / torch.where(width > 0, width, 1) + LEVELS // 2).round_().clamp_(0, LEVELS - 1)
    members = bins == torch.arange(LEVELS, device=values.device).unsqueeze(1)
    means = torch.where(members, wide, 0).sum(1) / members.sum(1).clamp_(min=1)
    zeros = (members & (values == 0)).any(1)
    levels.copy_(torch.where(zeros, 0, means))
    return levels[bins.int()], bins.to(torch.uint8)


def _sorted(rows: Tensor, places: Tensor) -> None:
    """Write the places of the largest elements of each row, ascending; nothing waits for the device."""
    order = torch.sort(rows.abs(), dim=1, descending=True, stable=True).indices
    places.copy_(order[:, : places.shape[1]].sort(dim=1).values)


class _Chooser:
    """The same choice on a CPU, without sorting."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        self._magnitudes = scratch("sparseloco magnitudes", max(CHUNK, 65536), torch.float32, cpu)
        self._parted = scratch("sparseloco parted", max(CHUNK, 65536), torch.float32, cpu)

    def choose(self, rows: Tensor, places: Tensor) -> None:
        """See ``_sorted``."""
        count, length = rows.shape
        keep = places.shape[1]
        magnitudes, parted = (
            each[: rows.numel()].view(count, length).numpy() for each in (self._magnitudes, self._parted)
        )
        np.abs(rows.numpy(), out=magnitudes)
        parted[:] = magnitudes
        parted.partition(length - keep, axis=1)
        least = parted[:, length - keep, None]
        mask = magnitudes >= least
        for row in np.flatnonzero(mask.sum(axis=1) > keep):  # the last ones among equals are left out
            equal = np.flatnonzero(magnitudes[row] == least[row])
            mask[row, equal[len(equal) - (int(mask[row].sum()) - keep) :]] = False
        places.copy_(torch.from_numpy(np.nonzero(mask)[1].reshape(count, keep)))
