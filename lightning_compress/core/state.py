"""State in two buffers: committed by the last optimizer step, and pending in the current one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core.layout import Layout, Segment

Initial = Callable[[Segment], Tensor]
Holder = Literal["rank", "shared", "owner"]


@dataclass(frozen=True)
class Declared:
    """What a method keeps from step to step, besides the residual.

    Args:
        layout: float32 numbers of each parameter, by its name; as many as the method needs.
        holder: "rank" where every rank has its own, "shared" where all have the same, "owner" where every element is
            kept by the one rank that owns it and is 0 on the others.
        initial: the first numbers of a segment, ``[numel]``, the same on all ranks; zeros if None.
        dtype: in which they are kept, float32 or bfloat16; or uint8, the bytes of ``blocks.py``.
    """

    layout: Layout
    holder: Holder = "rank"
    initial: Initial | None = None
    dtype: torch.dtype = torch.float32


class State:
    """Numbers kept from step to step, for one group on this rank, in units of the unscaled gradient.

    The residual is one; methods declare others. A save at any moment sees a committed buffer: a commit replaces the
    reference.

    Args:
        layout: what the vector is made of.
        device: where it lives.
        initial: what a parameter's numbers are at first; zeros if None.
        holder: see ``Declared``.
        dtype: see ``Declared``.

    Attributes:
        committed: the numbers after the last optimizer step, ``[numel]``.
        pending: those of the current step, ``[numel]``; where any parameter is touched, the committed ones of all
            others.
        touched: names of the parameters whose ``pending`` numbers are not committed yet.
        resets: how often it began.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        initial: Initial | None = None,
        holder: Holder = "rank",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layout = layout
        self.holder = holder
        self._initial = initial
        self._fused = kernels.backend(__name__, device, "triton") if device.type != "meta" else None
        self.committed = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.pending = torch.zeros_like(self.committed)
        self.touched: set[str] = set()
        self.resets = 0
        self._looked: tuple[object, bool] = (None, False)
        self.reset()

    def base(self) -> Tensor:
        """The numbers that the next step starts from."""
        return self.pending if self.touched else self.committed

    @property
    def empty(self) -> bool:
        """Whether the next step starts from zeros; checked again only after numbers were written."""
        if self.touched or self.committed.device.type != "cpu":
            return False
        written = (self.committed.data_ptr(), self.committed._version)
        if self._looked[0] != written:
            self._looked = (written, self.committed.count_nonzero().item() == 0)
        return self._looked[1]

    def touch(self) -> None:
        """``pending`` was written."""
        self._looked = (None, False)
        self.touched.update(self.layout.names)

    def commit(self, rejected: Tensor, stepped: Collection[str], ended: Collection[str] = ()) -> None:
        """Commit the pending numbers of the parameters that were stepped.

        Args:
            rejected: bool scalar: a gradient was not finite, and the pending numbers are discarded instead.
            stepped: names of the optimizer's parameters.
            ended: names of those whose step has ended; where they were not stepped, the pending numbers are discarded.
        """
        if ours := self.touched.intersection(stepped):
            self.reject(rejected, ours)
            self._keep(ours & self.touched)
        if self.touched:
            self.discard(ended)

    def _keep(self, ours: set[str]) -> None:
        if not ours:
            return
        if len(ours) == len(self.layout.segments):
            self.committed, self.pending = self.pending, self.committed
        else:  # another optimizer has the rest, and may step it yet
            committed = self.committed.clone()
            for place in self._places(ours):
                committed[place] = self.pending[place]
            self.committed = committed
        self.touched -= ours

    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply what the last optimizer step left of the named parameters, but nothing that came since."""
        for segment in self.layout.segments:
            if segment.name in factors:
                committed, factor = self.committed[place_of(segment)], factors[segment.name]
                if self.touched:
                    self.pending[place_of(segment)].add_(committed, alpha=factor - 1)
                committed *= factor

    def decay(self, factor: float) -> None:
        """Multiply what the last optimizer step left of parameters that are not touched since, where others are."""
        for segment in self.layout.segments:
            if segment.name not in self.touched:
                self.pending[place_of(segment)] *= factor

    def reject(self, rejected: Tensor, names: Collection[str] | None = None) -> None:
        """Roll back if the bool scalar ``rejected`` is true; on an accelerator without waiting for its value.

        Args:
            rejected: whether to.
            names: of these parameters alone; None: of all.
        """
        fused = self._fused
        if not fused and rejected.device.type == "cpu":
            if rejected:
                self.discard(self.layout.names if names is None else names)
            return
        whole = names is None or set(names).issuperset(self.layout.names)
        for place in [slice(None)] if names is None or whole else self._places(names):
            pending, committed = self.pending[place], self.committed[place]
            if fused:
                fused.replace(rejected, pending, committed)
            else:
                torch.where(rejected, committed, pending, out=pending)

    def discard(self, names: Collection[str]) -> None:
        """Discard the pending numbers of these parameters."""
        ours = self.touched.intersection(names)
        self.touched -= ours
        if self.touched:
            for place in self._places(ours):
                self.pending[place] = self.committed[place]

    def roll_back(self) -> None:
        """Discard all pending numbers."""
        self.touched.clear()

    def reset(self) -> None:
        """Begin again."""
        self.resets += 1
        self.touched.clear()
        self.committed = torch.zeros_like(self.committed)
        if self._initial is not None:
            for segment in self.layout.segments:
                self.committed[place_of(segment)] = self._initial(segment).to(self.committed.device)
        self.pending.copy_(self.committed)

    def adopt(self, other: State, names: Collection[str]) -> None:
        """Copy the named parameters' numbers from a group with another layout."""
        targets = {segment.name: segment for segment in self.layout.segments}
        for segment in other.layout.segments:
            target = targets.get(segment.name)
            if segment.name in names and target is not None and target.numel == segment.numel:
                self.committed[place_of(target)] = other.committed[place_of(segment)]
                self.pending[place_of(target)] = other.base()[place_of(segment)]
                self.touched |= other.touched & {segment.name}
        for numbers in (other.committed, other.pending):
            if numbers.is_cuda:  # another stream may have made them, and would be given their memory back too soon
                numbers.record_stream(torch.cuda.current_stream(numbers.device))

    def _places(self, names: Collection[str]) -> list[slice]:
        return [place_of(segment) for segment in self.layout.segments if segment.name in names]


States = dict[str, State]
"""A group's, by what they hold."""


def place_of(segment: Segment) -> slice:
    """Where a segment stands in its vector."""
    return slice(segment.offset, segment.end)
