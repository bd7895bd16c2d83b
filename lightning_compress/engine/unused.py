"""Parameters without a gradient on any rank: they are neither averaged nor changed.

A codec whose blocks cross the borders of parameters turns zeros into small numbers. And DistributedDataParallel
discards the mean of a parameter that no rank used, and with it what was sent of its residual. Both are undone here,
once all ranks know which parameters no rank used. To find out, messages have a bit per parameter, and one per row of an
embedding whose zeros would not stay zeros. Where no message reaches all ranks as it was sent, because ranks sum them on
the way, an all-reduce of a byte each runs in parallel with the exchange.
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
from lightning_compress.core.told import Rows
from lightning_compress.core.vector import Stage, Vector
from lightning_compress.exchanges.composite import EXCHANGE
from lightning_compress.exchanges.head import Marks
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

    Attributes:
        late: whoever writes the means reads in the messages what is unused; see ``Told``.
    """

    late = False

    def __init__(
        self, kept: Sequence[Block], mixed: Sequence[Block], states: Mapping[str, State], world: World
    ) -> None:
        self.kept, self._mixed = list(kept), list(mixed)
        self._states = list(states.values())
        self._bases: list[tuple[State, Tensor]] = []
        self._owned = [state for name, state in states.items() if name.startswith(f"{EXCHANGE}.")]
        self._collective = world.collective
        rows: dict[str, list[tuple[int, int]]] = {}
        sizes = [block.rows for block in [*kept, *mixed]]
        for block, first in zip([*kept, *mixed], accumulate(sizes, initial=0), strict=False):
            rows.setdefault(block.segment.name, []).append((first, block.rows))
        masks = torch.zeros(2, sum(sizes), dtype=torch.uint8, device=world.device)
        self.marks = Marks(rows, *masks)
        self._kept_rows = sum(sizes[: len(kept)])
        self._earlier: list[tuple[Block, Tensor]] = []  # means of an earlier pass
        self._wait: Callable[[], object] = lambda: None

    def _masks(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of a mask for kept and for mixed blocks."""
        return mask[: self._kept_rows], mask[self._kept_rows :]

    def _found(self, vector: Vector) -> Tensor:
        """Return where rows of this rank are marked; all ranks' rows are added to it, or the exchange sends it."""
        return self.marks.own if vector.marked else self.marks.any_rank

    def remember(self, vector: Vector) -> None:
        """Remember the states before they change."""
        if self.kept:
            self._bases = [
                (state, state.base().clone() if state.touched else state.committed) for state in self._states
            ]

    def before(self, vector: Vector) -> None:
        """Find what is used on this rank, and tell other ranks."""
        if not self._looks(vector):
            return
        kept, mixed = self._masks(self._found(vector))
        self._find_kept(kept, vector)
        self._earlier = []
        for block, part in zip(self.kept, _split(kept, self.kept), strict=True) if vector.left_out else ():
            if block.segment.name in vector.left_out:  # the mean of an earlier pass, which stays if no rank has more
                part.zero_()
                mean = vector.pieces[block.number].float()
                self._earlier.append((block, mean.clone() if vector.scale is None else mean / vector.scale))
        if vector.source is None:
            vector.send()
        if vector.opening:  # these were found while the gradients were copied
            return
        self._find(self._mixed, mixed, vector)
        self._share(vector)

    def _share(self, vector: Vector) -> None:
        """Tell other ranks what is used on this one, unless the exchange does."""
        if vector.marked:
            self.marks.any_rank.copy_(self.marks.own)
            self._wait = lambda: None
        else:
            self._wait = self._collective.begin("all_reduce", self.marks.any_rank, "max")

    def after(self, vector: Vector) -> None:
        """Zero the means of what no rank uses, or keep earlier ones, and zero what encoding made of zeros."""
        if not self._looks(vector):
            return
        self._wait()
        kept, mixed = self._masks(self.marks.any_rank)
        self._clear(self.kept, kept, vector, mixed=False)
        self._clear(self._mixed, mixed, vector, mixed=True)
        for block, earlier in self._earlier:
            mean, used = vector.means[block.number], kept[self.kept.index(block)]
            mean.copy_(torch.where(used == 0, earlier, mean))
        self._earlier = []

    def restore(self) -> None:
        """Restore the states of parameters without a gradient."""
        for state, base in self._bases:
            self._restore(state, base)
        self._bases = []

    def _find_kept(self, mask: Tensor, vector: Vector) -> None:
        """Record which parameters have a gradient on this rank, from the gradients before any stage."""
        for block, part in zip(self.kept, _split(mask, self.kept), strict=True):
            piece = vector.pieces[block.number]
            if part.device.type == "cpu":  # the first element is mostly nonzero
                part.fill_(bool(piece[0] != 0) or bool(piece.any()))
            else:
                part.copy_(piece.any())

    def _looks(self, vector: Vector) -> bool:
        """Whether there is something to check; not if some ranks may average in place, for then none may check."""
        return bool(self.kept) or not vector.in_place

    def _find(self, blocks: Sequence[Block], mask: Tensor, vector: Vector) -> None:
        """Write 0 where what is sent is zero, and 1 elsewhere."""
        for block, part in zip(blocks, _split(mask, blocks), strict=True):
            terms = [term.view(block.rows, -1) for term in vector.terms(block.number, block.segment.span)]
            if block.rows > 1 or part.device.type != "cpu":
                part.copy_(torch.stack([(rows.amax(1) != 0) | (rows.amin(1) != 0) for rows in terms]).any(0))
            else:  # the first element is mostly nonzero
                part.fill_(any(bool(rows[0, 0] != 0) or bool(rows.any()) for rows in terms))

    def _clear(self, blocks: Sequence[Block], mask: Tensor, vector: Vector, mixed: bool) -> None:
        """Zero the means of what no rank uses.

        Args:
            blocks: to check.
            mask: of all their rows, 0 where one is unused.
            vector: its means are changed.
            mixed: also zero these rows in what was not sent, and restore the owners' states.
        """
        for block, part, unused in _unused(blocks, mask):
            targets = [vector.means[block.number].view(block.rows, -1)]
            targets += [block.of(vector.rest)] * (mixed and bool(self._states))
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
        for block, part, _ in _unused(self.kept, self._masks(self.marks.any_rank)[0]):
            if place := places.get(block.segment.name):
                state.pending[place] = torch.where(part == 0, base[place], state.pending[place])


def _split(mask: Tensor, blocks: Sequence[Block]) -> Sequence[Tensor]:
    return mask.split([block.rows for block in blocks]) if blocks else ()


def _unused(blocks: Sequence[Block], mask: Tensor) -> Iterator[tuple[Block, Tensor, Tensor | None]]:
    """Yield each block with unused rows, and their indices.

    On an accelerator, yield all blocks and None, so as not to wait for the device.
    """
    for block, part in zip(blocks, _split(mask, blocks), strict=True):
        if part.device.type != "cpu":
            yield block, part, None
        elif len(rows := (part == 0).nonzero().flatten()):
            yield block, part, rows


class FusedUnused(Unused):
    """``Unused`` for accelerators: one launch for all blocks, which skips what is used.

    Args:
        kernel: ``unused_triton.py``.
        kept, mixed, states, world: see ``Unused``.
        late: whatever needs to know what is unused can read it in the messages.
    """

    def __init__(
        self,
        kernel: ModuleType,
        kept: Sequence[Block],
        mixed: Sequence[Block],
        states: Mapping[str, State],
        world: World,
        late: bool,
    ) -> None:
        super().__init__(kept, mixed, states, world)
        self._kernel, self._device = kernel, world.device
        self._tables = {id(blocks): self._table(blocks) for blocks in (self.kept, self._mixed)}
        self._places: dict[int, Tensor] = {}
        # rows of embeddings would be looked up in all messages, element by element
        self.late = late and all(block.rows == 1 for block in mixed)

    def phase(self, step: int) -> tuple[()]:
        """See ``Stage``."""
        return ()

    def _table(self, blocks: Sequence[Block]) -> Tensor:
        numbers = accumulate((block.rows for block in blocks), initial=0)
        rows = [
            (number + row, block.segment.offset + row * width, block.segment.offset + (row + 1) * width)
            for number, block in zip(numbers, blocks, strict=False)
            for row, width in ((row, block.segment.numel // block.rows) for row in range(block.rows))
        ]
        return self._kernel.table(rows, self._device)  # type: ignore[no-any-return]

    def _later(self, vector: Vector) -> bool:
        """Whether whoever writes the means does the rest, in this pass.

        What has no gradient on this rank was then found where the gradients were copied.
        """
        return self.late and (vector.opening is not None or not self.kept)

    def _rows(self, pieces: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return for each piece the index of its first row in the mask, if its block is mixed, and how many it has."""
        rows, first = [(0, 0)] * pieces, self._kept_rows
        for block in self._mixed:
            rows[block.number] = first, block.rows
            first += block.rows
        firsts, counts = zip(*rows, strict=True)
        return firsts, counts

    def rows_of(self, pieces: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the rows of each piece in the mask, or -1, if none has several: if it is kept, and if it is mixed."""
        mixed = tuple(first if count else -1 for first, count in zip(*self._rows(pieces), strict=True))
        return self._kept(pieces), mixed

    def _kept(self, pieces: int) -> tuple[int, ...]:
        """Return the row of each piece that may keep its states; -1 for none."""
        return tuple(range(pieces)) if self.kept else (-1,) * pieces

    def remember(self, vector: Vector) -> None:
        """Remember the states, and check the gradients: a correction would change the vector that the kernel reads."""
        if self._later(vector):
            return
        super().remember(vector)
        if self.kept:
            self._find_in(self.kept, self._masks(self._found(vector))[0], (vector.whole(),), vector)

    def _find_kept(self, mask: Tensor, vector: Vector) -> None:
        """Skip: ``remember`` did it."""

    def _find(self, blocks: Sequence[Block], mask: Tensor, vector: Vector) -> None:
        assert vector.source
        self._find_in(blocks, mask, vector.source.terms(slice(None)), vector)

    def _find_in(self, blocks: Sequence[Block], mask: Tensor, terms: Sequence[Tensor], vector: Vector) -> None:
        if not vector.marked:  # else the exchange left zeros; see ``Marks``
            mask.zero_()
        self._kernel.find_used(self._tables[id(blocks)], mask, *terms)

    def _share(self, vector: Vector) -> None:
        if not vector.marked:
            super()._share(vector)

    def _clear(self, blocks: Sequence[Block], mask: Tensor, vector: Vector, mixed: bool) -> None:
        if vector.mean is None:  # in Triton's interpreter, on a CPU
            super()._clear(blocks, mask, vector, mixed)
            return
        table = self._tables[id(blocks)]
        if (self._later(vector) or not self._states) and vector.fused and vector.memory.bucket:
            # whoever writes the means zeroes these, and LoCo takes what was not sent of them for zeros
            if mixed:
                pieces = len(vector.pieces)
                rests = ((each.pending, each.committed) for each in self._states if each.pending is vector.rest)
                rows, used = self._rows(pieces), self.marks.any_rank
                vector.rows = Rows(*rows, used, self._kept(pieces), *next(rests, (None, None)))
            return
        targets = (vector.mean, vector.rest) if mixed and self._states else (vector.mean,)
        self._kernel.zero_unused(table, mask, *targets)
        for state in self._stale() if mixed else ():
            self._kernel.restore_unused(table, mask, state.pending, state.committed)

    def _restore(self, state: State, base: Tensor) -> None:
        if id(state) not in self._places:
            numbers = {block.segment.name: number for number, block in enumerate(self.kept)}
            rows = [
                (numbers[each.name], each.offset, each.end) for each in state.layout.segments if each.name in numbers
            ]
            self._places[id(state)] = self._kernel.table(rows, self._device)
        mask, _ = self._masks(self.marks.any_rank)
        self._kernel.restore_unused(self._places[id(state)], mask, state.pending, base)


class KeptStates(Stage):
    """Parameters without a gradient on any rank keep all of their states.

    Args:
        unused: finds these parameters.
    """

    def __init__(self, unused: Unused) -> None:
        self._unused = unused

    def phase(self, step: int) -> tuple[()]:
        """See ``Stage``."""
        return ()

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
    late: bool,
) -> Unused | None:
    """Plan the checks for vectors of these segments.

    Args:
        sections: of the vector.
        segments: those that are not empty.
        embeddings: names of parameters that are checked row by row.
        states: of the group, by name.
        world: the ranks.
        unused: parameters may be without a gradient.
        late: see ``FusedUnused``.

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
    return FusedUnused(fused, kept, mixed, states, world, late) if fused else Unused(kept, mixed, states, world)
