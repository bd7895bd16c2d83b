"""Local steps in loops of one's own, as benchmarks run them: methods by name, and their handle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_compress.periodic import LocalSGD
from lightning_compress.periodic.sync_schedule import Rounds

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
"""``rounds``, and settings of ``LocalSGD``."""


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
        **more: settings of the compression.

    Attributes:
        every: local steps in a round.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any], **more: Any) -> None:
        settings = {"on_nonfinite": "pass", "check_drift_every": 100, **given, **more}
        rounds = settings.pop("rounds")
        timing = {"fragments": rounds.fragments, "delay": rounds.delay, "alpha": rounds.alpha}
        self._local, self.every = LocalSGD(rounds.sync_every, **timing, **settings), rounds.sync_every
        self._local.start(model)
        self.before, self.after = self._local.before_step, self._local.after_step
        self.finish, self.close = self._local.finish, self._local.close

    @property
    def bytes_sent(self) -> int:
        """By this rank, so far."""
        return sum(each.bytes_sent for each in self._local.meters)

    @property
    def bytes_dense(self) -> int:
        """What stock DDP would have sent by now."""
        return sum(each.bytes_dense for each in self._local.meters)
