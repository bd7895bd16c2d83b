"""Sketched SGD: all-reduces count-sketches, and finds the largest elements of the mean in their sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.codec import check_density
from lightning_compress.codecs.sparse.selection import CpuSelector, SortSelector
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import hash_torch, mix
from lightning_compress.core.state import States
from lightning_compress.core.workspace import pieces, scratch
from lightning_compress.reducers.reducer import Reducer, ReducerPlan

RUN = 1 << 14
"""Elements that are handled at a time on a CPU, so that the buffers of all rows fit into its cache."""


@dataclass(frozen=True)
class Sketch(Reducer):
    """Apply the k largest elements of the mean, out of the candidates that a count-sketch finds.

    A sketch is a table. In each of its rows, every element is added, with a random sign, to a random bucket. The sum of
    the ranks' tables is the table of the sum. The estimate of an element is the median over the rows of its bucket
    times its sign; in each row, the root mean square error is ``|sum| / sqrt(columns)``. The exact sums of the elements
    with the largest estimates, the candidates, are then fetched, and the k largest of these (the first ones if equal)
    are applied. They are set to 0 in the vector on every rank; all others stay. The method is biased and needs error
    feedback. Unlike with top-k, the chosen elements are large in the mean, and traffic does not grow with the ranks.

    Of n elements in a group, ``k = ceil(density n)`` are applied and ``ceil(candidates k)`` are fetched. A row has
    ``width k`` buckets, rounded up to a multiple of 8. Each group needs two all-reduces of float32: of the dense
    parameters with the table, and of the candidates, ``32 density (rows width + candidates)`` bits per element. If that
    is 32 or more, the exact mean is computed instead.

    Buckets and signs are drawn again in each step, the same on all ranks, for runs of elements, so that memory is
    read in order and no hash tables are kept. No state. Momentum within the sketch (FetchSGD: Rothchild et al., ICML
    2020, arXiv 2007.07682) is not implemented.

    Args:
        density: share of the elements that is applied, in (0, 1].
        rows: of the table; odd, 1 to 15. More rows make large errors rarer.
        width: buckets in a row for each applied element, above 0.
        candidates: fetched elements for each applied element, 1 or more.

    Raises:
        ValueError: a setting is out of range, or (from ``plan``) the vector has 2^31 elements or more.

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
        check_density("Sketch", self.density, "0.005 applies 0.5 %")
        if type(self.rows) is not int or self.rows not in range(1, 16, 2):
            raise ValueError(f"Sketch(rows={self.rows!r}): rows must be an odd integer from 1 to 15; try 3")
        if not _is_number(self.width) or not 0 < self.width < math.inf:
            raise ValueError(f"Sketch(width={self.width!r}): width must be a number, more than 0; try 3")
        if not _is_number(self.candidates) or not 1 <= self.candidates < math.inf:
            raise ValueError(f"Sketch(candidates={self.candidates!r}): candidates must be a number, at least 1; try 4")

    def plan(self, layout: Layout, carried: int, world: World, states: States) -> ReducerPlan:
        """See ``Reducer.plan``."""
        return _SketchPlan(layout.numel, carried, world, self)


