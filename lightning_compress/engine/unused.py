"""Parameters without a gradient on any rank: they are neither averaged nor changed.

A codec whose blocks cross the borders of parameters turns zeros into small numbers. And DistributedDataParallel
discards the mean of a parameter that no rank used, and with it what was sent of its residual. Both are undone here,
once all ranks know which parameters no rank used. To find out, an all-reduce runs in parallel with the exchange. It
sends one byte per parameter, and one per row of an embedding whose zeros would not stay zeros.
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
from lightning_compress.core.state import State
from lightning_compress.core.vector import Stage, Vector
from lightning_compress.exchanges.composite import EXCHANGE
from lightning_compress.exchanges.message import Section


@dataclass(frozen=True)
class Block:
    """A segment that is checked row by row; a parameter that is checked as a whole is one row.

    Attributes:
        segment: not empty.
        number: its index among the segments that are not empty.
        rows: number of rows.
    """

    segment: Segment
    number: int
    rows: int = 1

    def of(self, vector: Tensor) -> Tensor:
        """Return its rows in a vector, ``[rows, numel / rows]``."""
        return vector[self.segment.span].view(self.rows, -1)


class Unused(Stage):
    """Find what no rank uses in one group, just before the exchange, and remove it from the means.

    Where a method does not keep zeros, parameters and rows of embeddings that are zero on all ranks stay zero.

    Args:
        kept: parameters that may be without a gradient, and then keep their states.
        mixed: parameters of methods that do not keep zeros.
        states: of the group, by name.
        world: the ranks.
    """

    def __init__(
        self, kept: Sequence[Block], mixed: Sequence[Block], states: Mapping[str, State], world: World
    ) -> None:
        self.kept, self._mixed = list(kept), list(mixed)
        self._states = list(states.values())
        self._bases: list[tuple[State, Tensor]] = []
        self._owned = [state for name, state in states.items() if name.startswith(f"{EXCHANGE}.")]
        self._collective = world.collective
        self._mask = torch.ones(sum(block.rows for block in [*kept, *mixed]), dtype=torch.uint8, device=world.device)
        self._parts = self._mask.split([block.rows for block in [*kept, *mixed]])
        self.kept_parts, self._mixed_parts = self._parts[: len(kept)], self._parts[len(kept) :]
        self._earlier: list[tuple[Block, Tensor, Tensor]] = []  # means of an earlier pass
        self._wait: Callable[[], object] = lambda: None

    def remember(self, vector: Vector) -> None:
        """Remember the states before they change."""
        if self.kept:
            self._bases = [
                (state, state.base().clone() if state.touched else state.committed) for state in self._states
            ]

    def before(self, vector: Vector) -> None:
        """Start the all-reduce that tells other ranks what is used on this one."""
        if not self._looks(vector):
            return
        self._find_kept(vector)
        self._earlier = []
        for block, part in zip(self.kept, self.kept_parts, strict=True) if vector.left_out else ():
            if block.segment.name in vector.left_out:  # the mean of an earlier pass, which stays if no rank has more
                part.zero_()
                mean = vector.pieces[block.number].float()
                self._earlier.append((block, part, mean.clone() if vector.scale is None else mean / vector.scale))
        self._find(self._mixed, self._mixed_parts, vector.summands or (vector.made(),))
        self._wait = self._collective.begin("all_reduce", self._mask, "max")

    def after(self, vector: Vector) -> None:
        """Zero the means of what no rank uses, or keep earlier ones, and zero what encoding made of zeros."""
        if not self._looks(vector):
            return
        self._wait()
        self._clear(self.kept, self.kept_parts, vector, mixed=False)
        self._clear(self._mixed, self._mixed_parts, vector, mixed=True)
        for block, part, earlier in self._earlier:
            mean = vector.means[block.number]
            mean.copy_(torch.where(part == 0, earlier, mean))
        self._earlier = []

    def restore(self) -> None:
        """Restore the states of parameters without a gradient."""
        for state, base in self._bases:
            self._restore(state, base)
        self._bases = []

    def _find_kept(self, vector: Vector) -> None:
        """Record which parameters have a gradient on this rank, from the gradients before any stage."""
        for block, part in zip(self.kept, self.kept_parts, strict=True):
            piece = vector.pieces[block.number]
            if part.device.type == "cpu":  # the first element is mostly nonzero
                part.fill_(vector.sound or bool(piece[0] != 0) or bool(piece.any()))
            else:
                part.copy_(piece.any())

    def _looks(self, vector: Vector) -> bool:
        """Whether there is something to check; not if some ranks may average in place, for then none may check."""
        return bool(self.kept) or not vector.in_place

    def _find(self, blocks: Sequence[Block], parts: Sequence[Tensor], summands: Sequence[Tensor]) -> None:
        """Write 0 where all summands are zero, and 1 elsewhere."""
        for block, part in zip(blocks, parts, strict=True):
            terms = [block.of(summand) for summand in summands]
            if block.rows > 1 or part.device.type != "cpu":
                part.copy_(torch.stack([(rows.amax(1) != 0) | (rows.amin(1) != 0) for rows in terms]).any(0))
            else:  # the first element is mostly nonzero
                part.fill_(any(bool(rows[0, 0] != 0) or bool(rows.any()) for rows in terms))

    def _clear(self, blocks: Sequence[Block], parts: Sequence[Tensor], vector: Vector, mixed: bool) -> None:
        """Zero the means of what no rank uses.

        Args:
            blocks: to check.
            parts: of each block, 0 where a row is unused.
            vector: its means are changed.
            mixed: also zero these rows in what was not sent, and restore the owners' states.
        """
        for block, part, unused in _unused(blocks, parts):
            targets = [vector.means[block.number].view(block.rows, -1), *([block.of(vector.made())] if mixed else [])]
            for rows in targets:
                if unused is None:
                    rows.masked_fill_((part == 0).unsqueeze(1), 0.0)
                else:
                    rows.index_fill_(0, unused, 0.0)
            for state in self._stale() if mixed else ():
                new, old = block.of(state.pending), block.of(state.committed)
                new.copy_(torch.where((part == 0).unsqueeze(1), old, new))

    def _stale(self) -> list[State]:
        """Return the states of shard owners, in a step's first pass."""
        return [state for state in self._owned if not state.touched]

    def _restore(self, state: State, base: Tensor) -> None:
        places = {segment.name: segment.span for segment in state.layout.segments}
        for block, part, _ in _unused(self.kept, self.kept_parts):
            if place := places.get(block.segment.name):
                state.pending[place] = torch.where(part == 0, base[place], state.pending[place])


