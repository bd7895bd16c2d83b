"""Log the traffic to the Trainer's loggers and its progress bar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.table import Table

from lightning_compress.settings.parsing import must


class MonitorMixin:
    """Makes a ``Callback`` a communication monitor; see ``CommunicationMonitor``."""

    def __init__(
        self, prefix: str = "comm/", progress_bar: bool = True, summary: bool = False, **unknown: object
    ) -> None:
        for name, given in unknown.items():
            counts = isinstance(given, int) and not isinstance(given, bool)
            instead = (
                f"it logs when Lightning does: Trainer(log_every_n_steps={given})"
                if counts
                else "it has prefix, progress_bar and summary"
            )
            raise ValueError(f"CommunicationMonitor has no argument {name!r}; {instead}")
        must(lambda value: isinstance(value, str), "a text, such as 'comm/'")("prefix", prefix)
        for name, given in (("progress_bar", progress_bar), ("summary", summary)):
            must(lambda value: isinstance(value, bool), "True or False")(name, given)
        self.prefix = prefix
        self.progress_bar = progress_bar
        self.summary = summary
        self._steps = self._due = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Warn if the strategy does not compress, or if there is no logger."""
        if stage == "fit" and not _tells(trainer):
            rank_zero_warn(
                "CommunicationMonitor logs nothing: it needs Trainer(strategy=CompressedDDPStrategy(...)), or "
                "CompressedFSDPStrategy, LocalSGDStrategy or GossipStrategy, not "
                f"{type(trainer.strategy).__name__}; for an uncompressed baseline use compressor='none'"
            )
        elif stage == "fit" and not trainer.loggers:
            rank_zero_warn("CommunicationMonitor logs nothing: the Trainer has no logger; use Trainer(logger=True)")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the strategy measure the steps that will be logged."""
        if _tells(trainer) and trainer.log_every_n_steps:  # without logs ThetaRecovery may still want some
            trainer.strategy.measure_every(trainer.log_every_n_steps)
        self._steps = 0
        self._due = trainer.fit_loop.epoch_loop._batches_that_stepped // max(1, trainer.log_every_n_steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log a step that ended in this batch, if it is due, in the row of Lightning's own figures of it."""
        if not _tells(trainer):
            return
        compression, every = trainer.strategy.compression, trainer.log_every_n_steps
        steps = getattr(compression, "begun", compression.meter.steps)  # with a delay, the last one may be in flight
        before, self._steps = self._steps, steps
        row = trainer.fit_loop.epoch_loop._batches_that_stepped  # what LearningRateMonitor and self.log go by
        if not every or steps == before or (row + 1) // every == self._due:
            return
        self._due = (row + 1) // every
        stats = trainer.strategy.comm_stats()
        figures = {self.prefix + name: float(each) for name, each in stats.items() if name != "summary"}
        written = trainer._logger_connector.should_update_logs  # Lightning is about to write a row
        ratio = self.prefix + "ratio"
        for name, value in figures.items() if written else [(ratio, figures[ratio])]:
            exact = torch.tensor(value, dtype=torch.float64)  # float32 would round bytes
            pl_module.log(name, exact, prog_bar=name == ratio and self.progress_bar, batch_size=1)
        for logger in () if written else trainer.loggers:
            logger.log_metrics(figures, row)

    def show(self, lines: Iterable[tuple[str, str]]) -> None:
        """Print the figures of a fit as a table.

        Args:
            lines: what each figure is about, and the figure.
        """
        table = Table(title="lightning_compress", show_header=False)
        for name, text in lines:
            table.add_row(name, text)
        Console().print(table)


def _tells(trainer: Any) -> bool:
    return hasattr(trainer.strategy, "comm_stats")


class CommunicationMonitor(MonitorMixin, Callback):
    """Logs bytes, time and error of the communication every ``log_every_n_steps`` steps, where Lightning logs them.

    Per step ``bytes_sent``, ``bytes_dense`` (what stock DDP sends), ``ratio``, ``encode_ms``, ``exchange_ms``,
    ``decode_ms``, ``wait_ms`` (what backward did not hide of these; on CPUs), ``relative_error`` (norm of what was not
    sent over that of gradient plus residual), ``residual_norm`` (of LoCo's errors, too). In total ``total_bytes_sent``,
    ``total_bytes_dense``, ``steps``, ``nonfinite_steps``. The figures are rank 0's. Other steps are not timed. With a
    strategy that does not compress, or without a logger, it warns, and logs nothing.

    ``GossipStrategy`` adds ``bytes_to_<rank>``, what this rank has sent to each neighbour; ``bytes_of_<rank>``, what
    each rank had sent when all ranks last met; ``rounds``; ``nonfinite_rounds``, in which a rank went back to its last
    model; ``gamma`` or ``eta``, the step in use; ``consensus_distance``, the root mean square distance of the ranks'
    models from their last mean, over the mean's norm. Moniqua adds ``theta``, ``hash_failures`` (blocks that neighbours
    did not recover), ``hash_bytes`` and ``resent_bytes``.

    Args:
        prefix: of the metrics' names.
        progress_bar: show the ratio in the progress bar.
        summary: print a table of the fit at its end, in place of the strategy's lines.
    """
