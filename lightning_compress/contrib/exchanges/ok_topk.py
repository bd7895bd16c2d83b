"""Sends the k largest elements of the sum. Owners of regions select them by a threshold that is reused for many steps.

Li, Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, arXiv 2201.07598.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense
from lightning_compress.codecs.codec import ALIGNMENT, aligned
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.contrib.exchanges.lists import joined, spread
from lightning_compress.contrib.exchanges.rounds import new_messages
from lightning_compress.contrib.exchanges.selection import Compact, check_fed_back, keeps_all
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.core.state import States, StateSpec
from lightning_compress.core.workspace import Growing
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan, Keeper, longest
from lightning_compress.exchanges.head import LENGTH
from lightning_compress.exchanges.message import MessagePlan, Section
from lightning_compress.exchanges.remote_error import FLAG, DeferredError, flags_of
from lightning_compress.exchanges.sparse import coding
from lightning_compress.exchanges.sparse.coding import SparseVector
from lightning_compress.exchanges.sparse.split_gather import check_selective, expected_count

MORE, FEWER, NUDGE = 4 / 3, 2 / 3, 1.008
"""The threshold rises if more than ``MORE k`` elements are kept, and is divided by ``NUDGE`` below ``FEWER k``."""
BINS = 64
"""Largest number of parts of a parameter in which selected elements are counted."""


def state_specs(layout: Layout) -> Mapping[str, StateSpec]:
    """Return the state: counts of selected elements, thresholds and clocks, the same on all ranks."""
    one = Layout.of((segment.name, (1,)) for segment in layout.segments)
    bins = Layout.of((segment.name, (min(BINS, segment.numel),)) for segment in layout.segments)
    return {"load": StateSpec(bins, "shared"), "threshold": StateSpec(one, "shared"), "clock": StateSpec(one, "shared")}


class Memory:
    """State between steps, for the sections of one group.

    It is kept by parameter, so that it follows changes of DistributedDataParallel's buckets and of the number of ranks:
    the number of selected elements in each of up to ``BINS`` parts of a parameter, the threshold of its section, and a
    clock.

    Args:
        sections: side by side.
        states: see ``state_specs``.
        device: of the vectors.
    """

    def __init__(self, sections: Sequence[Section], states: States, device: torch.device) -> None:
        self._states = states
        bins = {each.name: each.span for each in states["load"].layout.segments}
        ones = {each.name: each.offset for each in states["threshold"].layout.segments}
        edges, start = [0], 0
        slots: list[int] = []
        self._owners: list[list[int]] = []
        for section in sections:
            segments = [segment for segment in section.layout.segments if segment.numel]
            self._owners.append([ones[segment.name] for segment in segments])
            for segment in segments:
                span = bins[segment.name]
                count = span.stop - span.start
                edges += [start + segment.numel * (part + 1) // count for part in range(count)]
                slots += range(span.start, span.stop)
                start += segment.numel
        self._edges, self._slots = np.array(edges), torch.tensor(slots, dtype=torch.int64, device=device)
        every = [index for owners in self._owners for index in owners]
        self._all = torch.tensor(every, dtype=torch.int64, device=device)

    def clock(self) -> int:
        """Return the step counter, as ``tick`` has set it."""
        clocks = self._states["clock"].base()[self._all]
        return int(clocks.min()) if len(clocks) else 0

    def thresholds(self) -> list[float]:
        """Return the threshold of each section: the least of its parameters', which may come from other groups."""
        numbers = self._states["threshold"].base()
        return [float(numbers[owners].min()) if owners else 0.0 for owners in self._owners]

    def carry(self) -> None:
        """Copy the state of the last step to this step."""
        for state in self._states.values():
            state.pending.copy_(state.base())

    def tick(self, clock: int, thresholds: Sequence[float]) -> None:
        """Write clock and thresholds of the next step; call it after ``carry``."""
        self._states["clock"].pending[self._all] = float(clock)
        for owners, threshold in zip(self._owners, thresholds, strict=True):
            self._states["threshold"].pending[owners] = threshold

    def count(self, held: SparseVector) -> Tensor:
        """Return the number of entries in each part, float32."""
        cuts = held.cuts(self._edges.tolist())
        return torch.tensor(cuts, dtype=torch.float32, device=self._slots.device).diff()

    def weigh(self, counts: Tensor) -> None:
        """Write how many elements all ranks selected in each part; call it after ``carry``."""
        self._states["load"].pending[self._slots] = counts

    def bounds(self, ranks: int) -> list[int]:
        """Return the ``ranks + 1`` bounds of regions with equally many selected elements; see ``weigh``."""
        loads = self._states["load"].pending[self._slots].double().cpu().numpy()
        loads = np.clip(np.nan_to_num(loads), 0, 2.0**31)
        if not loads.sum():
            loads = np.diff(self._edges).astype(np.float64)
        reached = np.concatenate([[0.0], np.cumsum(loads)])
        wanted = reached[-1] * np.arange(1, ranks) / ranks
        inner = np.floor(np.interp(wanted, reached, self._edges)).astype(np.int64)
        return [0, *inner.tolist(), int(self._edges[-1])]


