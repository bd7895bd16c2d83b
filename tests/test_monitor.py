"""What the monitor tells the loggers."""

import pytest
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from lightning_compress import CommunicationMonitor, CompressedDDPStrategy
from tests.helpers.training import fit

TIMES = {"encode_ms", "exchange_ms", "decode_ms"}
SAMPLED = TIMES | {"relative_error", "residual_norm"}
COUNTED = {"bytes_sent", "bytes_dense", "ratio", "steps", "nonfinite_steps", "total_bytes_sent", "total_bytes_dense"}


class Memory(Logger):
    """Keeps what it is given."""

    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


def _logged(compressor, steps=7, every=3):
    memory = Memory()
    strategy = CompressedDDPStrategy(compressor)
    trainer, _ = fit(strategy, steps, callbacks=[CommunicationMonitor()], loggers=memory, log_every_n_steps=every)
    return memory.rows, {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


@pytest.mark.parametrize("compressor", ["onebit", "topk", "bf16"])
def test_traffic_time_and_error_reach_the_loggers(pools, compressor):
    rows, bar = pools[2].run(_logged, compressor)[0]
    assert sorted(rows) == [3, 6]
    for step, row in rows.items():
        figures = {name.removeprefix("comm/"): value for name, value in row.items()}
        assert set(figures) == COUNTED | SAMPLED
        assert figures["steps"] == step
        assert figures["total_bytes_sent"] == step * figures["bytes_sent"]
        assert figures["ratio"] == figures["bytes_dense"] / figures["bytes_sent"] > 1.9
        assert all(figures[name] > 0 for name in TIMES)
        assert 0 < figures["relative_error"] < 1
        assert (figures["residual_norm"] > 0) == (compressor != "bf16")
    assert bar["comm/ratio"] == pytest.approx(rows[6]["comm/ratio"])


def test_a_dense_baseline_is_logged_too(pools):
    rows, _ = pools[2].run(_logged, "none")[0]
    assert rows[6]["comm/ratio"] == 1.0
    assert rows[6]["comm/bytes_sent"] == rows[6]["comm/bytes_dense"] > 0


def _one_process():
    strategy = CompressedDDPStrategy("topk")
    fit(strategy, 3)
    return strategy.comm_stats()


def test_one_process_sends_nothing(pools):
    (stats,) = pools[1].run(_one_process)
    assert stats["bytes_sent"] == 0
    assert stats["ratio"] == 1.0


def _plain():
    try:
        fit(DDPStrategy(), 1, callbacks=[CommunicationMonitor()])
    except ValueError as error:
        return str(error)
    return "trained"


def test_another_strategy_is_refused(pools):
    assert "not DDPStrategy; for an uncompressed baseline use compressor='none'" in pools[1].run(_plain)[0]