class CountSketch:
    """Computes tables ``[rows, columns]`` from vectors ``[numel]``, and estimates from tables.

    A vector is cut into stretches of ``columns`` elements. Each row is the sum of all stretches, each rotated by a
    random number of places and multiplied by a random sign. So two elements of the same stretch never share a bucket.
    Two elements of different stretches share one with probability ``1 / columns``, and then have independent signs.
    The error of a row has mean 0 and a variance of at most ``|vector|^2 / columns``, as with hashes of single elements.

    Args:
        numel: elements of a vector.
        rows: odd.
        columns: buckets in a row.
        device: of vectors and tables.
    """

    def __init__(self, numel: int, rows: int, columns: int, device: torch.device) -> None:
        self._rows, self._columns = rows, columns
        stretches = [slice(start, min(start + columns, numel)) for start in range(0, numel, columns)]
        self._words = torch.empty(rows * len(stretches), dtype=torch.int64)
        self._parts = [  # index of the stretch, start in the stretch, slice of the vector
            (number, part.start, slice(stretch.start + part.start, stretch.start + part.stop))
            for number, stretch in enumerate(stretches)
            for part in pieces(stretch.stop - stretch.start, RUN if device.type == "cpu" else columns)
        ]
        # so that no rotated stretch wraps around
        self._twice = torch.zeros(rows, 2 * columns, dtype=torch.float32, device=device)
        size = max(part.stop - part.start for *_, part in self._parts)
        self._buffers = [scratch(f"sketch {number}", size, torch.float32, device) for number in range(rows + 1)]
        # Both modules have the functions that are used here, with the same names; NumPy's calls cost a quarter.
        self._module: Any = np if device.type == "cpu" else torch

    def fill(self, vector: Tensor, table: Tensor, key: int) -> None:
        """Write the table of a vector. It is linear in the vector, except for rounding.

        Args:
            vector: float32 ``[numel]``.
            table: float32 ``[rows, columns]``.
            key: of the rotations and signs.
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
        """Write the estimate of every element: the median over the rows.

        Args:
            table: float32 ``[rows, columns]``, finite.
            out: float32 ``[numel]``.
            key: of the rotations and signs.
        """
        for half in self._twice.split(self._columns, dim=1):
            half.copy_(table)
        rows, target = [self._native(row) for row in self._twice], self._native(out)
        buffers = [self._native(buffer) for buffer in self._buffers]
        for turns, first, part in self._turned(key):
            values = [buffer[: part.stop - part.start] for buffer in buffers]
            for row, value, (turn, negative) in zip(rows, values, turns, strict=False):
                buckets = row[turn + first : turn + first + len(value)]
                if negative:
                    self._module.negative(buckets, out=value)
                else:
                    value[:] = buckets
            target[part] = self._median(values)

    def _turned(self, key: int) -> Iterator[tuple[list[tuple[int, bool]], int, slice]]:
        """Yield for each part: rotation and sign of its stretch by row, start in the stretch, slice of the vector."""
        hash_torch(self._words, mix(key))
        words = self._words.view(-1, self._rows)
        turns = ((words & (2**62 - 1)) % self._columns).tolist()
        both = [list(zip(*each, strict=True)) for each in zip(turns, (words < 0).tolist(), strict=True)]
        return ((both[number], first, part) for number, first, part in self._parts)

    def _median(self, values: list[Any]) -> Any:
        """Return the median of all arrays but the last. All of them, the spare last one too, are overwritten."""
        *values, spare = values
        minimum, maximum = self._module.minimum, self._module.maximum
        for last in range(len(values) - 1, len(values) // 2, -1):  # moves the larger half to the end, one by one
            for upper in range(1, last + 1):
                minimum(values[upper - 1], values[upper], out=spare)
                if upper < last:
                    maximum(values[upper - 1], values[upper], out=values[upper])
                values[upper - 1], spare = spare, values[upper - 1]
        return functools.reduce(lambda a, b: maximum(a, b, out=a), values[: len(values) // 2 + 1])

    def _native(self, tensor: Tensor) -> Any:
        """Return the tensor as an array of the module, in the same memory."""
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
        self._first = torch.zeros(carried + size, dtype=torch.float32, device=device)  # the first all-reduce sums it
        self._carried, self._table = self._first[:carried], self._first[carried:]
        if self._sketch:
            self._table = self._table.view(reducer.rows, columns)
        self._selector = (CpuSelector if device.type == "cpu" else SortSelector)()
        self._places = torch.zeros(fetched, dtype=torch.int32, device=device)
        self._sums = torch.zeros(fetched, dtype=torch.float32, device=device)
        self._chosen = torch.zeros(applied, dtype=torch.int32, device=device)
        self._values = torch.zeros(applied, dtype=torch.float32, device=device)
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
            sketch.estimate(self._table.nan_to_num_(), out, key)  # overflowing sums must not stop the step
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