class OwnersPlan(ExchangePlan):
    """See ``OkTopK``.

    Its ``cost`` is that of a step with a reused threshold that keeps k sums, if ranks select independently.

    Args:
        sections: side by side.
        memory: the state.
        periods: steps between exact thresholds, and between choices of regions.
        world: the ranks.
    """

    description = "ok_topk"

    def __init__(self, sections: Sequence[Section], memory: Memory, periods: tuple[int, int], world: World) -> None:
        self._memory = memory
        self._evaluate, self._rebalance = periods
        collective, device, meter = world
        self._collective = collective
        self._meter = meter
        self._plan = MessagePlan(sections, device, meter)
        self._compact, self._left = Compact(sections, device), Compact(sections, device)
        self._whole = [keeps_all(section.codec) for section in sections]
        ends = [0, *accumulate(section.layout.numel for section in sections)]
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        numel = self._compact.numel
        self._own = new_messages(1, self._plan.size, device)
        self._sum = torch.zeros(numel, dtype=torch.float32, device=device)
        self._kept = torch.zeros(numel, dtype=torch.bool, device=device)
        self._most = _row_bytes(numel, numel) + aligned(coding.bitmap_bytes(numel))
        self._send, self._receive = Growing(device), Growing(device)
        size, count = collective.size, expected_count(sections, 1) / collective.size
        first, second = (_row_bytes(_most_of(count, each), -(-numel // size)) for each in (size * size, size))
        agreeing = all_reduce_bytes(LENGTH * (1 + len(sections)), size) + all_reduce_bytes(LENGTH, size)
        sent = (size - 1) * (first + second) + agreeing
        self.cost = Cost(bytes_sent=sent, rounds=4, encodes=1.0, decodes=3.0, calls=2)

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        """See ``ExchangePlan.average``."""
        rank, size = self._collective.rank, self._collective.size
        self._plan.share(key)
        self._plan.encode(vector, self._own[0], mix(key, rank), flag)
        self._plan.decode(self._own, out, 1.0, accumulate=False)
        room = self._compact.take(out)
        with self._meter.encode:
            held = SparseVector.of(room)
        clock, thresholds = self._memory.clock(), self._memory.thresholds()
        self._memory.carry()
        bounds = self._bounds(held, clock)
        exact = [whole or not each or clock % self._evaluate == 0 for each, whole in self._pairs(thresholds)]
        minimum = [0.0 if each else threshold for each, threshold in zip(exact, thresholds, strict=True)]
        kept, most = self._sums(held, bounds, minimum, flag)
        result, used, later = self._select(kept, most, exact, thresholds)
        period = math.lcm(self._evaluate, self._rebalance)
        self._memory.tick((clock + 1) % period, later)
        self._take_back(held, result, used, vector)
        spread(result, room)
        room.mul_(1 / size)
        self._compact.put(room, out)

    def _pairs(self, thresholds: Sequence[float]) -> list[tuple[float, bool]]:
        return list(zip(thresholds, self._whole, strict=True))

    def _bounds(self, held: SparseVector, clock: int) -> list[int]:
        """Return the bounds of the ranks' regions."""
        if clock % self._rebalance == 0:
            counts = self._memory.count(held)
            self._collective.all_reduce(counts)
            self._memory.weigh(counts)
        return self._memory.bounds(self._collective.size)

    def _sums(
        self, held: SparseVector, bounds: Sequence[int], minimum: Sequence[float], flag: Tensor
    ) -> tuple[SparseVector, list[int]]:
        """Return the sums that the owners keep, and the largest number that a rank selected of each section.

        Raises:
            ValueError: a rank cannot read a message; on every rank.
        """
        size, rank = self._collective.size, self._collective.rank
        cuts, inside = held.cuts(bounds), held.cuts(self._ends.tolist())
        edges = zip(pairwise(bounds), pairwise(cuts), strict=True)
        parts = [held.part(start, stop, first, last) for (start, stop), (first, last) in edges]
        used = max(_row_bytes(len(part.values), part.numel) for part in parts)
        width, *most = self._agree([used, *(last - first for first, last in pairwise(inside))])
        send, received = self._send.rows(size, max(width, used)), self._receive.rows(size, width)
        with self._meter.encode:
            for row, part in zip(send, parts, strict=True):
                row[:4].view(torch.float32)[0] = flag
                part.write(row[FLAG:])
        self._collective.all_to_all(send[:, :width].contiguous(), received)
        flag.copy_((flags_of(received) * 0.0).sum())
        error, own = DeferredError(), SparseVector(0, None, self._sum[:0])
        with error.deferred(), self._meter.decode:
            own = self._filter(self._add(received, bounds[rank + 1] - bounds[rank]), bounds[rank], minimum)
        error.mark(flag)
        used = _row_bytes(len(own.values), own.numel)
        width = longest(used, self._most, self._collective, flag.device)
        message, messages = self._send.rows(1, max(width, used))[0], self._receive.rows(size, width)
        message[:4].view(torch.float32)[0] = flag
        own.write(message[FLAG:])
        self._collective.all_gather(message[:width], messages)
        error.check(flags_of(messages).isinf().tolist())
        return self._read(messages, bounds, flag), most

    def _agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over the ranks.

        Raises:
            ValueError: a rank reports an impossible message size; on every rank.
        """
        found = torch.tensor(numbers, dtype=torch.int64, device=self._ends.device)
        self._collective.all_reduce(found, "max")
        width, *counts = found.tolist()
        if not FLAG <= width <= self._most or width % ALIGNMENT:
            raise ValueError(f"a rank reports a message of {width} bytes, which must be at most {self._most}")
        return [width, *(max(0, count) for count in counts)]

    def _add(self, received: Tensor, numel: int) -> Tensor:
        """Return the sums of this rank's region, added in the order of the ranks."""
        sums = self._sum[:numel].zero_()
        for row in received:
            SparseVector.read(row[FLAG:], numel).add_to(sums)
        return sums

    def _filter(self, sums: Tensor, start: int, minimum: Sequence[float]) -> SparseVector:
        """Return the sums that reach the threshold of their section."""
        held = SparseVector.of(sums)
        indices = held.listed
        least = torch.tensor(minimum, dtype=torch.float32, device=sums.device)[self._section_of(indices + start)]
        large = ~(held.values.abs() < least)  # NaN is kept, so that it is noticed
        if held.indices is None and bool(large.all()):
            return held
        return SparseVector(held.numel, indices[large], held.values[large])

    def _section_of(self, indices: Tensor) -> Tensor:
        return torch.searchsorted(self._ends[1:], indices, right=True)

    def _read(self, messages: Tensor, bounds: Sequence[int], flag: Tensor) -> SparseVector:
        flag.copy_((flags_of(messages) * 0.0).sum())
        edges = zip(pairwise(bounds), messages, strict=True)
        kept = joined([SparseVector.read(message[FLAG:], stop - start) for (start, stop), message in edges])
        if len(kept.values):
            lowest, highest = torch.aminmax(kept.values)
            flag.add_(lowest * 0.0 + highest * 0.0)
        return kept

    def _select(
        self, kept: SparseVector, most: Sequence[int], exact: Sequence[bool], thresholds: Sequence[float]
    ) -> tuple[SparseVector, list[float], list[float]]:
        """Return the sums to apply, the threshold of each section in this step, and in the next step."""
        cuts = kept.cuts(self._ends.tolist())
        chosen = torch.ones(len(kept.values), dtype=torch.bool, device=kept.values.device)
        used, later = [], []
        for number, (first, last) in enumerate(pairwise(cuts)):
            k, threshold = most[number], thresholds[number]
            if self._whole[number]:
                threshold = 0.0
            elif exact[number]:
                sizes = kept.values[first:last].abs()
                threshold = float(sizes.topk(k).values[-1]) if 0 < k < last - first else 0.0
                chosen[first:last] = ~(sizes < threshold)
            used.append(threshold)
            if not exact[number] and last - first > MORE * k > 0:  # the dropped ones are smaller
                threshold = float(kept.values[first:last].abs().topk(k).values[-1])
            elif not exact[number] and last - first < FEWER * k:
                threshold /= NUDGE
            later.append(threshold)
        if not bool(chosen.all()):
            kept = SparseVector(kept.numel, kept.listed[chosen], kept.values[chosen])
        return kept, used, later

    def _take_back(self, held: SparseVector, result: SparseVector, used: Sequence[float], vector: Tensor) -> None:
        """Add the elements that this rank sent but that were not applied back to its vector."""
        if result.indices is None or not any(used):
            return
        self._kept.zero_()[result.indices] = True
        indices = held.listed
        dropping = torch.tensor([each > 0 for each in used], dtype=torch.bool, device=vector.device)
        back = ~self._kept[indices] & dropping[self._section_of(indices)]
        left = self._left.take(vector)
        left.index_add_(0, indices[back], held.values[back])
        self._left.put(left, vector)


def _row_bytes(count: float, numel: int) -> int:
    return FLAG + aligned(int(coding.used_bytes(count, numel, exact=True)))


def _most_of(count: float, draws: int) -> float:
    """Return the expected maximum of ``draws`` independent counts with mean ``count``."""
    return count + math.sqrt(2 * count * math.log(draws)) if draws > 1 else count


@dataclass(frozen=True)
class OkTopK(Exchange):
    """Ranks send their selected elements all-to-all to owners of regions, which all-gather the largest sums.

    A rank sends about ``4 k (W - 1) / W`` words of four bytes, for any number of ranks and any overlap of their
    selections. k is the largest number that any rank selected of a section; about k sums of each section are kept. The
    threshold is exact in every ``evaluate_every``-th step, in which all sums are sent, and is reused in the steps
    between. If it kept more than 4 k / 3 sums, the next threshold is the k-th largest of these, which all ranks have
    (the authors raise it by 0.8 %, which is too slow while residuals still grow). If it kept fewer than 2 k / 3, the
    next one is 0.8 % lower.

    Regions are chosen every ``rebalance_every`` steps, so that ranks selected equally many elements in each, by counts
    in 64 parts of each parameter, summed over the ranks. (The authors average the ranks' own bounds.) Sections that are
    sent dense are kept as a whole.

    A rank adds an element that was not kept back to its residual, so that the sum over the ranks is exact. A method
    with its own momentum (``dgc``) resets it only where elements were applied. This is another algorithm than the sum
    of the selected elements; ``auto`` never chooses it. State, the same on all ranks: thresholds, counts and clocks, at
    most 66 numbers for each parameter.

    Args:
        evaluate_every: steps from one exact threshold to the next, 1 to 1000; the authors use 32.
        rebalance_every: steps from one choice of regions to the next, 1 to 1000; the authors use 64.

    Raises:
        ValueError: a value is out of range.
    """

    evaluate_every: int = 32
    rebalance_every: int = 64

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "rebalance_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1000:
                raise ValueError(f"OkTopK({name}={value!r}): it must be a number of steps from 1 to 1000")

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        check_selective("ok_topk", codec)
        check_fed_back("ok_topk", codec)

    @property
    def keeper(self) -> Keeper:
        """See ``Exchange``: of thresholds, counts and clocks."""
        return _Thresholds()

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        assert states is not None
        memory = Memory(sections, states, world.device)
        periods = (self.evaluate_every, self.rebalance_every)
        return OwnersPlan(sections, memory, periods, world)


class _Thresholds(Keeper):
    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        return state_specs(layout)

    def plan_dense(self, exchange: Exchange, sections: Sequence[Section], world: World, states: States) -> ExchangePlan:
        """See ``Keeper``: an all-reduce that carries the state along."""
        dense = [replace(section, method=Dense()) for section in sections]
        return _Remembering(AllReduce().plan(dense, world), Memory(sections, states, world.device))


class _Remembering(ExchangePlan):
    """Another exchange that leaves the state unchanged."""

    def __init__(self, inner: ExchangePlan, memory: Memory) -> None:
        self._inner, self._memory = inner, memory
        self.cost = inner.cost
        self.description, self.dense_spans = inner.description, inner.dense_spans

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        self._memory.carry()
        self._inner.mean(vector, out, key, flag)
