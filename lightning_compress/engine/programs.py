"""A group's step as a program: what it starts is recorded once, and then made again as a list of calls.

A mode is everything that decides these calls: where all tensors lie, what was averaged before, and how each stage
treats the step. A mode is recorded when it is seen for the second time, because many occur only once. Steps whose mode
has no program take the ordinary path. So programs never change a number; see ``kernels/program.py`` for what a program
can repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.collectives import World
from lightning_compress.core import workspace
from lightning_compress.core.state import State
from lightning_compress.core.vector import Stage, new_flag
from lightning_compress.kernels.program import Program, Tape, recording

Mode = tuple[Hashable, ...]

MOST = 4
"""Programs of a group, at most; the oldest goes. Two, because committed and pending memory are swapped in each step."""
_SEEN = 16
"""Modes without a program that a group remembers, at most."""
_WASTED = 8
"""Programs that went without having been used, after which a group records no more: its modes do not recur."""
_OURS = "lightning_compress."
_address = Tensor.data_ptr


def ours(*things: object) -> bool:
    """Whether these objects' classes are this package's: only their work is known to be that of recorded calls."""
    return all(type(each).__module__.startswith(_OURS) for each in things)


class Programs:
    """The programs of one group.

    Args:
        stages: of the group; one without a phase has no step recorded.
        states: of the group.
        world: the ranks.
        known: everything else of the group may be recorded.

    Attributes:
        able: a pass may have a program.
    """

    def __init__(self, stages: Sequence[Stage], states: Collection[State], world: World, known: bool) -> None:
        self._stages, self._states, self._world = stages, list(states), world
        # elsewhere the host reads numbers, and decides by them
        self.able = known and kernels.compiler(world.device) == "triton"
        self._programs: dict[Mode, Program] = {}
        self._unused: set[Mode] = set()
        self._wasted = 0
        self._seen: dict[Mode, bool] = {}  # whether it can be recorded
        self._memory: tuple[object, int] = (None, 0)

    def mode(
        self,
        gradients: Sequence[Tensor],
        dense: bool,
        step: int,
        scale: Tensor | None,
        turn: int,
        left_out: Collection[str],
    ) -> Mode | None:
        """Return the mode of a pass, or None if it must not be recorded.

        Args:
            gradients: at least one.
            dense: the step is not compressed.
            step: see ``Group.reduce``.
            scale: see ``Group.reduce``.
            turn: see ``Group.reduce``.
            left_out: see ``Group.reduce``.
        """
        if not self.able or self._world.meter.sampling or not MOST:
            return None
        device = self._world.device
        if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:  # where kept kernels are launched
            return None
        found: list[Hashable] = [
            dense, None if scale is None else scale.data_ptr(), turn, frozenset(left_out), gradients[0].dtype,
            tuple(map(_address, gradients)),
        ]  # fmt: skip
        for state in self._states:
            found += [state.committed.data_ptr(), state.pending.data_ptr()]
            if state.touched:
                found.append(frozenset(state.touched))
        for stage in self._stages:
            phase = stage.phase(step)
            if phase is None:
                return None
            found.append(phase)
        return tuple(found)

    def run(self, mode: Mode | None, step: int, ordinary: Callable[[int], Tensor]) -> Tensor:
        """Make the calls of a mode's program, or take the ordinary path, and return the pass's flag.

        Args:
            mode: as ``mode`` returned it.
            step: number of committed steps.
            ordinary: averages by the ordinary path, and returns the flag; its argument is the step.
        """
        if mode is None:
            return ordinary(step)
        if (memory := (scratch := workspace.current(), scratch.generation)) != self._memory:
            self._memory = memory
            self._programs.clear()  # they are right, but keep memory that was released
        if found := self._programs.get(mode):
            flag = new_flag(self._world.device)
            self._unused.discard(mode)
            found.replay(step, flag)
            return flag
        if self._seen.get(mode):
            return self._recorded(mode, step, ordinary)
        if mode not in self._seen:
            self._seen[mode] = True
            if len(self._seen) > _SEEN:
                del self._seen[next(iter(self._seen))]
        return ordinary(step)

    def _recorded(self, mode: Mode, step: int, ordinary: Callable[[int], Tensor]) -> Tensor:
        """Take the ordinary path, and keep what it started as a program, unless that is impossible."""
        tape = Tape(step)
        with recording(tape):
            flag = ordinary(tape.step)
        if tape.void or flag is not tape.flag:
            self._seen[mode] = False
            return flag
        del self._seen[mode]
        self._programs[mode] = Program(tape, self._world.device)
        self._unused.add(mode)
        if len(self._programs) > MOST:
            oldest = next(iter(self._programs))
            del self._programs[oldest]
            self._wasted += oldest in self._unused
            self.able = self._wasted < _WASTED
        return flag
