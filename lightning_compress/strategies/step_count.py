"""Which steps of several optimizers make one step of the run, and when it is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_compress.periodic.synchroniser import Synchroniser
from lightning_compress.strategies.report import StepClock


class StepCount:
    """Counts the steps of all optimizers of a fit, and calls ``Synchroniser.after_step`` for each step that counts.

    With several optimizers, a step counts if the same optimizer has stepped since the last one that counted. Inside
    ``batch``, it is counted once the other optimizers had their turn: when a module runs forward again, when the same
    optimizer steps again, or when the batch ends. So a round falls behind Muon's step and AdamW's, not between them.

    Args:
        synchroniser: of the fit.
        changed: called when the model may have changed: after each step and each count.

    Attributes:
        clock: of the optimizers' steps.
        steps: of each optimizer, by its ``id``: the count at which it has stepped last.
    """

    def __init__(self, synchroniser: Synchroniser, changed: Callable[[], None]) -> None:
        self._synchroniser, self._changed = synchroniser, changed
        self.clock = StepClock(synchroniser.steps_per_count)
        self.steps: dict[int, int] = {}
        self._late: bool | None = False  # an optimizer has stepped since the last count; None: read from a checkpoint
        self._inside, self._waiting = False, False
        self._hook: RemovableHandle | None = None

    @contextmanager
    def batch(self, several: bool) -> Iterator[None]:
        """Count what has stepped when the context ends; ``several``: of several optimizers, that step inside it."""
        self._inside = several
        try:
            yield
            self._count_waiting()
        finally:
            self._inside = False
            self._forget()

    def before(self, optimizer: object) -> None:
        """Count the last step now if this optimizer begins another one."""
        self.clock.step()
        if self.steps.get(id(optimizer), 0) >= self._now:
            self._count_waiting()

    def after(self, optimizer: object) -> None:
        """Note that an optimizer has stepped, or tried to."""
        self._changed()
        now = self._now
        own = self.steps[id(optimizer)] = max(self.steps.get(id(optimizer), 0) + 1, now)
        if own == now:  # another optimizer has counted, or waits for that, since this one has stepped
            self._late = self._late or not self._waiting
            return
        self._waiting = True
        if self._inside:
            self._hook = register_module_forward_pre_hook(lambda *_: self._count_waiting())
        else:
            self._count_waiting()

    def finish(self) -> None:
        """Count the steps since the last count, if there are any, perhaps after a round."""
        if self._late is None:
            self._late = list(self.steps.values()).count(self._now) > 1
        if self._late:
            self._count()

    def saved(self, optimizers: Sequence[object]) -> list[int]:
        """Return what a checkpoint keeps."""
        return [self.steps.get(id(optimizer), 0) for optimizer in optimizers]

    def load(self, optimizers: Sequence[object], saved: Sequence[int]) -> None:
        """Restore what ``saved`` returned."""
        self.steps, self._late = dict(zip(map(id, optimizers), saved, strict=False)), None

    @property
    def _now(self) -> int:
        return self._synchroniser.attempts + self._waiting

    def _count_waiting(self) -> Any:
        if self._waiting:
            self._forget()
            self._count()

    def _count(self) -> None:
        self._late = False
        self._synchroniser.after_step()
        self._changed()

    def _forget(self) -> None:
        self._waiting = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
