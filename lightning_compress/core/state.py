"""State in two buffers: committed by the last optimizer step, and pending in the current step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.kernels import program

Initial = Callable[[Segment], Tensor]
Holder = Literal["rank", "shared", "owner"]


@dataclass(frozen=True)
class StateSpec:
    """What a method keeps from step to step, besides the residual.

    Args:
        layout: the values of each parameter, by its name; any number of values per parameter.
        holder: "rank" if every rank has its own values, "shared" if they are equal on all ranks, "owner" if one rank
            owns each element and it is 0 on all others.
        initial: returns the first values of a segment, ``[numel]``, the same on all ranks; None: zeros.
        dtype: float32 or bfloat16; or uint8, for values coded by ``blocks.py``.
    """

    layout: Layout
    holder: Holder = "rank"
    initial: Initial | None = None
    dtype: torch.dtype = torch.float32


class State:
    """Values kept from step to step for one group on this rank, in units of the unscaled gradient.

    The residual is one such state; methods declare others. A save at any moment finds a committed buffer, because a
    commit swaps references.

    Args:
        layout: of the vector.
        device: of the buffers.
        initial: see ``StateSpec``.
        holder: see ``StateSpec``.
        dtype: see ``StateSpec``.

    Attributes:
        committed: values after the last optimizer step, ``[numel]``.
        pending: values of the current step, ``[numel]``. If any parameter is touched, it holds the committed values of
            all others.
        touched: names of the parameters whose ``pending`` values are not committed yet.
        resets: number of resets so far, including the first initialisation.
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
        self._fused = kernels.backend(__name__, device, "triton")
        self.committed = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.pending = torch.zeros_like(self.committed)
        self.touched: set[str] = set()
        self.resets = 0
        self._looked: tuple[object, bool] = (None, False)
        self.reset()

    def base(self) -> Tensor:
        """Return the values that the next step starts from."""
        return self.pending if self.touched else self.committed

    @property
    def empty(self) -> bool:
        """Whether the next step starts from zeros; always False on accelerators.

        The values are counted only after they were written.
        """
        if self.touched or self.committed.device.type != "cpu":
            return False
        written = (self.committed.data_ptr(), self.committed._version)
        if self._looked[0] != written:
            self._looked = (written, self.committed.count_nonzero().item() == 0)
        return self._looked[1]

    def touch(self) -> None:
        """Mark ``pending`` as written."""
        if tape := program.here.tape:
            tape.add(self.touch, [])
        self._looked = (None, False)
        self.touched.update(self.layout.names)

    def commit(self, rejected: Tensor, stepped: Collection[str], ended: Collection[str] = ()) -> None:
        """Commit the pending values of the parameters that were stepped.

        Args:
            rejected: bool scalar: a gradient was not finite, so discard the pending values instead.
            stepped: names of the optimizer's parameters.
            ended: names of parameters whose step has ended; if they were not stepped, their pending values are
                discarded.
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
        else:  # another optimizer owns the other parameters, and may step them later
            committed = self.committed.clone()
            for place in self._places(ours):
                committed[place] = self.pending[place]
            self.committed = committed
        self.touched -= ours

    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply the committed values of the named parameters, but nothing that was added since."""
        for segment in self.layout.segments:
            if segment.name in factors:
                committed, factor = self.committed[segment.span], factors[segment.name]
                if self.touched:
                    self.pending[segment.span].add_(committed, alpha=factor - 1)
                committed *= factor

    def decay(self, factor: float) -> None:
        """Multiply the values of untouched parameters in ``pending``; call it only while others are touched."""
        for segment in self.layout.segments:
            if segment.name not in self.touched:
                self.pending[segment.span] *= factor

    def reject(self, rejected: Tensor, names: Collection[str] | None = None) -> None:
        """Discard pending values if ``rejected`` is true; on an accelerator without waiting for its value.

        Args:
            rejected: bool scalar.
            names: of the parameters; None: all.
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
        """Discard the pending values of these parameters."""
        ours = self.touched.intersection(names)
        self.touched -= ours
        if self.touched:
            for place in self._places(ours):
                self.pending[place] = self.committed[place]

    def roll_back(self) -> None:
        """Discard all pending values."""
        self.touched.clear()

    def reset(self) -> None:
        """Initialise the values again."""
        self.resets += 1
        self.touched.clear()
        self.committed = torch.zeros_like(self.committed)
        if self._initial is not None:
            for segment in self.layout.segments:
                self.committed[segment.span] = self._initial(segment).to(self.committed.device)
        self.pending.copy_(self.committed)

    def adopt(self, other: State, names: Collection[str]) -> None:
        """Copy the named parameters' values from a state with another layout."""
        targets = {segment.name: segment for segment in self.layout.segments}
        for segment in other.layout.segments:
            target = targets.get(segment.name)
            if segment.name in names and target is not None and target.numel == segment.numel:
                self.committed[target.span] = other.committed[segment.span]
                self.pending[target.span] = other.base()[segment.span]
                self.touched |= other.touched & {segment.name}
        for numbers in (other.committed, other.pending):
            if numbers.is_cuda:  # another stream may have allocated them, and would reuse their memory too soon
                numbers.record_stream(torch.cuda.current_stream(numbers.device))

    def _places(self, names: Collection[str]) -> list[slice]:
        return [segment.span for segment in self.layout.segments if segment.name in names]


States = dict[str, State]
"""The states of a group, by name."""
