"""GPU kernels of ``topk.py``. Messages are bit-identical to its own.

A sample gives a lower bound of the k largest magnitudes. One pass over the vector adds the residual and lists the
elements that reach the bound, tile by tile. The other kernels work on this list: ``narrow`` finds the k-th largest
magnitude, ``count`` counts larger elements in each tile, ``emit`` writes indices and values in order. If the list
cannot be used, because fewer than k elements or too many reached the bound, the same kernels work on the vector. The
host does not need to know, so it never waits. All parts share 7 launches. The lists of all ranks are added by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lightning_compress.codecs.sparse import topk_steps_triton
from lightning_compress.codecs.sparse.topk import Slots
from lightning_compress.core.random import Stream
from lightning_compress.core.source import Source
from lightning_compress.core.workspace import scratch
from lightning_compress.kernels.triton.launch import OPTIONS, width_of

PROGRAMS = 384
"""Largest number of programs that narrow one part: as many as a GPU with 132 processors runs at once."""
_WIDTH = 256
_FEW = {**OPTIONS, "num_warps": 1}
"""Launch options of programs that handle the few candidates of one tile."""


class Part(NamedTuple):
    """A range of elements to choose from.

    Args:
        start: index of the first element.
        numel: number of elements, below 2^31.
        kept: number of elements that are chosen.
        stride: distance between elements of the sample, which starts at the key modulo the stride; 0 for no sample.
        few: rank of the bound among the sample's magnitudes, if the sample has ``numel // stride`` elements; 0 for no
            bound.
        more: the same if the sample has one more element.
    """

    start: int
    numel: int
    kept: int
    stride: int
    few: int
    more: int

    @property
    def looks(self) -> int:
        """Largest number of elements of the sample."""
        return -(-self.numel // self.stride) if self.stride else 0

    @property
    def room(self) -> int:
        """Capacity of the list, several times what is usual; 0 if working on the vector is as fast."""
        return 0 if not self.stride or 8 * self.kept > self.numel else max(4 * self.kept, self.numel // 32)


class TopK:
    """Moves the k largest elements of each part to the part's slots, in ascending order of index; see ``Kernel``.

    Args:
        parts: non-empty parts that fill the vector, in order.
        slots: format of a message. Slots beyond those of all parts are left empty.
        device: device of the vectors.
    """

    def __init__(self, parts: Sequence[Part], slots: Slots, device: torch.device) -> None:
        def table(rows: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(rows, dtype=torch.int32, device=device)

        self._slots, self._spare = slots, slots.most if slots.count > slots.most else -1
        listed = scratch("top-k candidates", sum(part.room for part in parts), torch.int64, device)
        self._listed = listed
        self._numbers, self._origins = listed.view(torch.float32), listed.view(torch.int32)[1:]
        rows, tiles, looks, seeks, runs = _tables(parts)
        self._parts, self._tiles, self._looks, self._seeks = map(table, (rows, tiles, looks, seeks))
        self._state = torch.zeros(len(parts), topk_steps_triton.FIELDS, dtype=torch.int32, device=device)
        self._histogram = torch.zeros(len(parts), topk_steps_triton.BINS, dtype=torch.int32, device=device)
        self._found = torch.zeros(len(tiles), 2, dtype=torch.int32, device=device)
        self._counts = torch.zeros(len(tiles), dtype=torch.int64, device=device)
        self._runs = torch.zeros(runs, dtype=torch.int64, device=device)
        most = max((part.kept / part.numel for part in parts if part.room), default=0.0)
        width = width_of(int(3 * most * topk_steps_triton.TILE_NUMEL))
        self._widths = min(max(width, 64), _WIDTH), _WIDTH

    def encode(self, source: Source, rest: Tensor | None, message: Tensor, stream: Stream) -> None:
        """See ``Kernel``; the sample depends on the key."""
        indices, values = self._slots.of(message)
        (first, second, vector), both, _ = source.pointers(rest)
        parts = self._parts, self._state
        if len(self._looks):
            self._look(first, second, both, stream.key)
        tiles = (len(self._tiles),)
        topk_steps_triton.collect[tiles](
            first, second, vector, self._tiles, *parts, self._listed, self._found, both, **OPTIONS
        )  # fmt: skip
        known = vector, self._numbers, self._seeks, *parts, self._histogram, self._runs
        for digit in topk_steps_triton.DIGITS:
            topk_steps_triton.narrow[(len(self._seeks),)](*known, *digit, topk_steps_triton.CHUNK, **OPTIONS)
        inputs, tally = (self._tiles, *parts, self._found), (self._counts, self._runs)
        topk_steps_triton.count[tiles](vector, self._numbers, *inputs, *tally, *self._widths, **_FEW)
        slots, half = (indices, values, self._spare), values.dtype == torch.float16
        topk_steps_triton.emit[tiles](
            vector, self._numbers, self._origins, *inputs, *tally, *slots, *self._widths, half, **_FEW
        )  # fmt: skip

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        indices, values = self._slots.of(messages)
        strides = indices.stride(0), values.stride(0)
        topk_steps_triton.merge[(len(self._tiles),)](
            out, indices, values, *strides, self._tiles, self._parts, weight, len(messages), accumulate, _WIDTH, **_FEW
        )  # fmt: skip

    def _look(self, first: Tensor, second: Tensor, both: bool, key: int) -> None:
        """Find the bound of every part, rounded down to its first digit."""
        inputs = self._looks, self._parts, self._state, self._histogram
        shape = both, *topk_steps_triton.DIGITS[0], topk_steps_triton.CHUNK
        topk_steps_triton.sample[(len(self._looks),)](
            first, second, *inputs, key >> 32, key & 0xFFFFFFFF, *shape, **OPTIONS
        )


def _tables(parts: Sequence[Part]) -> tuple[list[list[int]], ...]:
    """Return the tables of parts, tiles, ``sample`` programs and ``narrow`` programs, and the number of runs."""
    rows, tiles, looks, seeks = [], [], [], []
    slot = room = runs = 0
    for number, part in enumerate(parts):
        end, size = part.start + part.numel, topk_steps_triton.TILE_NUMEL
        begins = [part.start, *range(part.start // size * size + size, end, size)]
        ends = [*begins[1:], end]
        looking = triton.cdiv(part.looks, topk_steps_triton.CHUNK)
        seeking = min(triton.cdiv(2 * part.kept if part.room else part.numel, 2 * topk_steps_triton.CHUNK), PROGRAMS)
        run = triton.cdiv(len(begins), topk_steps_triton.RUN_TILES)
        rows.append([
            part.start, part.numel, part.kept, slot, len(tiles), room, part.room,
            part.stride, part.few, part.more, looking, runs, run,
        ])  # fmt: skip
        tiles += [[first, last, number, 0] for first, last in zip(begins, ends, strict=True)]
        looks += [[number, chunk] for chunk in range(looking)]
        seeks += [[number, chunk, seeking] for chunk in range(seeking)]
        slot, room, runs = slot + part.kept, room + part.room, runs + run
    return rows, tiles, looks, seeks, runs
