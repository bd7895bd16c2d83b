"""Puts the traffic into the Trainer's loggers and its progress bar."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn


class MonitorMixin:
    """Turns a ``Callback`` into a communication monitor; see ``CommunicationMonitor``."""

    def __init__(self, prefix: str = "comm/", progress_bar: bool = True) -> None:
        self.prefix = prefix
        self.progress_bar = progress_bar
        self._steps = self._due = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Warn where the strategy does not compress."""
        if stage == "fit" and not _tells(trainer):
            rank_zero_warn(
                "CommunicationMonitor logs nothing: it needs Trainer(strategy=CompressedDDPStrategy(...)), or "
                f"LocalSGDStrategy or GossipStrategy, not {type(trainer.strategy).__name__}; for an uncompressed "
                "baseline use compressor='none'"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Have those steps measured that will be logged."""
        if _tells(trainer) and trainer.log_every_n_steps:  # without logs ThetaRecovery may still want some
            trainer.strategy.measure_every(trainer.log_every_n_steps)
        self._steps = 0
        self._due = trainer.fit_loop.epoch_loop._batches_that_stepped // max(1, trainer.log_every_n_steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log a step that ended in this batch, if it is due, in the row that Lightning's own figures of it have."""
        if not _tells(trainer):
            return
        steps, every = trainer.strategy.compression.meter.steps, trainer.log_every_n_steps
        before, self._steps = self._steps, steps
        row = trainer.fit_loop.epoch_loop._batches_that_stepped  # what LearningRateMonitor and self.log go by
        if not every or steps == before or (row + 1) // every == self._due:
            return
        self._due = (row + 1) // every
        figures = {name: each for name, each in trainer.strategy.comm_stats().items() if name != "summary"}
        for logger in trainer.loggers:
            logger.log_metrics({self.prefix + name: value for name, value in figures.items()}, row)
        if self.progress_bar:
            pl_module.log(self.prefix + "ratio", figures["ratio"], prog_bar=True, logger=False, batch_size=1)


def _tells(trainer: Any) -> bool:
    return hasattr(trainer.strategy, "comm_stats")


class CommunicationMonitor(MonitorMixin, Callback):
    """Logs bytes, time and error of the communication every ``log_every_n_steps`` steps, where Lightning logs them.

    Per step ``bytes_sent``, ``bytes_dense`` (what stock DDP sends), ``ratio``, ``encode_ms``, ``exchange_ms``,
    ``decode_ms``, ``relative_error`` (norm of what was not sent over that of gradient plus residual),
    ``residual_norm`` (of LoCo's errors, too); in total ``total_bytes_sent``, ``total_bytes_dense``, ``steps``,
    ``nonfinite_steps``. The figures are rank 0's. Steps between are not timed. With another strategy it warns, and logs
    nothing.

    With ``GossipStrategy`` there are also ``bytes_to_<rank>``, what this rank has sent to each neighbour;
    ``bytes_of_<rank>``, what each rank had sent when all met last; ``rounds``; ``nonfinite_rounds``, in which a rank
    went back to its last model; ``gamma`` or ``eta``, the step in use; ``consensus_distance``, the root mean
    square distance of the ranks' models from their mean, over the mean's norm, when it was formed last; and with
    Moniqua ``theta``, ``hash_failures`` (blocks that neighbours did not recover), ``hash_bytes`` and ``resent_bytes``.

    Args:
        prefix: of the metrics' names.
        progress_bar: show the ratio there.
    """
