"""The elements of largest magnitude of each part of a vector; see ``topk.py``, whose bytes these are.

A sample says from which magnitude on elements may be among the k largest. One pass over the numbers adds the residual
and lists those, tile by tile; the rest is done with the list: find the k-th largest (``narrowing``), count what is
larger in each tile, write indices and values in order (``candidates``). Where the list cannot do (fewer than k reached
the bound, or more than there is room for) the same kernels go over the vector; no wait for the device to learn
of it. All parts are handled by the same 7 launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.sparse import topk_steps_triton
from lightning_compress.codecs.sparse.topk import Slots
from lightning_compress.core.random import Stream
from lightning_compress.core.workspace import scratch
from lightning_compress.kernels.triton.launch import OPTIONS, Summands, kernel, sources, width_of

_CHUNK = 1024


def add(indices: Tensor, values: Tensor, out: Tensor, weight: float) -> None:
    """``out[indices] += weight * values``, where a value is not 0.

    Args:
        indices: int32 ``[k]``; no index has two values that are not 0. Indices beyond the vector are moved inside.
        values: float32 or float16 ``[k]``.
        out: float32 ``[n]``, n > 0.
        weight: rounded to float32.
    """
    if len(indices):
        grid = (triton.cdiv(len(indices), _CHUNK),)
        _add[grid](indices, values, out, weight, len(indices), len(out) - 1, _CHUNK, **OPTIONS)


@kernel
def _add(indices, values, out, weight, count, last, CHUNK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(values + number, mask=number < count, other=0.0).to(tl.float32)
    filled = value != 0
    index = tl.load(indices + number, mask=filled, other=0)
    index = tl.minimum(tl.maximum(index, 0), last)
    total = tl.load(out + index, mask=filled, other=0.0) + value * weight
    tl.store(out + index, total, mask=filled)


PROGRAMS = 384
"""At most so many programs find the k-th largest of one part: those that a GPU of 132 processors runs at once."""
_WIDTH = 256
_FEW = {**OPTIONS, "num_warps": 1}
"""For programs that handle the few candidates of one tile."""


class Part(NamedTuple):
    """Elements to choose among.

    Args:
        start: index of the first one.
        numel: how many there are; the vector has fewer than 2^31.
        kept: how many are chosen.
        stride: every so-manieth one is looked at, from the key modulo it on; 0 where none need be.
        few, more: which of the sample's largest magnitudes is the bound, if the sample has ``numel // stride``
            elements and if it has one more; 0 for no bound.
    """

    start: int
    numel: int
    kept: int
    stride: int
    few: int
    more: int

    @property
    def looks(self) -> int:
        """Elements of the sample, at most."""
        return -(-self.numel // self.stride) if self.stride else 0

    @property
    def room(self) -> int:
        """Elements that may be listed: several times what usually is; none where the vector does as well."""
        return 0 if not self.stride or 8 * self.kept > self.numel else max(4 * self.kept, self.numel // 32)


class TopK:
    """Moves the k largest elements of each part, in ascending order of index, to the slots of the part; see ``Kernel``.

    Args:
        parts: that are not empty, in order, side by side from the vector's first element on.
        slots: of a message; those that no part has are left empty. Of float16 the vector keeps what rounding left.
        device: where.
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

    def encode(self, vector: Tensor, summands: Summands, message: Tensor, stream: Stream, keep: bool) -> None:
        """See ``Kernel``; the samples depend on the key."""
        indices, values = self._slots.of(message)
        first, second, both = sources(vector, summands)
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
        given, tally = (self._tiles, *parts, self._found), (self._counts, self._runs)
        topk_steps_triton.count[tiles](vector, self._numbers, *given, *tally, *self._widths, **_FEW)
        slots, half = (indices, values, self._spare), values.dtype == torch.float16
        topk_steps_triton.emit[tiles](
            vector, self._numbers, self._origins, *given, *tally, *slots, *self._widths, half, **_FEW
        )  # fmt: skip

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        if not accumulate:
            out.zero_()
        for indices, values in zip(*self._slots.of(messages), strict=True):
            add(indices, values, out, weight)

    def _look(self, first: Tensor, second: Tensor, both: bool, key: int) -> None:
        """Find every part's bound, rounded down to the first digit."""
        given = self._looks, self._parts, self._state, self._histogram
        shape = both, *topk_steps_triton.DIGITS[0], topk_steps_triton.CHUNK
        topk_steps_triton.sample[(len(self._looks),)](
            first, second, *given, key >> 32, key & 0xFFFFFFFF, *shape, **OPTIONS
        )


def _tables(parts: Sequence[Part]) -> tuple[list[list[int]], ...]:
    """Rows of parts, tiles, and the programs that look at samples and that seek; see ``narrowing``."""
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
