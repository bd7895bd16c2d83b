"""SparseLoCo: the largest elements of every block, with positions and values in a few bits."""

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
"""Width of all bins together, in standard deviations of the sent elements."""
FEWEST = 4
"""Least number of elements that are sent of a block: with fewer, the bins cannot separate values."""


@dataclass(frozen=True)
class SparseLoCo(Codec):
    """Send the k elements of largest magnitude of each block: 0.219 bits per element by default.

    A position takes 12 bits, a value 2. Each parameter (or the part of it that is in the vector) is cut into blocks.
    Its last block, if it is shorter, sends an equal share, ``max(4, ceil(k * length / block))``. Of equal elements the
    first are sent.

    A value becomes the mean of its bin. The four bins are 1.5 standard deviations wide. The mean of the parameter's
    sent elements is in the middle of the third bin, so the bins end at -2.25, -0.75 and 0.75 standard deviations from
    it. The sent elements have similar magnitudes, so the first two bins are mostly negative values and the last bin
    positive values. A bin that contains a zero decodes to 0. Rounding errors and elements that are not sent stay in the
    vector. The method is biased and needs error feedback.

    A message is four means per parameter as float32, then the positions within the blocks, then the bins, both packed
    in planes, the first code lowest. That is ``log2(block) + 2`` bits per sent element, and 128 bits per parameter. The
    method is meant for the change of a model over tens of local steps, with a residual that decays by 0.95 per round.

    Args:
        k: elements that are sent of a block, 4 to ``block``. With ``block``, all are sent, in 2 bits each.
        block: a power of two, 64 to 65536. In a larger block the selection is freer, but a position takes more bits.

    Raises:
        ValueError: a setting is out of range.

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
                f"SparseLoCo(k={self.k!r}): k must be {FEWEST} to {block}, the block; {max(FEWEST, block // 64)} "
                "sends about one element in 64"
            )

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return self.k / self.block

    @property
    def rounds(self) -> bool:
        """See ``Codec.rounds``."""
        return True

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        return _SparseLoCoPlan(layout, device, self.k, self.block)


@dataclass(frozen=True)
class _Blocks:
    """Contiguous blocks of equal length from ``start`` on, and the slots of their sent elements."""

    start: int
    count: int
    length: int
    keep: int
    slots: slice

    def of(self, vector: Tensor) -> Tensor:
        """Return a view of these blocks, ``[count, length]``."""
        return vector[self.start : self.start + self.count * self.length].view(self.count, self.length)


def _blocks(layout: Layout, k: int, block: int, most: int) -> Iterator[tuple[int, _Blocks]]:
    """Yield blocks with their segment's index: whole blocks, up to ``most`` elements at a time, then a shorter one."""
    filled = 0
    segments = [segment for segment in layout.segments if segment.numel]
    for index, segment in enumerate(segments):
        whole, rest = divmod(segment.numel, block)
        runs = [(piece.start, piece.stop - piece.start, block) for piece in pieces(whole, max(1, most // block))]
        for first, count, length in [*runs, *([(whole, 1, rest)] if rest else [])]:
            keep = min(length, max(FEWEST, math.ceil(k * length / block)))
            slots = slice(filled, filled + count * keep)
            yield index, _Blocks(segment.offset + first * block, count, length, keep, slots)
            filled = slots.stop


class _SparseLoCoPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, k: int, block: int) -> None:
        super().__init__(layout)
        host = device.type == "cpu"
        owned = list(_blocks(layout, k, block, CHUNK if host else layout.numel))
        self._blocks = [blocks for _, blocks in owned]
        slots = [[blocks.slots for owner, blocks in owned if owner == index] for index in {owner for owner, _ in owned}]
        self._parts = [slice(part[0].start, part[-1].stop) for part in slots]
        total = self._parts[-1].stop if owned else 0
        self._bits = (block - 1).bit_length()
        self._places, self._codes = Planes(self._bits, total), Planes(2, total)
        self._head = 4 * LEVELS * len(self._parts)
        self.message_size = self._head + self._places.size + self._codes.size
        dtype = torch.int32 if layout.numel < 2**31 else torch.int64
        self._firsts, self._lasts = (torch.zeros(total, dtype=dtype, device=device) for _ in range(2))
        for blocks in self._blocks:
            starts = torch.arange(blocks.count, dtype=dtype, device=device).mul_(blocks.length).add_(blocks.start)
            self._firsts[blocks.slots].view(blocks.count, blocks.keep).copy_(starts.unsqueeze(1))
            self._lasts[blocks.slots] = blocks.length - 1
        self._choose = _Chooser().choose if host else _sorted

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan.encode``."""
        self.check(vector, message)
        if not self._blocks:
            return
        places, codes = self._room(vector.device)
        total = len(self._firsts)
        for blocks in self._blocks:
            self._choose(blocks.of(vector), places[blocks.slots].view(blocks.count, blocks.keep))
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
            index = torch.minimum(places[:total], self._lasts).add_(self._firsts)  # inside the block, whatever was sent
            levels = message[: self._head].clone().view(torch.float32).view(-1, LEVELS)  # rows may be unaligned
            values = torch.cat([table[codes[part].int()] for part, table in zip(self._parts, levels, strict=True)])
            out.index_add_(0, index, values, alpha=weight)

    def _room(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return buffers of positions and bins, rounded up to a multiple of 8 and 0 beyond the sent elements."""
        size = -(-len(self._firsts) // 8) * 8
        places = scratch(f"sparseloco places, {self._bits} bits", size, code_dtype(self._bits), device)
        codes = scratch("sparseloco codes", size, torch.uint8, device)
        places[len(self._firsts) :], codes[len(self._firsts) :] = 0, 0
        return places, codes


def _binned(values: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decoded values and the bins of float32 ``values``, and write the means of the bins to ``levels``."""
    wide = values.double()
    shift = wide.mean()
    width = SIGMAS / LEVELS * ((wide - shift).square().sum() / max(1, len(wide) - 1)).sqrt()
    bins = ((wide - shift) / torch.where(width > 0, width, 1) + LEVELS // 2).round_().clamp_(0, LEVELS - 1)
    members = bins == torch.arange(LEVELS, dtype=torch.int64, device=values.device).unsqueeze(1)
    means = torch.where(members, wide, 0).sum(1) / members.sum(1).clamp_(min=1)
    zeros = (members & (values == 0)).any(1)
    levels.copy_(torch.where(zeros, 0, means))
    return levels[bins.int()], bins.to(torch.uint8)


def _sorted(rows: Tensor, places: Tensor) -> None:
    """Write the positions of each row's largest elements, ascending; nothing waits for the device."""
    order = torch.sort(rows.abs(), dim=1, descending=True, stable=True).indices
    places.copy_(order[:, : places.shape[1]].sort(dim=1).values)


class _Chooser:
    """Chooses the same elements as ``_sorted`` on a CPU, without sorting."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        self._magnitudes = scratch("sparseloco magnitudes", max(CHUNK, 65536), torch.float32, cpu)
        self._parted = scratch("sparseloco parted", max(CHUNK, 65536), torch.float32, cpu)

    def choose(self, rows: Tensor, places: Tensor) -> None:
        """See ``_sorted``."""
        count, length = rows.shape
        keep = places.shape[1]
        magnitudes, parted = (
            buffer[: rows.numel()].view(count, length).numpy() for buffer in (self._magnitudes, self._parted)
        )
        np.abs(rows.numpy(), out=magnitudes)
        parted[:] = magnitudes
        parted.partition(length - keep, axis=1)
        least = parted[:, length - keep, None]
        mask = magnitudes >= least
        for row in np.flatnonzero(mask.sum(axis=1) > keep):  # of equal elements the last are left out
            equal = np.flatnonzero(magnitudes[row] == least[row])
            mask[row, equal[len(equal) - (int(mask[row].sum()) - keep) :]] = False
        places.copy_(torch.from_numpy(np.nonzero(mask)[1].reshape(count, keep)))
