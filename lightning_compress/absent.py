"""Parameters without a gradient on this rank: DDP may throw their mean away, so what is kept of them stays home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lightning_compress.layout import Layout, Segment
from lightning_compress.state import State, place_of


@dataclass
class Held:
    """Where one may be, 0.0 or 1.0 by which what is sent is multiplied, and each state's numbers."""

    place: slice
    mask: Tensor
    kept: list[Tensor]


class Absent:
    """Keeps states of one group as they were where this rank has no gradient.

    Args:
        layout: of the group.
        states: of which every rank has its own.
        residual: one of them, or None: what encoding leaves.
        shares: what is sent comes from what all ranks have, and is the others' too.
        device: where gradients are.
    """

    def __init__(
        self, layout: Layout, states: Sequence[State], residual: State | None, shares: bool, device: torch.device
    ) -> None:
        self._segments = [segment for segment in layout.segments if segment.numel]
        self._starts = torch.tensor([segment.offset for segment in self._segments], device=device)
        self._states = states
        self._residual = residual
        self._shares = shares

    def find(self, gradient: Tensor) -> list[Held]:
        """What there is to be kept, before anything is written; on CUDA of every parameter, which nobody waits for."""
        if not self._states:
            return []
        if gradient.device.type == "cpu":
            suspects = (gradient[self._starts] == 0).nonzero().flatten().tolist()
            segments = [self._segments[place] for place in suspects]
            segments = [segment for segment in segments if not gradient[place_of(segment)].any()]
            masks = gradient.new_zeros(len(segments)).unbind()
        else:
            segments = self._segments
            slices = [gradient[place_of(segment)] for segment in segments]
            masks = (torch.stack(torch._foreach_norm(slices, torch.inf)) != 0).float().unbind()
        return [self._hold(segment, mask) for segment, mask in zip(segments, masks, strict=True)]

    def _hold(self, segment: Segment, mask: Tensor) -> Held:
        place = place_of(segment)
        return Held(place, mask, [state.base()[place].to(torch.float32, copy=True) for state in self._states])

    def leave_out(self, held: Sequence[Held], gradient: Tensor, vector: Tensor, decay: float) -> None:
        """Take what is kept out of ``vector``, which is about to be sent."""
        for each in held:
            if self._shares:
                torch.addcmul(gradient[each.place], each.kept[0], each.mask, value=decay, out=vector[each.place])
            else:
                vector[each.place].mul_(each.mask)

    def put_back(self, held: Sequence[Held], vector: Tensor) -> None:
        """Write it to what is pending, of which ``vector`` is the residual's."""
        for each in held:
            for state, numbers in zip(self._states, each.kept, strict=True):
                if state is self._residual:  # which also owes what encoding took of the zeros it was given
                    vector[each.place].addcmul_(numbers, 1 - each.mask)
                else:
                    state.pending[each.place].mul_(each.mask).addcmul_(numbers, 1 - each.mask)


def plan(
    fused: ModuleType | None,
    layout: Layout,
    states: Sequence[State],
    residual: State | None,
    shares: bool,
    device: torch.device,
) -> Absent:
    """By the kernels of an accelerator, where there are any; see ``Absent``."""
    given = layout, states, residual, shares, device
    return FusedAbsent(fused.segments, *given) if fused and states else Absent(*given)


class FusedAbsent(Absent):
    """The same on an accelerator: a launch for all parameters at once, which leaves alone what is present.

    Args:
        kernel: ``kernels/triton/segments.py``.
        layout, states, residual, shares, device: see ``Absent``.
    """

    def __init__(
        self,
        kernel: ModuleType,
        layout: Layout,
        states: Sequence[State],
        residual: State | None,
        shares: bool,
        device: torch.device,
    ) -> None:
        super().__init__(layout, states, residual, shares, device)
        self._kernel = kernel
        self._tiles = kernel.table([place_of(segment) for segment in self._segments], device)
        self._used = torch.zeros(len(self._segments), dtype=torch.int32, device=device)

    def find(self, gradient: Tensor) -> list[Held]:
        """See the base class; one that stands for all parameters."""
        if not self._states:
            return []
        self._kernel.find_used(self._tiles, gradient, self._used.zero_())
        kept = [state.base().clone() if state.touched else state.base() for state in self._states]
        return [Held(slice(0, len(gradient)), self._used, kept)]

    def leave_out(self, held: Sequence[Held], gradient: Tensor, vector: Tensor, decay: float) -> None:
        """See the base class."""
        for each in held:
            if self._shares:
                self._kernel.restore_unused(self._tiles, each.mask, vector, gradient, add=False)
            else:
                self._kernel.zero_unused(self._tiles, each.mask, vector)

    def put_back(self, held: Sequence[Held], vector: Tensor) -> None:
        """See the base class."""
        for each in held:
            for state, numbers in zip(self._states, each.kept, strict=True):
                ours = state is self._residual
                target = vector if ours else state.pending
                self._kernel.restore_unused(self._tiles, each.mask, target, numbers, add=ours)
