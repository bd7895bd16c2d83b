"""Which backward is under way, where backwards run within backwards, as in reentrant activation checkpointing."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class Outermost:
    """Knows the outermost backward under way, which ends when all that are nested in it have ended.

    Args:
        begin: called at the beginning of each, before ``task`` returns its number for the first time.
        end: called at its end with its number, unless it raised.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[int], None]) -> None:
        self._begin, self._end = begin, end
        self._held: weakref.ref[_Held] | None = None

    def task(self) -> int:
        """Return the number of the outermost backward that has called this before; of this backward if none has."""
        held = None if self._held is None else self._held()
        if held is None:  # the engine keeps what it will call for as long as that backward lives, and no longer
            held = _Held(torch._C._current_graph_task_id(), self._ended)
            torch.autograd.Variable._execution_engine.queue_callback(held)
            self._held = weakref.ref(held)
            self._begin()
        return held.task

    def _ended(self, task: int) -> None:
        self._held = None
        self._end(task)


class _Held:
    def __init__(self, task: int, ended: Callable[[int], None]) -> None:
        self.task, self._ended = task, ended

    def __call__(self) -> None:
        self._ended(self.task)
