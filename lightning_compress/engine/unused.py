"""What no rank has a gradient for: it is neither averaged nor changed.

A codec whose blocks cross the borders of parameters turns zeros into small numbers. DistributedDataParallel throws the
mean of a parameter away that no rank used, and with it what was sent of its residual. Both are taken back here, once
all ranks know what none of them uses: one byte for each parameter, and for each row of an embedding whose zeros would
not stay zeros, in an all-reduce that goes on beside the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.collectives import World
from lightning_compress.core.layout import Segment
from lightning_compress.core.state import State, place_of
from lightning_compress.exchanges.composite import EXCHANGE
from lightning_compress.exchanges.message import Section

Means = Tensor | Sequence[Tensor]
"""A mean of the whole vector, or one of each segment that is not empty."""


@dataclass(frozen=True)
class Block:
    """A segment that is looked at row by row; a parameter as a whole is one row.

    Attributes:
        segment: not empty.
        number: its place among the segments that are not empty.
        rows: how many rows it has.
    """

    segment: Segment
    number: int
    rows: int = 1

    def of(self, vector: Tensor) -> Tensor:
        """Its rows, ``[rows, numel / rows]``."""
        return vector[place_of(self.segment)].view(self.rows, -1)


class Unused:
    """Finds what no rank uses, for one group.

    Parameters without a gradient on any rank keep all of their state; these are looked for where there may be any.
    Parameters, and rows of embeddings, of methods that do not keep zeros stay zero where gradient plus residual is
    zero on all ranks.

    Args:
        kept: parameters that may be without a gradient, and keep their state then.
        mixed: those of methods that do not keep zeros.
        states: of the group, by name.
        residual: one of them, or None: what encoding leaves.
        world: the ranks.
    """

    def __init__(
        self,
        kept: Sequence[Block],
        mixed: Sequence[Block],
        states: Mapping[str, State],
        residual: State | None,
        world: World,
    ) -> None:
        self._kept, self._mixed, self._residual = list(kept), list(mixed), residual
        self._states = [state for state in states.values() if state is not residual]
        self._owned = [state for name, state in states.items() if name.startswith(f"{EXCHANGE}.")]
        self._collective = world.collective
        self._mask = torch.ones(sum(block.rows for block in [*kept, *mixed]), dtype=torch.uint8, device=world.device)
        self._parts = self._mask.split([block.rows for block in [*kept, *mixed]])
        self._bases: list[tuple[State, Tensor]] = []
        self._given: list[tuple[Block, Tensor, Tensor]] = []
        self._wait: Callable[[], object] = lambda: None

    @property
    def keeps(self) -> bool:
        """Whether parameters may be without a gradient, and keep their state then."""
        return bool(self._kept)

    def look(self, gradient: Tensor | None, left_out: Collection[str] = frozenset()) -> None:
        """Note which parameters have a gradient on this rank.

        Args:
            gradient: float32 ``[numel]``; None: all have one.
            left_out: parameters for which it is the mean of an earlier pass of the step, which stays where no rank has
                more.
        """
        self._mask.fill_(1)
        self._bases, self._given = [], []
        if gradient is None or not self._kept:
            return
        self._find(self._kept, self._parts[: len(self._kept)], [gradient])
        for block, part in zip(self._kept, self._parts, strict=False):
            if block.segment.name in left_out:
                part.zero_()
                self._given.append((block, part, block.of(gradient).clone()))
        everything = [*self._states] if self._residual is None else [*self._states, self._residual]
        self._bases = [(state, state.base().clone() if state.touched else state.committed) for state in everything]

    def begin(self, *summands: Tensor) -> None:
        """Tell the other ranks, before the sum of ``summands``, float32 ``[numel]`` each, is averaged."""
        self._find(self._mixed, self._parts[len(self._kept) :], summands)
        self._wait = self._collective.begin_all_reduce_max(self._mask)

    def clear(self, vector: Tensor, mean: Means) -> None:
        """Zero what no rank uses in the mean, or leave it as given, and what encoding made of zeros in the vector."""
        self._wait()
        self._clear(self._kept, self._parts[: len(self._kept)], [mean])
        stale = [(state.pending, state.committed) for state in self._owned if not state.touched]
        self._clear(self._mixed, self._parts[len(self._kept) :], [mean, vector], stale)
        for block, part, given in self._given:
            assert isinstance(mean, Tensor)
            block.of(mean).copy_(torch.where(part == 0, given, block.of(mean)))
        self._given = []

    def restore(self, vector: Tensor) -> None:
        """Put back what is kept of parameters without a gradient; ``vector`` is the new residual."""
        for state, base in self._bases:
            self._restore(state, base, vector if state is self._residual else state.pending)
        self._bases = []

    def _find(self, blocks: Sequence[Block], parts: Sequence[Tensor], summands: Sequence[Tensor]) -> None:
        """Write 0 where all summands are zero, and 1 elsewhere."""
        for block, part in zip(blocks, parts, strict=True):
            rows = [block.of(each) for each in summands]
            if block.rows > 1 or part.device.type != "cpu":
                part.copy_(torch.stack([(each.amax(1) != 0) | (each.amin(1) != 0) for each in rows]).any(0))
            else:  # most begin with a number
                part.fill_(any(bool(each[0, 0] != 0) or bool(each.any()) for each in rows))

    def _clear(
        self,
        blocks: Sequence[Block],
        parts: Sequence[Tensor],
        targets: Sequence[Means],
        stale: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        for block, part, unused in _unused(blocks, parts):
            for target in targets:
                rows = block.of(target) if isinstance(target, Tensor) else target[block.number].view(block.rows, -1)
                if unused is None:
                    rows.masked_fill_((part == 0).unsqueeze(1), 0.0)
                else:
                    rows.index_fill_(0, unused, 0.0)
            for new, old in stale:
                block.of(new).copy_(torch.where((part == 0).unsqueeze(1), block.of(old), block.of(new)))

    def _restore(self, state: State, base: Tensor, target: Tensor) -> None:
        places = {segment.name: place_of(segment) for segment in state.layout.segments}
        for block, part, _ in _unused(self._kept, self._parts[: len(self._kept)]):
            if place := places.get(block.segment.name):
                target[place] = torch.where(part == 0, base[place].to(target.dtype), target[place])


def _unused(blocks: Sequence[Block], parts: Sequence[Tensor]) -> Iterator[tuple[Block, Tensor, Tensor | None]]:
    """Blocks of which something is unused, and which rows; on an accelerator all blocks, and None: nothing waits."""
    for block, part in zip(blocks, parts, strict=True):
        if part.device.type != "cpu":
            yield block, part, None
        elif len(rows := (part == 0).nonzero().flatten()):
            yield block, part, rows


class FusedUnused(Unused):
    """The same on an accelerator, in a launch for all blocks, which leaves alone what is used.

    Args:
        kernel: ``unused_triton.py``.
        kept, mixed, states, residual, world: see ``Unused``.
    """

    def __init__(
        self,
        kernel: ModuleType,
        kept: Sequence[Block],
        mixed: Sequence[Block],
        states: Mapping[str, State],
        residual: State | None,
        world: World,
    ) -> None:
        super().__init__(kept, mixed, states, residual, world)
        self._kernel, self._device = kernel, world.device
        self._tables = {id(blocks): self._table(blocks) for blocks in (self._kept, self._mixed)}
        self._places: dict[int, Tensor] = {}

    def _table(self, blocks: Sequence[Block]) -> Tensor:
        numbers = accumulate((block.rows for block in blocks), initial=0)
        rows = [
            (number + row, block.segment.offset + row * width, block.segment.offset + (row + 1) * width)
            for number, block in zip(numbers, blocks, strict=False)
            for row, width in ((row, block.segment.numel // block.rows) for row in range(block.rows))
        ]
        return self._kernel.table(rows, self._device)  # type: ignore[no-any-return]

    def _masks(self, blocks: Sequence[Block]) -> Tensor:
        count = sum(block.rows for block in self._kept)
        return self._mask[:count] if blocks is self._kept else self._mask[count:]

    def _find(self, blocks: Sequence[Block], parts: Sequence[Tensor], summands: Sequence[Tensor]) -> None:
        used = self._masks(blocks).zero_()
        for each in summands:
            self._kernel.find_used(self._tables[id(blocks)], each, used)

    def _clear(
        self,
        blocks: Sequence[Block],
        parts: Sequence[Tensor],
        targets: Sequence[Means],
        stale: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        table, used = self._tables[id(blocks)], self._masks(blocks)
        for target in targets:
            assert isinstance(target, Tensor)
            self._kernel.zero_unused(table, used, target)
        for new, old in stale:
            self._kernel.restore_unused(table, used, new, old)

    def _restore(self, state: State, base: Tensor, target: Tensor) -> None:
        if id(state) not in self._places:
            numbers = {block.segment.name: number for number, block in enumerate(self._kept)}
            rows = [
                (numbers[each.name], each.offset, each.end) for each in state.layout.segments if each.name in numbers
            ]
            self._places[id(state)] = self._kernel.table(rows, self._device)
        self._kernel.restore_unused(self._places[id(state)], self._masks(self._kept), target, base)


def plan_unused(
    sections: Sequence[Section],
    segments: Sequence[Segment],
    embeddings: Collection[str],
    states: Mapping[str, State],
    residual: State | None,
    world: World,
    unused: bool,
) -> Unused | None:
    """Make ready for vectors of these segments.

    Args:
        sections: what the vector consists of.
        segments: those that are not empty.
        embeddings: names of parameters that are looked at by rows.
        states: of the group, by name.
        residual: one of them, or None.
        world: the ranks.
        unused: parameters may be without a gradient.

    Returns:
        None where zeros stay zeros and nothing is kept.
    """
    mixing = [each for each in sections if not each.method.keeps_zeros]
    places = {name for each in mixing for name in each.layout.names}
    kept = [Block(each, number) for number, each in enumerate(segments)] if unused and states else []
    mixed = [
        Block(each, number, each.shape[0] if each.name in embeddings else 1)
        for number, each in enumerate(segments)
        if each.name in places
    ]
    if not kept and not mixed:
        return None
    fused = kernels.backend(__name__, world.device)
    given = kept, mixed, states, residual, world
    return FusedUnused(fused, *given) if fused else Unused(*given)
