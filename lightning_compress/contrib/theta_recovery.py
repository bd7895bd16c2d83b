"""Compress less when training suffers from compression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_compress.callbacks import wraps_model
from lightning_compress.settings.parsing import must
from lightning_compress.settings.run_state import RunState

Mode = Literal["min", "max"]


@dataclass
class Stall:
    """Whether a metric has gone without improvement for ``patience`` checks."""

    mode: Mode
    min_delta: float
    patience: int
    target: float | None = None
    best: float = math.nan
    waited: int = 0

    def passed(self, value: float) -> bool:
        """Tell whether the metric has stalled, given its next value. Then the count of checks starts again at 0."""
        sign = -1 if self.mode == "min" else 1
        gain = sign * (value - self.best)
        if self.target is not None and sign * (value - self.target) >= 0:
            self.waited = 0
            return False
        if not math.isnan(value) and (math.isnan(self.best) or gain > self.min_delta):
            self.best, self.waited = value, 0
            return False
        self.waited += 1
        if self.waited < self.patience:
            return False
        self.waited = 0
        return True


def looser(settings: RunState, name: str, values: Sequence[float] = ()) -> float | None:
    """Return the next value of a setting that compresses less; None if there is none.

    Args:
        settings: what runs.
        name: of the setting. ``theta`` is a share that is dropped: what is left doubles, until it is 0. A density
            doubles, at most to 1. Whole numbers (bits, rank) double, or go to 8, 16 or 32, as the compressor allows.
        values: to use one after the other instead, from strong to weak.
    """
    now = getattr(settings.compressor, name)
    if values:
        falls = values[-1] < (values[0] if len(values) > 1 else now)
        candidates = [value for value in values if (value < now if falls else value > now)]
    elif name == "theta":
        candidates = [max(0.0, 1 - 2 * (1 - now))]
    elif name == "density":
        candidates = [min(1.0, 2 * now)]
    else:
        candidates = [value for value in (2 * now, 8, 16, 32) if value > now]
    for candidate in candidates:
        try:
            settings.retuned(None, {name: candidate})
        except ValueError:
            continue
        return None if candidate == now else candidate
    return None


class RecoveryMixin:
    """Makes a ``Callback`` compress less when training suffers; see ``ThetaRecovery``."""

    def __init__(
        self,
        setting: str = "theta",
        values: Sequence[float] = (),
        bound: float | None = None,
        monitor: str | None = None,
        mode: Mode = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        target: float | None = None,
    ) -> None:
        if bound is None and monitor is None:
            raise ValueError("ThetaRecovery needs something to go by: bound (of the relative error), monitor, or both")
        must(lambda given: given is None or given > 0, "above 0, or None")("ThetaRecovery: bound", bound)
        must(lambda given: given in get_args(Mode), "min (a loss) or max (an accuracy)")("ThetaRecovery: mode", mode)
        must(lambda given: type(given) is int and given > 0, "1 check or more")("ThetaRecovery: patience", patience)
        must(lambda given: given >= 0, "0 or more")("ThetaRecovery: min_delta", min_delta)
        self.setting, self.values, self.bound, self.monitor = setting, tuple(values), bound, monitor
        self.stall = Stall(mode, min_delta, patience, target)
        self.history: list[tuple[int, float]] = []
        self._sampled = 0
        self._of_epochs = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check before training that strategy and compressor have the setting.

        Raises:
            ValueError: they have not, one of ``values`` is not allowed, or ``bound`` meets a delay.
        """
        if stage != "fit":
            return
        settings = getattr(trainer.strategy, "_settings", None)
        if settings is None or not wraps_model(trainer.strategy):
            raise ValueError(f"ThetaRecovery needs a CompressedDDPStrategy, not {type(trainer.strategy).__name__}")
        if self.bound is not None and settings.options.delay:
            raise ValueError(
                f"ThetaRecovery(bound={self.bound}): with delay={settings.options.delay} the error of a step is known "
                "sooner on some ranks than on others, and they would wait for each other; use monitor, or delay=0"
            )
        for value in self.values or (getattr(settings.compressor, self.setting, None),):
            settings.retuned(None, {self.setting: value})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue from a checkpoint, unless the strategy has restored its own state, which has what was retuned."""
        self._sampled, self._of_epochs = 0, False
        compression = trainer.strategy.compression
        if self.history and not compression.step:
            compression.retune(**{self.setting: self.history[-1][1]})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compare the error of a sampled step with its bound."""
        meter = trainer.strategy.compression.meter
        if self.bound is None or meter.sampled == self._sampled:
            return
        self._sampled = meter.sampled
        error = trainer.strategy.comm_stats()["relative_error"]
        self._loosen(trainer, f"relative error {error:.3g} is above {self.bound}" if error > self.bound else "")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Check the metric. A training metric is missing until the first epoch ends, and is checked there."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._of_epochs = self._of_epochs or self.monitor not in trainer.callback_metrics
            if not self._of_epochs:
                self._check_metric(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Check the metric if no validation does."""
        if self._of_epochs or not trainer.enable_validation:
            self._check_metric(trainer)

    def _check_metric(self, trainer: Any) -> None:
        if self.monitor is None:
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise ValueError(f"ThetaRecovery(monitor={self.monitor!r}): logged are {', '.join(metrics) or 'none'}")
        value = float(metrics[self.monitor])
        stalled = self.stall.passed(value)
        best = f"{self.monitor} {value:.4g} has been no better than {self.stall.best:.4g}"
        self._loosen(trainer, f"{best} for {self.stall.patience} checks" if stalled else "")

    def _loosen(self, trainer: Any, reason: str) -> None:
        """Retune all ranks if rank 0 has a reason."""
        reason = trainer.strategy.broadcast(reason)
        compression = trainer.strategy.compression
        settings = compression.next_settings
        following = looser(settings, self.setting, self.values) if reason else None
        if following is None:
            return
        was = getattr(settings.compressor, self.setting)
        compression.retune(**{self.setting: following})
        self.history.append((compression.step, following))
        rank_zero_info(f"{reason}: {self.setting} goes from {was:g} to {following:g} after step {compression.step}")
        for logger in trainer.loggers:
            logger.log_metrics({f"recovery/{self.setting}": following}, trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from."""
        return {"history": self.history, "best": self.stall.best, "waited": self.stall.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``state_dict``."""
        self.history = [tuple(each) for each in state_dict["history"]]
        self.stall.best, self.stall.waited = state_dict["best"], state_dict["waited"]


class ThetaRecovery(RecoveryMixin, Callback):
    """Compresses less, step by step and at last not at all, when training suffers from compression.

    After the recovery of Wang et al., HPDC 2020, arXiv:1811.08596: train with a large theta, and lower it when the
    accuracy falls behind. The accuracy then returns to that of a lossless run. Rank 0 decides, and all ranks follow
    from the next step on. If a ``schedule`` changes the same setting, its next change overrides this one.

    Args:
        setting: what is loosened. ``theta`` is lowered: what is left of the spectrum doubles, until theta is 0.
            ``density``, ``bits`` or ``rank`` are doubled, as long as the compressor allows.
        values: used one after the other instead, e.g. ``[0.9, 0.5, 0.0]``.
        bound: of the relative error of a sampled step (norm of what was not sent over that of gradient plus
            residual). Steps are sampled as ``CommunicationMonitor`` logs, or else every 50th step.
        monitor: name of a logged metric. It is checked after each validation, or each epoch if there is none.
        mode: ``min`` for a loss, ``max`` for an accuracy.
        patience: loosen after this many checks in a row without improvement on the best value.
        min_delta: an improvement is larger than this.
        target: a metric this good is not behind: what a run without compression reaches, if that is known. Without it,
            a run that has converged counts as one that stalls.

    Raises:
        ValueError: a value is not allowed, or there is neither ``bound`` nor ``monitor``.
    """
