"""ThetaRecovery: less compression when training suffers, at the same step on all ranks, and said aloud."""

import logging
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_compress import CompressedDDPStrategy, LocalSGDStrategy, ThetaRecovery
from lightning_compress.contrib.theta_recovery import Stall, looser
from lightning_compress.settings.run_state import RunState
from tests.callbacks.test_monitor import Memory
from tests.helpers.training import Net, digits, fit, loader, parameters


@pytest.mark.parametrize(
    ("compressor", "name", "values", "course"),
    [
        ({"name": "fft", "theta": 0.99}, "theta", (), [0.98, 0.96, 0.92, 0.84, 0.68, 0.36, 0.0]),
        ({"name": "fft", "theta": 0.99}, "theta", (0.9, 0.5, 0.0), [0.9, 0.5, 0.0]),
        ({"name": "fft", "theta": 0.99}, "theta", (0.5,), [0.5]),
        ({"name": "topk", "density": 0.2}, "density", (0.5,), [0.5]),
        ({"name": "topk", "density": 0.2}, "density", (), [0.4, 0.8, 1.0]),
        ({"name": "topk", "density": 0.2}, "density", (0.1, 0.3, 0.9), [0.3, 0.9]),
        ({"name": "qsgd", "bits": 2}, "bits", (), [4, 8]),
        ({"name": "fft", "bits": 10}, "bits", (), [16, 32]),
        ({"name": "rotated", "bits": 5}, "bits", (), [8]),
    ],
)
def test_looser_until_nothing_is_left(compressor, name, values, course):
    settings, taken = RunState.of(compressor), []
    while (value := looser(settings, name, values)) is not None:
        taken.append(value)
        settings = settings.retuned(None, {name: value})
    assert taken == pytest.approx(course)


@pytest.mark.parametrize(
    ("mode", "min_delta", "metrics", "calls"),
    [
        ("min", 0.0, [3, 2, 2, 1, 1, 1, 1, 0], [False] * 5 + [True, False, False]),
        ("max", 0.1, [0.5, 0.55, 0.58, 0.7, 0.1, 0.1, 0.1, 0.1], [0, 0, 1, 0, 0, 1, 0, 1]),
        ("min", 0.0, [1, float("nan"), float("nan"), 0.5], [0, 0, 1, 0]),
        ("min", 0.0, [float("nan"), float("nan"), 1.0, 1.0], [0, 1, 0, 0]),
    ],
)
def test_a_metric_stalls(mode, min_delta, metrics, calls):
    stall = Stall(mode, min_delta, patience=2)
    assert [stall.passed(value) for value in metrics] == [bool(each) for each in calls]


def test_a_metric_that_is_good_enough_is_not_behind():
    stall = Stall("max", 0.0, patience=1, target=0.9)
    assert [stall.passed(value) for value in (0.8, 0.95, 0.92, 0.85, 0.95, 0.7)] == [False] * 3 + [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "something to go by"),
        ({"bound": 0}, "bound=0"),
        ({"monitor": "a", "mode": "up"}, "mode='up'"),
        ({"monitor": "a", "patience": 0}, "patience=0"),
        ({"monitor": "a", "min_delta": -1}, "min_delta=-1"),
    ],
)
def test_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ThetaRecovery(**arguments)


