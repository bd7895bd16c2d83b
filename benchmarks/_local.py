"""Local steps in loops of one's own, as benchmarks run them: methods by name, and their handle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_compress.collectives import Collective, TorchCollective
from lightning_compress.local.outer import Outer
from lightning_compress.local.steps import LocalSteps
from lightning_compress.local.timetable import Rounds
from lightning_compress.settings.run_state import RunState

ROTATED = {"name": "rotated", "bits": 4}
_SPARSE = {"outer": {"lr": 1.0}, "compressor": "sparseloco", "error_feedback": {"decay": 0.95}}
AVERAGE = {"outer": "average", "compressor": "none"}
_NESTEROV = {"outer": "nesterov", "compressor": "none"}
LOCAL: dict[str, dict[str, Any]] = {
    "local_sgd 16": {"rounds": Rounds(16), **AVERAGE},
    "local_sgd 16 streaming": {"rounds": Rounds(16, 3, 5, 0.5), **AVERAGE},
    "diloco 30": {"rounds": Rounds(30), **_NESTEROV},
    "diloco 30 streaming": {"rounds": Rounds(30, 3, 5, 0.5), **_NESTEROV},
    "diloco 30 rotated 4": {"rounds": Rounds(30), **_NESTEROV, "compressor": ROTATED},
    "diloco 30 rotated 4 streaming": {"rounds": Rounds(30, 3, 5, 0.5), **_NESTEROV, "compressor": ROTATED},
    "sparseloco 30": {"rounds": Rounds(30), **_SPARSE},
    "sparseloco 30 streaming": {"rounds": Rounds(30, 3, 5, 0.5), **_SPARSE},
}
"""``rounds`` and ``outer`` of ``LocalSteps``; the others are settings of its compression."""


class Alone:
    """Steps after which nothing is ever averaged, counted in rounds as local steps are: their bound."""

    every, bytes_sent = 30, 0

    def after(self) -> None:
        """An optimizer stepped."""

    def close(self) -> None:
        """Nothing is to be closed."""


class Local:
    """The local steps of one model over all ranks; create it and call it on all of them.

    Args:
        model: the same on all ranks.
        given: of ``LOCAL``.
        ranks: where they are threads, and rounds have no delay; None: those of torch.distributed.
        **more: settings of the compression.

    Attributes:
        settings: of the compression.
        every: local steps in a round.
    """

    def __init__(
        self, model: nn.Module, given: Mapping[str, Any], ranks: Collective | None = None, **more: Any
    ) -> None:
        settings = {**given, **more}
        rounds, outer = settings.pop("rounds"), Outer.of(settings.pop("outer"))
        self.settings, self.every = RunState.of(**settings), rounds.sync_every
        self._apart = [] if ranks else [TorchCollective().apart() for _ in range(rounds.fragments)]
        over = [ranks] * rounds.fragments if ranks else self._apart
        self._steps, self._step = LocalSteps(model, self.settings, rounds, outer, over), 0

    @torch.no_grad()
    def after(self) -> None:
        """An optimizer stepped."""
        self._step += 1
        self._steps.after(self._step)

    @torch.no_grad()
    def finish(self) -> None:
        """The last step was made."""
        self._steps.finish(self._step)

    @property
    def bytes_sent(self) -> int:
        """By this rank, so far."""
        return sum(each.compression.meter.bytes_sent for each in self._steps.fragments)

    @property
    def bytes_dense(self) -> int:
        """What stock DDP would have sent by now."""
        return sum(each.compression.meter.bytes_dense for each in self._steps.fragments)

    def close(self) -> None:
        """Wait for what travels, and end."""
        self._steps.arrive()
        self._steps.close()
        for each in self._apart:
            each.close()
