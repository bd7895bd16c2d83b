"""Stretches of a vector in which ranks select equally much, and what an Ok-Topk remembers from step to step.

Everything is kept by parameter, so that it moves with DistributedDataParallel's buckets, and whatever the number of
ranks is: how many elements of each of up to ``BINS`` parts of a parameter were selected, the threshold of its section,
and a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.core.state import Declared, States, place_of
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.sparse.lists import Listed

BINS = 64
"""Parts of a parameter in which selected elements are counted."""


def declared(layout: Layout) -> Mapping[str, Declared]:
    """Counts of selected elements, thresholds and clocks; the same on all ranks."""
    one = Layout.of((segment.name, (1,)) for segment in layout.segments)
    bins = Layout.of((segment.name, (min(BINS, segment.numel),)) for segment in layout.segments)
    return {"load": Declared(bins, "shared"), "threshold": Declared(one, "shared"), "clock": Declared(one, "shared")}


class Memory:
    """What is remembered, for the sections of one group.

    Args:
        sections: side by side.
        states: what ``declared`` named.
        device: where vectors are.
    """

    def __init__(self, sections: Sequence[Section], states: States, device: torch.device) -> None:
        self._states = states
        bins = {each.name: place_of(each) for each in states["load"].layout.segments}
        ones = {each.name: each.offset for each in states["threshold"].layout.segments}
        edges, start = [0], 0
        slots: list[int] = []
        self._owners: list[list[int]] = []
        for section in sections:
            segments = [segment for segment in section.layout.segments if segment.numel]
            self._owners.append([ones[segment.name] for segment in segments])
            for segment in segments:
                place = bins[segment.name]
                count = place.stop - place.start
                edges += [start + segment.numel * (part + 1) // count for part in range(count)]
                slots += range(place.start, place.stop)
                start += segment.numel
        self._edges, self._slots = np.array(edges), torch.tensor(slots, dtype=torch.int64, device=device)
        self._all = torch.tensor([place for owners in self._owners for place in owners], device=device).long()

    def clock(self) -> int:
        """Steps so far; modulo what the last ``tick`` said."""
        clocks = self._states["clock"].base()[self._all]
        return int(clocks.min()) if len(clocks) else 0

    def thresholds(self) -> list[float]:
        """Of each section; the least of its parameters', which may come from other groups."""
        numbers = self._states["threshold"].base()
        return [float(numbers[owners].min()) if owners else 0.0 for owners in self._owners]

    def carry(self) -> None:
        """Let the numbers of the step before be those of this one."""
        for state in self._states.values():
            state.pending.copy_(state.base())

    def tick(self, clock: int, thresholds: Sequence[float]) -> None:
        """Write what the next step goes on from; after ``carry``."""
        self._states["clock"].pending[self._all] = float(clock)
        for owners, threshold in zip(self._owners, thresholds, strict=True):
            self._states["threshold"].pending[owners] = threshold

    def count(self, held: Listed) -> Tensor:
        """How many numbers there are in each part, float32."""
        cuts = held.cuts(self._edges.tolist())
        return torch.tensor(cuts, dtype=torch.float32, device=self._slots.device).diff()

    def weigh(self, counts: Tensor) -> None:
        """Write how many all ranks selected in each part; after ``carry``."""
        self._states["load"].pending[self._slots] = counts

    def bounds(self, ranks: int) -> list[int]:
        """Where regions begin and end in which equally many elements were selected, as ``weigh`` said."""
        loads = self._states["load"].pending[self._slots].double().cpu().numpy()
        loads = np.clip(np.nan_to_num(loads), 0, 2.0**31)
        if not loads.sum():
            loads = np.diff(self._edges).astype(np.float64)
        reached = np.concatenate([[0.0], np.cumsum(loads)])
        wanted = reached[-1] * np.arange(1, ranks) / ranks
        inner = np.floor(np.interp(wanted, reached, self._edges)).astype(np.int64)
        return [0, *inner.tolist(), int(self._edges[-1])]
