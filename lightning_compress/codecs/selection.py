"""Finding the largest elements of a long vector without sorting it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.buffers import CHUNK, pieces, scratch

SMALL = 4096
"""Up to this many elements no sample is worth taking."""
TAIL = 400
"""Elements of the sample that should reach the threshold: their number errs by 1 / sqrt(TAIL) = 5 %; by more where the
sample would have to be more than a 16th of all (densities below 0.006)."""


class Selector(ABC):
    """Finds the elements of largest magnitude.

    Args:
        exact: find just the ``k`` largest, the first ones among equals; otherwise the largest ``k`` at most of those
            that reach the k-th magnitude as estimated on a sample.
    """

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    @abstractmethod
    def select(self, vector: Tensor, part: range, key: int, indices: Tensor, values: Tensor) -> None:
        """Write places and values of the largest elements of a part of the vector, in ascending order of place.

        Args:
            vector: float32 ``[n]``.
            part: the elements to choose among.
            key: from which the sample's offset is drawn.
            indices: int32 ``[k]``; places in the vector, then 0 where fewer than k were found.
            values: float32 ``[k]``; the values there, then 0.
        """

    def sample(self, numel: int, k: int, key: int) -> tuple[slice, int]:
        """Which elements to look at, and how many of them should reach the threshold (0: take no threshold)."""
        stride = stride_of(numel, k)
        if not stride:
            return slice(0, 0), 0
        offset = key % stride
        size = len(range(offset, numel, stride))
        return slice(offset, numel, stride), rank_of(size, numel, k, self.exact)


def stride_of(numel: int, k: int) -> int:
    """From one element of the sample to the next; 0 where none is worth taking."""
    if numel <= SMALL:
        return 0
    wanted = min(max(TAIL * numel // k, SMALL), max(numel // 16, SMALL))
    return max(1, numel // wanted) | 1  # odd, so that it does not fall in step with the rows of a matrix


def rank_of(size: int, numel: int, k: int, exact: bool) -> int:
    """How many elements of a sample should reach the threshold for ``k`` of all; 0: take no threshold."""
    rank = k * size / numel
    if exact:  # aim above k, such that fewer than k pass in one of a thousand cases
        rank += 3 * math.sqrt(rank) + 5
    return round(rank) if rank < size else 0


class CpuSelector(Selector):
    """Threshold by sample, then candidates chunk by chunk in cache, then a selection among the candidates."""

    def __init__(self, exact: bool) -> None:
        super().__init__(exact)
        cpu = torch.device("cpu")
        self._magnitude = scratch("selection magnitude", CHUNK, torch.float32, cpu).numpy()
        self._mask = scratch("selection mask", CHUNK, torch.bool, cpu).numpy()
        self._candidates = np.empty(0, np.int32)
        self._magnitudes = np.empty(0, np.float32)
        self._order = np.empty(0, np.float32)

    def select(self, vector: Tensor, part: range, key: int, indices: Tensor, values: Tensor) -> None:
        """Write places and values of the largest elements; see the base class."""
        slots = indices.numpy()
        found = self._find(vector.numpy()[part.start : part.stop], key, slots)
        slots[:found] += np.int32(part.start)
        slots[found:] = 0
        torch.index_select(vector, 0, indices[:found], out=values[:found])
        values[found:] = 0

    def _find(self, source: npt.NDArray[np.float32], key: int, slots: npt.NDArray[np.int32]) -> int:
        k = len(slots)
        if k == len(source):
            slots[:] = np.arange(k)
            return k
        where, rank = self.sample(len(source), k, key)
        threshold = np.float32(0)
        if rank:
            magnitudes = np.abs(source[where])
            magnitudes.partition(len(magnitudes) - rank)
            threshold = magnitudes[len(magnitudes) - rank]
        count = self._collect(source, threshold)
        if self.exact and count < k and threshold > 0:
            count = self._collect(source, np.float32(0))
        if count > k:
            self._cut(count, slots)
            return k
        slots[:count] = self._candidates[:count]
        if self.exact and count < k:  # all that is not zero; the first zeros stand among the first k elements
            slots[count:] = np.flatnonzero(source[:k] == 0)[: k - count]
            slots.sort()
            return k
        return count

    def _collect(self, source: npt.NDArray[np.float32], threshold: np.float32) -> int:
        """Gather the elements that reach the threshold and are not zero; returns their number."""
        count = 0
        least = max(threshold, np.finfo(np.float32).smallest_subnormal)
        fast = kernels.of(torch.device("cpu"))
        for piece in pieces(len(source), CHUNK):
            size = piece.stop - piece.start
            if fast:
                if count + size > len(self._candidates):
                    self._grow(min(len(source), count + 2 * size))
                found = self._candidates, self._magnitudes
                count = fast.collect(source, least, piece.start, piece.stop, *found, count)
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
        for piece in pieces(count, CHUNK):
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


class SortSelector(Selector):
    """The same choice by a stable sort, for accelerators: nothing waits for the device."""

    def select(self, vector: Tensor, part: range, key: int, indices: Tensor, values: Tensor) -> None:
        """Write places and values of the largest elements; see the base class."""
        source, k = vector[part.start : part.stop], len(indices)
        magnitudes = source.abs()
        where, rank = self.sample(len(part), k, key)
        if not self.exact and rank:
            least = magnitudes[where].topk(rank, sorted=True).values[-1]
            magnitudes = torch.where(magnitudes >= least, magnitudes, 0)
        largest, places = torch.sort(magnitudes, descending=True, stable=True)
        if self.exact or k == len(part):
            chosen = places[:k].sort().values
            indices.copy_(chosen + part.start)
            values.copy_(source[chosen])
            return
        found = largest[:k] > 0
        chosen = torch.where(found, places[:k], len(part)).sort().values  # what was not found comes last
        found = chosen < len(part)
        indices.copy_(torch.where(found, chosen + part.start, 0))
        values.copy_(torch.where(found, source[chosen.clamp(max=len(part) - 1)], 0))
