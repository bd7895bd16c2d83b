"""Sketched SGD: sums of small tables, in which the largest elements of the mean are found."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.sparse.selection import CpuSelector, SortSelector
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import hash_torch, mix
from lightning_compress.core.state import States
from lightning_compress.core.workspace import pieces, scratch
from lightning_compress.reducers.reducer import Reducer, ReducerPlan

RUN = 1 << 14
"""Elements that are handled at a time on a CPU: a row's worth of each row fits its caches."""


@dataclass(frozen=True)
class Sketch(Reducer):
    """Apply the k largest elements of the mean among those that a count-sketch takes for the largest.

    A sketch is a table of rows; in each, every element is added, with a random sign, to a random bucket. Tables of the
    ranks add up to the table of the sum. An element's estimate is the median over the rows of its buckets, signs taken
    off: each row's errs by ``|sum| / sqrt(columns)`` in the root mean square. The exact sums of those with the largest
    estimates are then fetched, and the k largest of these (the first ones among equals) are applied; they are 0 in the
    vector afterwards, on every rank, and all else stays there. Biased: it needs error feedback. Unlike a top-k, what is
    chosen is large in the mean, and traffic does not grow with the ranks.

    Of n elements of a group, ``k = ceil(density n)`` are applied, ``ceil(candidates k)`` fetched, and a row has
    ``width k`` buckets, rounded up to a multiple of 8. Two all-reduces of float32 a group: of what is
    dense with the table, and of what is fetched: ``32 density (rows width + candidates)`` bits an element. Where that
    would be 32 or more, the mean is exact.

    Buckets and signs are drawn anew in each step, the same on all ranks, for runs of elements (see ``CountSketch``), so
    that memory is read in order and no tables of hashes are kept. No state. Momentum within the sketch (FetchSGD:
    Rothchild et al., ICML 2020, arXiv 2007.07682) is not here.

    Args:
        density: share of the elements that is applied, in (0, 1].
        rows: of the table; odd, 1 to 15. More make gross errors rarer.
        width: buckets of a row for each element that is applied, more than 0.
        candidates: elements fetched for each that is applied, at least 1.

    Raises:
        ValueError: a setting is none of these, or (from ``plan``) the vector has 2^31 elements or more.

    Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora, "Communication-efficient Distributed SGD with Sketching",
    NeurIPS 2019, arXiv 1903.04488. The sketch: Charikar, Chen, Farach-Colton, "Finding Frequent Items in Data Streams",
    ICALP 2002.
    """

    name: ClassVar[str] = "sketch"
    contractive: ClassVar[bool] = True
    density: float = 0.005
    rows: int = 3
    width: float = 3.0
    candidates: float = 4.0

    def __post_init__(self) -> None:
        if not _is_number(self.density) or not 0 < self.density <= 1:
            raise ValueError(f"Sketch(density={self.density!r}): density must be in (0, 1]; 0.005 applies 0.5 %")
        if type(self.rows) is not int or self.rows not in range(1, 16, 2):
            raise ValueError(f"Sketch(rows={self.rows!r}): rows must be an odd integer from 1 to 15; try 3")
        if not _is_number(self.width) or not 0 < self.width < math.inf:
            raise ValueError(f"Sketch(width={self.width!r}): width must be a number, more than 0; try 3")
        if not _is_number(self.candidates) or not 1 <= self.candidates < math.inf:
            raise ValueError(f"Sketch(candidates={self.candidates!r}): candidates must be a number, at least 1; try 4")

    def plan(self, layout: Layout, carried: int, world: World, states: States) -> ReducerPlan:
        """Make ready for vectors of this layout."""
        return _SketchPlan(layout.numel, carried, world, self)