class Ratios(Callback):
    """What ran in each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(trainer.strategy.compression.settings.method.theta)


class Stuck(Net):
    """Logs a metric per epoch that differs between ranks: only on rank 0 does it stand still."""

    def on_train_epoch_start(self):
        value = -float(self.trainer.current_epoch) * dist.get_rank()
        self.log("stuck", torch.tensor(value), on_step=False, on_epoch=True, sync_dist=False)


# Which one speaks depends on what this process has imported before.
LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning_utilities", "pytorch_lightning", "lightning")


def _trained(recovery, steps=9, make=Net, trainer=None):
    memory, watch, callback = Memory(), Ratios(), ThetaRecovery(**recovery)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        strategy = CompressedDDPStrategy({"name": "fft", "theta": 0.99}, error_feedback=False)
        _, model = fit(strategy, steps, make, callbacks=[callback, watch], loggers=memory, **(trainer or {}))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    logged = {step: row["recovery/theta"] for step, row in memory.rows.items() if "recovery/theta" in row}
    return watch.seen, callback.history, logged, said, parameters(model).numpy()


def test_an_error_above_its_bound_loosens_all_ranks(pools):
    ranks = pools[2].run(_trained, {"bound": 0.5, "values": (0.9, 0.3, 0.0)}, 160)
    seen, history, logged, said, first = ranks[0]
    assert (first == ranks[1][4]).all()
    assert all(rank[:2] == ranks[0][:2] for rank in ranks)
    assert history[:2] == [(1, 0.9), (50, 0.3)]  # the first step is sampled, and each 50th
    assert seen[:51] == [0.99] + [0.9] * 49 + [0.3]
    assert len(history) == 2  # at 0.3 the error is below the bound
    assert logged == {1: 0.9, 50: 0.3}
    assert any("is above 0.5: theta goes from 0.99 to 0.9 after step 1" in line for line in said)
    assert not ranks[1][3]


def test_a_metric_that_stands_still_on_rank_0_loosens_all_ranks(pools):
    ranks = pools[2].run(_trained, {"monitor": "stuck", "patience": 2}, 15, Stuck, {"limit_train_batches": 3})
    for seen, history, *_ in ranks:
        assert [value for _, value in history] == pytest.approx([0.98, 0.96])
        assert [step for step, _ in history] == [9, 15]
        assert seen == pytest.approx([0.99] * 9 + [0.98] * 6)


def _missing():
    try:
        _trained({"monitor": "nosuch"}, 3, Net, {"limit_train_batches": 3})
    except ValueError as error:
        return str(error)
    return "trained"


def test_a_metric_that_nobody_logs(pools):
    assert all("monitor='nosuch'): logged are none" in answer for answer in pools[2].run(_missing))


class OfEpochs(Net):
    """Logs a metric of the training epoch, and validates in it."""

    def training_step(self, batch, batch_idx):
        self.log("still", 1.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return loader(digits(count=64))


def test_a_metric_of_the_training_epoch_beside_validation(pools):
    options = {"limit_train_batches": 4, "val_check_interval": 2}
    for _, history, *_ in pools[2].run(_trained, {"monitor": "still", "patience": 2}, 20, OfEpochs, options):
        assert [step for step, _ in history] == [12, 20]  # the first epoch sets what is to be improved


@pytest.mark.parametrize("stage", ["test", "validate", "predict"])
def test_only_training_needs_the_strategy(stage):
    ThetaRecovery(bound=1.0).setup(SimpleNamespace(strategy=DDPStrategy()), None, stage)


def _refusal(strategy, arguments):
    try:
        fit(strategy, 1, callbacks=[ThetaRecovery(**arguments)])
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("strategy", "arguments", "message"),
    [
        (DDPStrategy(), {"bound": 1.0}, "not DDPStrategy"),
        (LocalSGDStrategy(sync_every=2, compressor="fft"), {"bound": 1.0}, "not LocalSGDStrategy"),
        (CompressedDDPStrategy("fft", delay=1), {"bound": 1.0}, "ThetaRecovery(bound=1.0): with delay=1"),
        (CompressedDDPStrategy("topk"), {"bound": 1.0}, "TopK has no setting 'theta'"),
        (CompressedDDPStrategy("topk"), {"bound": 1.0, "setting": "density", "values": (0.5, 2.0)}, "density=2.0"),
    ],
)
def test_refused_before_training(pools, strategy, arguments, message):
    assert message in pools[1].run(_refusal, strategy, arguments)[0]


def test_what_a_checkpoint_or_a_schedule_says_is_not_overridden():
    callback, given = ThetaRecovery(bound=1.0), []
    callback.history.append((7, 0.5))
    restored = SimpleNamespace(step=8, retune=lambda **settings: given.append(settings))
    callback.on_train_start(SimpleNamespace(strategy=SimpleNamespace(compression=restored)), None)
    assert not given


def test_a_resumed_run_goes_on_from_what_was_reached(pools):
    assert pools[1].run(_resumed) == [[0.5, 0.5]]


def _resumed():
    saved = ThetaRecovery(bound=1.0)
    saved.history.append((7, 0.5))
    callback, watch = ThetaRecovery(bound=1.0), Ratios()
    callback.load_state_dict(saved.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(CompressedDDPStrategy({"name": "fft", "theta": 0.99}), 2, callbacks=[callback, watch])
    return watch.seen
