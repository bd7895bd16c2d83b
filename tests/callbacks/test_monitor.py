"""What the monitor tells the loggers."""

import csv
import re
import time
import warnings
from functools import partial
from unittest import mock

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.strategies import DDPStrategy

from lightning_compress import CommunicationMonitor, CompressedDDPStrategy, LocalSGDStrategy
from lightning_compress.engine.compression import Compression
from tests.engine.test_modes import TwoOptimizers
from tests.helpers.training import LATER, Net, fit

TIMES = {"encode_ms", "exchange_ms", "decode_ms"}
SAMPLED = TIMES | {"wait_ms", "relative_error", "residual_norm"}
COUNTED = {"bytes_sent", "bytes_dense", "ratio", "steps", "nonfinite_steps", "total_bytes_sent", "total_bytes_dense"}


class Memory(Logger):
    """Keeps what it is given."""

    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.rows, self.hyperparameters = {}, {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, params, *args, **kwargs):
        self.hyperparameters = dict(params)


def _logged(compressor, steps=7, every=3, **settings):
    memory = Memory()
    strategy = CompressedDDPStrategy(compressor, **settings)
    trainer, _ = fit(strategy, steps, callbacks=[CommunicationMonitor()], loggers=memory, log_every_n_steps=every)
    return memory.rows, {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


@pytest.mark.parametrize("compressor", ["onebit", "topk", "bf16"])
def test_traffic_time_and_error_reach_the_loggers(pools, compressor):
    rows, bar = pools[2].run(_logged, compressor)[0]
    assert sorted(rows) == [2, 5]  # counted from 0, as Lightning does
    for step, row in rows.items():
        figures = {name.removeprefix("comm/"): value for name, value in row.items()}
        assert set(figures) - {"epoch"} == COUNTED | SAMPLED  # Lightning adds the epoch to its rows
        assert figures["steps"] == step + 1
        assert figures["total_bytes_sent"] == (step + 1) * figures["bytes_sent"]
        assert figures["ratio"] == figures["bytes_dense"] / figures["bytes_sent"] > 1.9
        assert all(figures[name] > 0 for name in TIMES)
        assert 0 < figures["relative_error"] < 1
        assert (figures["residual_norm"] > 0) == (compressor != "bf16")
    assert bar["comm/ratio"] == pytest.approx(rows[5]["comm/ratio"])


def _slowly():
    """With averages that are in flight when a batch ends."""
    reduce = Compression.reduce

    def slow(*given):
        time.sleep(0.05)
        reduce(*given)

    with mock.patch.object(Compression, "reduce", slow):
        return _logged("onebit", delay=1)


def test_with_a_delay_the_rows_are_the_same(pools):
    rows, _ = pools[2].run(_slowly)[0]
    assert sorted(rows) == [2, 5]
    for step, row in rows.items():
        assert row["comm/steps"] == step + 1
        assert row["comm/total_bytes_sent"] == (step + 1) * row["comm/bytes_sent"]
        assert row["comm/encode_ms"] > 0
        assert row["comm/wait_ms"] > 1  # this network computes for less than 50 ms


def test_a_dense_baseline_is_logged_too(pools):
    rows, _ = pools[2].run(_logged, "none")[0]
    assert rows[5]["comm/ratio"] == 1.0
    assert rows[5]["comm/bytes_sent"] == rows[5]["comm/bytes_dense"] > 0


def _one_process():
    strategy = CompressedDDPStrategy("topk")
    fit(strategy, 3)
    return strategy.comm_stats()


def test_one_process_sends_nothing(pools):
    (stats,) = pools[1].run(_one_process)
    assert stats["bytes_sent"] == 0
    assert stats["ratio"] == 1.0


class Logs(Net):
    """A figure of its own, by Lightning."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LogsTwo(TwoOptimizers):
    """The same with two optimizers, each with a backward of its own."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.log("loss", 1.0)


def _rows(make, **trainer):
    memory = Memory()
    callbacks = [CommunicationMonitor(), LearningRateMonitor("step")]
    fit(CompressedDDPStrategy("topk"), 9, make, callbacks=callbacks, loggers=memory, log_every_n_steps=2, **trainer)
    named = {name: [step for step, row in memory.rows.items() if name in row] for name in ("loss", "comm/ratio")}
    return named, [step for step, row in memory.rows.items() if any(name.startswith("lr-") for name in row)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_row_is_that_of_lightnings_own_figures(pools, accumulate):
    for named, rates in pools[2].run(partial(_rows, accumulate_grad_batches=accumulate), Logs):
        assert named["comm/ratio"] == named["loss"] == [1, 3, 5, 7]
        assert set(named["loss"]) <= set(rates) or accumulate > 1


def test_the_row_is_that_of_two_optimizers_too(pools):
    for named, _ in pools[2].run(_rows, LogsTwo):
        assert named["comm/ratio"] == named["loss"] == [1, 3]


def _csv(folder):
    logger = CSVLogger(folder, name="", version="")
    fit(CompressedDDPStrategy("topk"), 4, Logs, callbacks=[CommunicationMonitor()], loggers=logger, log_every_n_steps=2)


def test_a_csv_file_has_one_row_for_both(pools, tmp_path):
    pools[2].run(_csv, str(tmp_path))
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "3"]
    assert all(row["loss"] and float(row["comm/ratio"]) > 1 for row in rows)
    assert float(rows[1]["comm/total_bytes_sent"]) == 2 * float(rows[0]["comm/total_bytes_sent"])


def _hyperparameters(**trainer):
    memory = Memory()
    fit(CompressedDDPStrategy("topk"), 1, loggers=memory, **trainer)
    return [name for name in memory.hyperparameters if name.startswith("lightning_compress/")]


@LATER
def test_hyperparameters_are_logged_unless_the_trainer_shall_not(pools):
    logged, _ = pools[2].run(_hyperparameters)
    assert "lightning_compress/compressor" in logged
    assert pools[2].run(partial(_hyperparameters, enable_autolog_hparams=False)) == [[], []]


def _sampled(every, steps=12, **local):
    strategy = LocalSGDStrategy(compressor="topk", **local) if local else CompressedDDPStrategy("topk")
    fit(strategy, steps, callbacks=[CommunicationMonitor()], log_every_n_steps=every)
    meters = strategy.synchroniser.meters if local else [strategy.compression.meter]
    return [each.sample_every for each in meters]


@pytest.mark.parametrize(("every", "rounds"), [(8, 2), (3, 1)])
def test_rounds_are_measured_that_are_logged_in_every_fragment(pools, every, rounds):
    assert pools[2].run(partial(_sampled, sync_every=4, fragments=2), every) == [[rounds, rounds]] * 2


def test_without_logs_others_may_still_want_figures(pools):
    assert pools[2].run(_sampled, 0, 2) == [[50]] * 2


def _plain():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fit(DDPStrategy(), 2, callbacks=[CommunicationMonitor()], log_every_n_steps=1, quiet=False)
    return [str(each.message) for each in caught if "CommunicationMonitor" in str(each.message)], trainer.global_step


def test_another_strategy_is_told(pools):
    ((said,), steps), (others, _) = pools[2].run(_plain)
    assert "not DDPStrategy; for an uncompressed baseline use compressor='none'" in said
    assert steps == 2
    assert not others


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 3}, "no argument 'every'; it logs when Lightning does: Trainer(log_every_n_steps=3)"),
        ({"prefx": "a/"}, "no argument 'prefx'; it has prefix, progress_bar and summary"),
    ],
)
def test_an_unknown_argument_names_the_right_one(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        CommunicationMonitor(**given)