class CountSketch:
    """Tables ``[rows, columns]`` of vectors ``[numel]``, and back.

    A vector is cut into stretches of as many elements as a row has columns. Each row is the sum of all stretches, every
    one turned around by a random number of places and with a random sign: so two elements of one stretch share no
    bucket, and two of different ones do in one of ``columns`` cases, and then with independent signs. Hence a row's
    error has the mean 0 and at most the variance ``|vector|^2 / columns``, as with hashes of single elements.

    Args:
        numel: elements of a vector.
        rows: odd.
        columns: buckets of a row.
        device: where.
    """

    def __init__(self, numel: int, rows: int, columns: int, device: torch.device) -> None:
        self._rows, self._columns = rows, columns
        stretches = [slice(start, min(start + columns, numel)) for start in range(0, numel, columns)]
        self._words = torch.empty(rows * len(stretches), dtype=torch.int64)
        self._parts = [  # stretch, place in the stretch, place in the vector
            (number, part.start, slice(stretch.start + part.start, stretch.start + part.stop))
            for number, stretch in enumerate(stretches)
            for part in pieces(stretch.stop - stretch.start, RUN if device.type == "cpu" else columns)
        ]
        self._twice = torch.zeros(rows, 2 * columns, device=device)  # so that no stretch wraps around
        size = max(part.stop - part.start for *_, part in self._parts)
        self._buffers = [scratch(f"sketch {number}", size, torch.float32, device) for number in range(rows + 1)]
        # The two have the same names for what is done here; a call of NumPy's costs a quarter.
        self._module: Any = np if device.type == "cpu" else torch

    def fill(self, vector: Tensor, table: Tensor, key: int) -> None:
        """Write the table of a vector: linear in it, but for rounding.

        Args:
            vector: float32 ``[numel]``.
            table: float32 ``[rows, columns]``.
            key: of the turns and signs.
        """
        rows, source = [self._native(row) for row in self._twice.zero_()], self._native(vector)
        add, subtract = self._module.add, self._module.subtract
        with np.errstate(over="ignore", invalid="ignore"):
            for turns, first, part in self._turned(key):
                values = source[part]
                for row, (turn, negative) in zip(rows, turns, strict=True):
                    target = row[turn + first : turn + first + len(values)]
                    (subtract if negative else add)(target, values, out=target)
        torch.add(*self._twice.split(self._columns, dim=1), out=table)

    def estimate(self, table: Tensor, out: Tensor, key: int) -> None:
        """Write every element's estimate: the median over the rows.

        Args:
            table: float32 ``[rows, columns]``, finite.
            out: float32 ``[numel]``.
            key: of the turns and signs.
        """
        for half in self._twice.split(self._columns, dim=1):
            half.copy_(table)
        rows, target = [self._native(row) for row in self._twice], self._native(out)
        buffers = [self._native(buffer) for buffer in self._buffers]
        for turns, first, part in self._turned(key):
            values = [buffer[: part.stop - part.start] for buffer in buffers]
            for row, value, (turn, negative) in zip(rows, values, turns, strict=False):
                found = row[turn + first : turn + first + len(value)]
                if negative:
                    self._module.negative(found, out=value)
                else:
                    value[:] = found
            target[part] = self._median(values)

    def _turned(self, key: int) -> Iterator[tuple[list[tuple[int, bool]], int, slice]]:
        """Each part's stretch's turn and sign in every row, its place in the stretch, and that in the vector."""
        hash_torch(self._words, mix(key))
        words = self._words.view(-1, self._rows)
        turns = ((words & (2**62 - 1)) % self._columns).tolist()
        both = [list(zip(*each, strict=True)) for each in zip(turns, (words < 0).tolist(), strict=True)]
        return ((both[number], first, part) for number, first, part in self._parts)

    def _median(self, values: list[Any]) -> Any:
        """The median of all but the last, which is spare; the memory of all is used up."""
        *values, spare = values
        minimum, maximum = self._module.minimum, self._module.maximum
        for last in range(len(values) - 1, len(values) // 2, -1):  # the larger half goes to the end one by one
            for upper in range(1, last + 1):
                minimum(values[upper - 1], values[upper], out=spare)
                if upper < last:
                    maximum(values[upper - 1], values[upper], out=values[upper])
                values[upper - 1], spare = spare, values[upper - 1]
        return functools.reduce(lambda a, b: maximum(a, b, out=a), values[: len(values) // 2 + 1])

    def _native(self, tensor: Tensor) -> Any:
        """The same memory as an array of the module."""
        return tensor.numpy() if self._module is np else tensor


class _SketchPlan(ReducerPlan):
    def __init__(self, numel: int, carried: int, world: World, reducer: Sketch) -> None:
        if numel >= 2**31:
            raise ValueError(
                f"Sketch: the vector has {numel} elements, but int32 indices end at 2^31 - 1; "
                "give parameters this large to another compressor by rules, such as 'rotated', or exclude them"
            )
        collective, device, self._meter = world
        self._collective = collective
        applied = max(1, math.ceil(reducer.density * numel))
        fetched = math.ceil(reducer.candidates * applied)
        columns = math.ceil(reducer.width * applied / 8) * 8
        self._sketch = None
        if reducer.rows * columns + fetched < numel:
            self._sketch = CountSketch(numel, reducer.rows, columns, device)
        else:
            applied, fetched = numel, 0
        size = reducer.rows * columns if self._sketch else numel
        self._first = torch.zeros(carried + size, device=device)  # what the first all-reduce sums
        self._carried, self._table = self._first[:carried], self._first[carried:]
        if self._sketch:
            self._table = self._table.view(reducer.rows, columns)
        self._selector = (CpuSelector if device.type == "cpu" else SortSelector)()
        self._places = torch.zeros(fetched, dtype=torch.int32, device=device)
        self._sums = torch.zeros(fetched, device=device)
        self._chosen = torch.zeros(applied, dtype=torch.int32, device=device)
        self._values = torch.zeros(applied, device=device)
        self.bytes_sent = sum(all_reduce_bytes(4 * count, collective.size) for count in (len(self._first), fetched))
        self.rounds = 2 * all_reduce_rounds(collective.size)

    def mean(self, vector: Tensor, out: Tensor, carried: Tensor, key: int) -> None:
        with self._meter.encode:
            self._carried.copy_(carried)
            if self._sketch:
                self._sketch.fill(vector, self._table, key)
            else:
                self._table.copy_(vector)
                vector.zero_()
        self._collective.all_reduce(self._first)
        carried.copy_(self._carried)
        if self._sketch:
            self._fetch(self._sketch, vector, out, key)
        else:
            torch.mul(self._table, 1 / self._collective.size, out=out)

    def _fetch(self, sketch: CountSketch, vector: Tensor, out: Tensor, key: int) -> None:
        with self._meter.encode:
            sketch.estimate(self._table.nan_to_num_(), out, key)  # sums beyond float32 are no reason to fail
            self._selector.select(out, range(len(out)), key, self._places, self._sums)
            torch.index_select(vector, 0, self._places, out=self._sums)
        self._collective.all_reduce(self._sums)
        with self._meter.decode:
            self._sums.nan_to_num_(math.inf, math.inf, -math.inf)
            self._selector.select(self._sums, range(len(self._sums)), key, self._chosen, self._values)
            places = self._places[self._chosen]
            out.zero_().index_copy_(0, places.long(), self._values.mul_(1 / self._collective.size))
            vector.index_fill_(0, places.long(), 0.0)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
