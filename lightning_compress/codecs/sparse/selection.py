"""Which elements a sparse method sends: the largest, found without sorting, or those that reach a threshold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core.layout import Layout
from lightning_compress.core.workspace import CHUNK, scratch

SMALL = 4096
"""Up to this many elements no sample is worth taking."""
TAIL = 400
"""Elements of the sample that the k largest should have among them: their number errs by 1 / sqrt(TAIL) = 5 %; by more
where the sample would have to be more than a 16th of all (densities below 0.006)."""


def sample_of(numel: int, k: int, key: int) -> range:
    """Which elements to look at for the k largest of so many; none where that is not worth it."""
    stride = stride_of(numel, k)
    return range(key % stride, numel, stride) if stride else range(0)


def stride_of(numel: int, k: int) -> int:
    """From one element of the sample to the next; 0 where none is worth taking."""
    if numel <= SMALL:
        return 0
    wanted = min(max(TAIL * numel // k, SMALL), max(numel // 16, SMALL))
    return max(1, numel // wanted) | 1  # odd, so that it does not fall in step with the rows of a matrix


def rank_of(size: int, numel: int, k: int) -> int:
    """How many elements of a sample should reach the threshold, so that ``k`` of all do; 0: take no threshold.

    Fewer than k reach it in one of a thousand cases.
    """
    rank = k * size / numel
    rank += 3 * math.sqrt(rank) + 5
    return round(rank) if rank < size else 0


class CpuSelector:
    """Finds the k elements of largest magnitude, the first ones among equals.

    Threshold by sample, then candidates chunk by chunk in cache, then a selection among the candidates.

    Args:
        sampled: look for them among those that reach a threshold by a sample, which is lowered where fewer than k do;
            otherwise among all.
    """

    def __init__(self, sampled: bool = True) -> None:
        self.sampled = sampled
        cpu = torch.device("cpu")
        self._fast = kernels.backend(f"{__package__}.topk", cpu, "numba")
        self._magnitude = scratch("selection magnitude", CHUNK, torch.float32, cpu).numpy()
        self._mask = scratch("selection mask", CHUNK, torch.bool, cpu).numpy()
        self._candidates = np.empty(0, np.int32)
        self._magnitudes = np.empty(0, np.float32)
        self._order = np.empty(0, np.float32)

    def select(self, vector: Tensor, part: range, key: int, indices: Tensor, values: Tensor) -> None:
        """Write places and values of the largest elements of a part of the vector, in ascending order of place.

        Args:
            vector: float32 ``[n]``.
            part: the elements to choose among.
            key: from which the sample's offset is drawn.
            indices: int32 ``[k]``; places in the vector.
            values: float32 ``[k]``; the values there.
        """
        slots = indices.numpy()
        self._find(vector.numpy()[part.start : part.stop], key, slots)
        slots += np.int32(part.start)
        torch.index_select(vector, 0, indices, out=values)

    def _find(self, source: npt.NDArray[np.float32], key: int, slots: npt.NDArray[np.int32]) -> None:
        k = len(slots)
        if k == len(source):
            slots[:] = np.arange(k)
            return
        count = self._candidates_for(source, k, key)
        if count > k:
            self._cut(count, slots)
            return
        slots[:count] = self._candidates[:count]
        if count < k:  # all that is not zero; the first zeros stand among the first k elements
            slots[count:] = np.flatnonzero(source[:k] == 0)[: k - count]
            slots.sort()

    def _candidates_for(self, source: npt.NDArray[np.float32], k: int, key: int) -> int:
        """Gather what may be among the k largest, or all that is not zero; returns its number."""
        where = sample_of(len(source), k, key) if self.sampled else range(0)
        rank = rank_of(len(where), len(source), k)
        magnitudes = np.abs(source[where.start : where.stop : where.step])
        while 0 < rank < len(where):
            magnitudes.partition(len(where) - rank)
            threshold = magnitudes[len(where) - rank]
            count = self._collect(source, threshold)
            if count >= k or threshold == 0:
                return count
            rank *= 4  # the sample was misleading: select again among more
        return self._collect(source, np.float32(0))

    def _collect(self, source: npt.NDArray[np.float32], threshold: np.float32) -> int:
        """Gather the elements that reach the threshold and are not zero; returns their number."""
        count = 0
        least = max(threshold, np.finfo(np.float32).smallest_subnormal)
        for start in range(0, len(source), CHUNK):
            piece = slice(start, min(start + CHUNK, len(source)))
            size = piece.stop - start
            if self._fast:
                if count + size > len(self._candidates):
                    self._grow(min(len(source), count + 2 * size))
                found = self._candidates, self._magnitudes
                count = self._fast.collect(source, least, start, piece.stop, *found, count)
                continue
            magnitude = np.abs(source[piece], out=self._magnitude[:size])
            mask = np.greater_equal(magnitude, least, out=self._mask[:size])
            hits = np.flatnonzero(mask)
            end = count + len(hits)
            if end > len(self._candidates):
                self._grow(min(len(source), max(2 * end, CHUNK)) if end < len(source) else end)
            np.add(hits, piece.start, out=self._candidates[count:end], casting="unsafe")
            np.take(magnitude, hits, out=self._magnitudes[count:end], mode="clip")
            count = end
        return count

    def _cut(self, count: int, slots: npt.NDArray[np.int32]) -> None:
        """Keep the largest candidates, as many as there are slots, and the first ones among equals."""
        k = len(slots)
        order = self._order[:count]
        order[:] = self._magnitudes[:count]
        order.partition(count - k)
        least = order[count - k]
        equal = k - np.count_nonzero(order[count - k :] > least)
        filled = 0
        for start in range(0, count, CHUNK):
            piece = slice(start, min(start + CHUNK, count))
            magnitudes = self._magnitudes[piece]
            mask = np.greater(magnitudes, least, out=self._mask[: len(magnitudes)])
            ties = np.flatnonzero(magnitudes == least)[:equal]
            mask[ties] = True
            equal -= len(ties)
            hits = np.flatnonzero(mask)
            np.take(self._candidates[piece], hits, out=slots[filled : filled + len(hits)], mode="clip")
            filled += len(hits)

    def _grow(self, size: int) -> None:
        """More room for candidates; happens in the first steps only, as long as gradients keep their shape."""

        def grown(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            larger = np.empty(size, array.dtype)
            larger[: len(array)] = array
            return larger

        self._candidates, self._magnitudes = grown(self._candidates), grown(self._magnitudes)
        self._order = np.empty(size, np.float32)


class SortSelector:
    """The same choice by a stable sort, for accelerators: nothing waits for the device."""

    def select(self, vector: Tensor, part: range, key: int, indices: Tensor, values: Tensor) -> None:
        """See ``CpuSelector.select``."""
        source = vector[part.start : part.stop]
        places = torch.sort(source.abs(), descending=True, stable=True).indices
        chosen = places[: len(indices)].sort().values
        indices.copy_(chosen + part.start)
        values.copy_(source[chosen])


class Choice:
    """Which elements are sent.

    Args:
        density: share that is sent, in (0, 1].
        local: of each parameter, instead of the whole vector.
        sampled: see ``CpuSelector``.
        layout: what the vector is made of.
        device: where it is.

    Attributes:
        most: how many, at most.
        parts: what the elements are chosen from, and how many from each.
        ends: where these end.
        sampled: see above.
    """

    def __init__(self, density: float, local: bool, sampled: bool, layout: Layout, device: torch.device) -> None:
        if layout.numel >= 2**31:
            raise ValueError(
                f"TopK: the vector has {layout.numel} elements, but int32 indices end at 2^31 - 1; "
                "give parameters this large to another compressor by rules, such as 'rotated', or exclude them"
            )
        whole = [range(layout.numel)]
        parts = [range(s.offset, s.end) for s in layout.segments] if local else whole
        self.parts = [(part, max(1, math.ceil(density * len(part)))) for part in parts if part]
        self.most = sum(k for _, k in self.parts)
        self.ends = [part.stop for part, _ in self.parts]
        self._selector = CpuSelector(sampled) if device.type == "cpu" else SortSelector()
        self.sampled = sampled

    def make(self, vector: Tensor, key: int, indices: Tensor, values: Tensor) -> None:
        """Fill ``most`` slots."""
        filled = 0
        for part, k in self.parts:
            slots = slice(filled, filled + k)
            self._selector.select(vector, part, key, indices[slots], values[slots])
            filled += k