def _unused(blocks: Sequence[Block], parts: Sequence[Tensor]) -> Iterator[tuple[Block, Tensor, Tensor | None]]:
    """Yield each block with unused rows, and their indices.

    On an accelerator, yield all blocks and None, so as not to wait for the device.
    """
    for block, part in zip(blocks, parts, strict=True):
        if part.device.type != "cpu":
            yield block, part, None
        elif len(rows := (part == 0).nonzero().flatten()):
            yield block, part, rows


class FusedUnused(Unused):
    """``Unused`` for accelerators: one launch for all blocks, which skips what is used.

    Args:
        kernel: ``unused_triton.py``.
        kept, mixed, states, world: see ``Unused``.
    """

    def __init__(
        self,
        kernel: ModuleType,
        kept: Sequence[Block],
        mixed: Sequence[Block],
        states: Mapping[str, State],
        world: World,
    ) -> None:
        super().__init__(kept, mixed, states, world)
        self._kernel, self._device = kernel, world.device
        self._tables = {id(blocks): self._table(blocks) for blocks in (self.kept, self._mixed)}
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
        count = sum(block.rows for block in self.kept)
        return self._mask[:count] if blocks is self.kept else self._mask[count:]

    def remember(self, vector: Vector) -> None:
        """Remember the states, and check the gradients: a correction would change the vector that the kernel reads."""
        super().remember(vector)
        if self.kept:
            self._find(self.kept, self.kept_parts, (vector.whole(),))

    def _find_kept(self, vector: Vector) -> None:
        """Skip: ``remember`` did it."""

    def _find(self, blocks: Sequence[Block], parts: Sequence[Tensor], summands: Sequence[Tensor]) -> None:
        self._kernel.find_used(self._tables[id(blocks)], self._masks(blocks).zero_(), *summands)

    def _clear(self, blocks: Sequence[Block], parts: Sequence[Tensor], vector: Vector, mixed: bool) -> None:
        if vector.mean is None:  # in Triton's interpreter, on a CPU
            super()._clear(blocks, parts, vector, mixed)
            return
        table, used = self._tables[id(blocks)], self._masks(blocks)
        self._kernel.zero_unused(table, used, *((vector.mean, vector.made()) if mixed else (vector.mean,)))
        for state in self._stale() if mixed else ():
            self._kernel.restore_unused(table, used, state.pending, state.committed)

    def _restore(self, state: State, base: Tensor) -> None:
        if id(state) not in self._places:
            numbers = {block.segment.name: number for number, block in enumerate(self.kept)}
            rows = [
                (numbers[each.name], each.offset, each.end) for each in state.layout.segments if each.name in numbers
            ]
            self._places[id(state)] = self._kernel.table(rows, self._device)
        self._kernel.restore_unused(self._places[id(state)], self._masks(self.kept), state.pending, base)


class KeptStates(Stage):
    """Parameters without a gradient on any rank keep all of their states.

    Args:
        unused: finds these parameters.
    """

    def __init__(self, unused: Unused) -> None:
        self._unused = unused

    def before(self, vector: Vector) -> None:
        """See ``Stage``."""
        self._unused.remember(vector)

    def after(self, vector: Vector) -> None:
        """See ``Stage``."""
        self._unused.restore()


def plan_unused(
    sections: Sequence[Section],
    segments: Sequence[Segment],
    embeddings: Collection[str],
    states: Mapping[str, State],
    world: World,
    unused: bool,
) -> Unused | None:
    """Plan the checks for vectors of these segments.

    Args:
        sections: of the vector.
        segments: those that are not empty.
        embeddings: names of parameters that are checked row by row.
        states: of the group, by name.
        world: the ranks.
        unused: parameters may be without a gradient.

    Returns:
        None if zeros stay zeros and no state has to be kept.
    """
    mixing = {name for section in sections if not section.method.keeps_zeros for name in section.layout.names}
    kept = [Block(segment, number) for number, segment in enumerate(segments)] if unused and states else []
    mixed = [
        Block(segment, number, segment.shape[0] if segment.name in embeddings else 1)
        for number, segment in enumerate(segments)
        if segment.name in mixing
    ]
    if not kept and not mixed:
        return None
    fused = kernels.backend(__name__, world.device)
    return FusedUnused(fused, kept, mixed, states, world) if fused else Unused(kept, mixed, states, world)
