"""Selection of the k elements of largest magnitude, without sorting on a CPU, and messages of them as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import SourcePlan
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Pieces, Source, place_of
from lightning_compress.core.workspace import CHUNK, scratch

LARGEST = torch.finfo(torch.float16).max
SMALL = 4096
"""Up to this length, no sample is taken."""
TAIL = 400
"""Desired number of sampled elements among the k largest, so that it errs by 1 / sqrt(TAIL) = 5 %. It is smaller, and
errs more, where the sample would exceed a 16th of all elements (densities below 0.006)."""


def sample_of(numel: int, k: int, key: int) -> range:
    """Return the indices of the sample for the k largest of ``numel`` elements; empty if no sample pays."""
    stride = stride_of(numel, k)
    return range(key % stride, numel, stride) if stride else range(0)


def stride_of(numel: int, k: int) -> int:
    """Return the distance between elements of the sample; 0 if no sample pays."""
    if numel <= SMALL:
        return 0
    wanted = min(max(TAIL * numel // k, SMALL), max(numel // 16, SMALL))
    return max(1, numel // wanted) | 1  # odd, so that it shares no period with the rows of a matrix


def rank_of(size: int, numel: int, k: int) -> int:
    """Return how many elements of a sample must reach the threshold, so that at least k of all do; 0 for no threshold.

    In one of a thousand cases, fewer than k reach it.
    """
    rank = k * size / numel
    rank += 3 * math.sqrt(rank) + 5
    return round(rank) if rank < size else 0


class CpuSelector:
    """Finds the k elements of largest magnitude; of equal elements the first are taken.

    A sample gives a threshold. Candidates that reach it are collected, one chunk at a time in cache. Then the k largest
    candidates are selected.

    Args:
        sampled: use a sample, and lower the threshold if fewer than k elements reach it. Otherwise all nonzero elements
            are candidates.
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
        """Write positions and values of the k largest elements of a part of the vector, in ascending order of position.

        Args:
            vector: float32 ``[n]``.
            part: range of the elements to select from.
            key: seed of the sample's offset.
            indices: int32 ``[k]``, overwritten by positions in the vector.
            values: float32 ``[k]``, overwritten by the values at these positions.
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
        if count < k:  # all nonzero elements are candidates; the first zeros are among the first k elements
            slots[count:] = np.flatnonzero(source[:k] == 0)[: k - count]
            slots.sort()

    def _candidates_for(self, source: npt.NDArray[np.float32], k: int, key: int) -> int:
        """Collect candidates: at least k, or all nonzero elements. Return their number."""
        where = sample_of(len(source), k, key) if self.sampled else range(0)
        rank = rank_of(len(where), len(source), k)
        magnitudes = np.abs(source[where.start : where.stop : where.step])
        while 0 < rank < len(where):
            magnitudes.partition(len(where) - rank)
            threshold = magnitudes[len(where) - rank]
            count = self._collect(source, threshold)
            if count >= k or threshold == 0:
                return count
            rank *= 4  # the sample was misleading: lower the threshold
        return self._collect(source, np.float32(0))

    def _collect(self, source: npt.NDArray[np.float32], threshold: np.float32) -> int:
        """Collect the nonzero elements that reach the threshold, and return their number."""
        count = 0
        least = max(threshold, np.finfo(np.float32).smallest_subnormal)
        for start in range(0, len(source), CHUNK):
            piece = slice(start, min(start + CHUNK, len(source)))
            size = piece.stop - start
            if self._fast:
                if count + size > len(self._candidates):
                    self._grow(min(len(source), count + 2 * size))
                lists = self._candidates, self._magnitudes
                count = self._fast.collect(source, least, start, piece.stop, *lists, count)
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
        """Write the largest candidates to all slots; of equal candidates the first are taken."""
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
        """Enlarge the lists of candidates. This usually happens in the first steps only."""

        def grown(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            larger = np.empty(size, array.dtype)
            larger[: len(array)] = array
            return larger

        self._candidates, self._magnitudes = grown(self._candidates), grown(self._magnitudes)
        self._order = np.empty(size, np.float32)


class SortSelector:
    """Finds the same elements by a stable sort, for accelerators: nothing waits for the device."""

    def select(self, vector: Tensor, part: range, key: int, indices: Tensor, values: Tensor) -> None:
        """See ``CpuSelector.select``."""
        source = vector[part.start : part.stop]
        order = torch.sort(source.abs(), descending=True, stable=True).indices
        chosen = order[: len(indices)].sort().values
        indices.copy_(chosen + part.start)
        values.copy_(source[chosen])


class Choice:
    """Chooses the elements that are sent.

    Args:
        density: share of the elements that is sent, in (0, 1].
        local: send this share of each parameter, not of the whole vector.
        sampled: see ``CpuSelector``.
        layout: layout of the vectors.
        device: device of the vectors.

    Attributes:
        most: number of elements that are sent.
        parts: pairs (range of elements, number of elements that are sent of it).
        ends: end of each part.
        sampled: as given.
    """

    def __init__(self, density: float, local: bool, sampled: bool, layout: Layout, device: torch.device) -> None:
        if layout.numel >= 2**31:
            raise ValueError(
                f"TopK: the vector has {layout.numel} elements, but int32 indices end at 2^31 - 1; "
                "give large parameters to another compressor by rules, such as 'rotated' or 'none'"
            )
        whole = [range(layout.numel)]
        parts = [range(s.offset, s.end) for s in layout.segments] if local else whole
        self.parts = [(part, max(1, math.ceil(density * len(part)))) for part in parts if part]
        self.most = sum(k for _, k in self.parts)
        self.ends = [part.stop for part, _ in self.parts]
        self._selector = CpuSelector(sampled) if device.type == "cpu" else SortSelector()
        self.sampled = sampled

    def make(self, vector: Tensor, key: int, indices: Tensor, values: Tensor) -> None:
        """Write positions (int32) and values (float32) of the chosen elements, ``[most]``; see ``CpuSelector``."""
        filled = 0
        for part, k in self.parts:
            slots = slice(filled, filled + k)
            self._selector.select(vector, part, key, indices[slots], values[slots])
            filled += k


@dataclass(frozen=True)
class Slots:
    """The format of a message with int32 positions, then float32 or float16 values.

    Args:
        most: number of elements that are sent.
        dtype: dtype of the values. For float16 the number of slots is rounded up to an even number.
    """

    most: int
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Number of slots."""
        return self.most + (self.most % 2 if self.dtype == torch.float16 else 0)

    @property
    def size(self) -> int:
        """Bytes of a message."""
        return (4 + self.dtype.itemsize) * self.count

    def of(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the positions and the values of a message, or of each row of messages."""
        if not self.count:  # an empty row may be unaligned
            return message.new_empty(0, dtype=torch.int32), message.new_empty(0, dtype=self.dtype)
        middle = 4 * self.count
        return message[..., :middle].view(torch.int32), message[..., middle:].view(self.dtype)


class FloatsPlan(SourcePlan):
    """Sends elements in ``Slots``, by tensor operations and CPU kernels.

    Args:
        layout: layout of the vectors.
        device: device of the vectors.
        choice: chooses the elements.
        slots: format of a message.
    """

    def __init__(self, layout: Layout, device: torch.device, choice: Choice, slots: Slots) -> None:
        super().__init__(layout)
        self._choice, self._slots, self.message_size = choice, slots, slots.size
        segments = [range(segment.offset, segment.end) for segment in layout.segments if segment.numel]
        self._fast = kernels.backend(f"{__package__}.topk", device, "numba")
        self.in_pieces = self._fast is not None and [part for part, _ in choice.parts] == segments
        ends = list(accumulate((k for _, k in choice.parts), initial=0))
        rows = [(part.start, part.stop, *slots) for (part, _), slots in zip(choice.parts, pairwise(ends), strict=True)]
        self._parts = np.array(rows, np.int64).reshape(-1, 4)
        rounded = slots.count if slots.dtype == torch.float16 else 0
        self._floats = torch.zeros(rounded, dtype=torch.float32, device=device)
        self._places = torch.zeros(rounded, dtype=torch.int32, device=device)

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""
        vector, (indices, values) = source.into(rest), self._slots.of(message)
        if self._slots.dtype == torch.float32:
            self._choice.make(vector, key, indices, values)
        else:
            self._choice.make(vector, key, self._places, self._floats)
            indices.copy_(self._places)
            values.copy_(self._floats.clamp_(-LARGEST, LARGEST))
            values = self._floats.copy_(values)
        vector.index_add_(0, indices, values, alpha=-1)  # exactly 0.0; an empty slot changes nothing

    def decode(self, messages: Tensor, out: Tensor | Pieces, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        sections = [self._slots.of(message) for message in messages]
        indices = [self._inside(indices) for indices, _ in sections]  # before anything is written
        values = [values.float() for _, values in sections]
        if self._fast and sections and not accumulate:
            lists = torch.stack(indices).numpy(), torch.stack(values).numpy()
            cursors = np.empty(len(lists[0]), np.int64)
            if self._fast.add(*lists, self._parts, np.float32(weight), place_of(out), cursors):
                return
        vector = out if isinstance(out, Tensor) else torch.empty(self.layout.numel, dtype=torch.float32)
        if not accumulate:
            vector.zero_()
        for index, numbers in zip(indices, values, strict=True):
            vector.index_add_(0, index, numbers, alpha=weight)
        if isinstance(out, Pieces):
            out.copy_(vector)

    def _inside(self, indices: Tensor) -> Tensor:
        """Return the positions, clamped on an accelerator; on a CPU, raise ValueError if one is out of range."""
        last = self.layout.numel - 1
        if indices.device.type != "cpu":
            return indices.clamp(0, last)
        if indices.numel() and (indices.min() < 0 or indices.max() > last):
            raise ValueError(f"TopK: the message has indices outside [0, {last}]; it is damaged, or of another layout")
        return indices
