"""Settings that change while training: what a user may write, and what then travels."""

import logging
import re
from enum import Enum

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.codecs import FFT, QSGD, TopK
from lightning_compress.collectives import run_threads
from lightning_compress.core.registry import plain
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.settings.run_state import RunState
from lightning_compress.settings.schedule import Progress, Schedule
from tests.helpers.training import Net, fit


def course(given, compressor, moments):
    """The value of the one setting at these moments."""
    schedule = Schedule.of(given, compressor)
    return [next(iter(schedule.values(moment).values())) for moment in moments]


def at(unit, *counts):
    return [Progress(**{unit: count}) for count in counts]


DGC = [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]


@pytest.mark.parametrize(
    ("given", "compressor", "moments", "values"),
    [
        ({"density": {0: 0.25, 100: 0.0625}}, TopK(), at("step", 0, 99, 100, 500), [0.25, 0.25, 0.0625, 0.0625]),
        ({"density": {"10": 0.5}}, TopK(0.1), at("step", 9, 10), [0.1, 0.5]),
        ({"density": {"unit": "epoch", "values": {2: 0.5}}}, TopK(0.1), at("epoch", 1, 2, 9), [0.1, 0.5, 0.5]),
        ({"density": {"values": {2: 0.5}}}, TopK(0.1), at("step", 1, 2), [0.1, 0.5]),
        ("dgc", TopK(0.001), at("epoch", 0, 1, 2, 3, 4, 9), DGC),
        ({"preset": "dgc", "steps": 10}, TopK(0.001), at("step", 9, 10, 29, 30, 40, 99), DGC),
        ({"preset": "dgc", "epochs": 2}, TopK(0.001), at("epoch", 1, 2, 5, 6, 8, 20), DGC),
        (
            {"theta": {"kind": "linear", "to": 0.0, "steps": 100, "stages": 4}},
            FFT(theta=0.8),
            at("step", 0, 24, 25, 50, 75, 99, 100, 900),
            [0.8, 0.8, 0.6, 0.4, 0.2, 0.2, 0.0, 0.0],
        ),
        (
            {"density": {"kind": "exponential", "from": 0.25, "to": 0.01, "epochs": 2, "stages": 2}},
            TopK(),
            at("epoch", 0, 1, 2, 3),
            [0.25, 0.05, 0.01, 0.01],
        ),
        ({"bits": {"kind": "linear", "to": 8, "steps": 8, "stages": 3}}, QSGD(2), at("step", 0, 3, 5, 8), [2, 4, 6, 8]),
    ],
)
def test_values(given, compressor, moments, values):
    assert course(given, compressor, moments) == pytest.approx(values)


def test_the_share_that_is_dropped_follows_the_learning_rate():
    rates = [None, 1.0, 0.1, 0.05, 0.02, 1e-4, 0.0]
    moments = [Progress(rate=rate) for rate in rates]
    theta = course({"theta": {"kind": "lr", "factor": 10}}, FFT(theta=0.85), moments)
    assert theta[:3] == [0.85, 0.85, 0.85]
    assert theta[-1] == 0.0
    for rate, value in zip(rates[3:6], theta[3:6], strict=True):
        assert 0.9 * 10 * rate <= value <= 10 * rate
    density = course({"density": {"kind": "lr", "factor": 10}}, TopK(density=0.01), moments)
    assert density[:2] == [0.01, 0.01]
    assert density[-1] == 1.0
    assert density == sorted(density)
    # few enough values that plans are not made anew all the time
    falling = [Progress(rate=0.1 * (1 - step / 10_000)) for step in range(10_000)]
    assert len(set(course({"theta": {"kind": "lr", "factor": 10}}, FFT(theta=0.99), falling))) < 150


@pytest.mark.parametrize(
    ("compressor", "schedule", "message"),
    [
        ("topk", {"theta": {0: 0.5}}, "TopK has no setting 'theta'; it has: density, scope, selection"),
        (
            "topk",
            {"density": {0: 0.5, 10: 1.5}},
            "schedule, at step 10, epoch 0: TopK(density=1.5): density must",
        ),
        ("topk", {"density": {-1: 0.5}}, "-1 must be a whole number of steps"),
        ("topk", {"density": {"late": 0.5}}, "'late' must be a whole number of steps"),
        ("topk", {"density": {"unit": "batch", "values": {0: 0.5}}}, "write {unit: step or epoch"),
        ("topk", {"density": {"unit": "epoch", "values": {0: 0.5}, "steps": 5}}, "write {unit: step or epoch"),
        ("topk", {"density": 0.5}, "0.5 must be a mapping"),
        ("topk", {"density": {"kind": "cosine"}}, "kind='cosine' must be lr, linear, exponential"),
        ("topk", {"density": {"kind": "linear", "to": 0.1}}, "needs either steps or epochs"),
        ("topk", {"density": {"kind": "linear", "to": "a", "steps": 9}}, "to='a' and from=0.01 must be numbers"),
        ("topk", {"density": {"kind": "linear", "to": 1, "steps": 9, "stages": 10}}, "stages=10 must be"),
        ("fft", {"theta": {"kind": "exponential", "to": 0, "steps": 9}}, "between numbers above 0"),
        ("fft", {"bits": {"kind": "lr", "factor": 1.0}}, "drives a share, theta or density"),
        ("fft", {"theta": {"kind": "lr", "factor": 0}}, "needs factor, a number above 0"),
        ("topk", "nosuch", "unknown schedule 'nosuch'; there are: dgc"),
        ("onebit", "dgc", "OneBit has no setting 'density'"),
        ("topk", {"preset": "dgc", "steps": 0}, "needs either steps or epochs, a whole number above 0"),
        ("topk", {}, "schedule={}"),
        ("topk", 7, "schedule=7"),
    ],
)
def test_refused_at_construction(compressor, schedule, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CompressedDDPStrategy(compressor, schedule=schedule)


def test_it_is_part_of_what_ranks_must_agree_on():
    one, other = (RunState.of("topk", schedule={"density": {9: value}}) for value in (0.1, 0.2))
    assert repr(one) != repr(other)


def _attached(schedule, rates=None, epochs=None, compressor="topk"):
    """Ratios of the steps of a bare model."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    compression = attach(model, compressor, schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ratios = []
    for step in range(6):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[step]
        if epochs:
            compression.epoch = epochs[step]
        optimizer.zero_grad()
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        model(data).square().mean().backward()
        optimizer.step()
        ratios.append(round(compression.stats()["ratio"], 2))
    return ratios, model.module.weight.detach().numpy()


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (({"density": {0: 0.25, 2: 0.0625, 5: 0.01}},), [2, 5]),
        (({"density": {"unit": "epoch", "values": {1: 0.25}}}, None, [0, 0, 0, 1, 1, 0]), [3, 5]),
        (({"density": {"kind": "lr", "factor": 10}}, [0.099, 0.099, 0.05, 0.05, 0.05, 0.2]), [1, 2, 5]),
    ],
)
def test_messages_change_with_the_schedule(pools, arguments, changes):
    (ratios, first), (_, second) = pools[2].run(_attached, *arguments)
    assert [step for step in range(1, 6) if ratios[step] != ratios[step - 1]] == changes
    assert (first == second).all()


class Epochs(Callback):
    """What ran in each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append((trainer.current_epoch, trainer.strategy.compression.settings.method.density))


class Decaying(Net):
    """A tenth of the learning rate from the second epoch on."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], 0.1)]


def _trained(schedule, make=Net):
    watch = Epochs()
    fit(CompressedDDPStrategy("topk", schedule=schedule), 9, make, callbacks=[watch], limit_train_batches=3)
    return watch.seen


def test_epochs_of_the_trainer(pools):
    for seen in pools[2].run(_trained, {"density": {"unit": "epoch", "values": {0: 0.5, 1: 0.2}}}):
        assert seen == [(0, 0.5)] * 3 + [(1, 0.2)] * 6 or seen == [(0, 0.5)] * 3 + [(1, 0.2)] * 3 + [(2, 0.2)] * 3


def test_learning_rates_of_the_trainer_from_the_first_step_on(pools):
    for seen in pools[2].run(_trained, {"density": {"kind": "lr", "factor": 16.0}}, Decaying):
        densities = [density for _, density in seen]
        assert densities[:3] == [pytest.approx(0.2, abs=0.08)] * 3
        assert densities[3:] == [pytest.approx(0.92, abs=0.01)] * 6


def test_one_process_follows_it_too(pools):
    (seen,) = pools[1].run(_trained, {"density": {2: 0.5}})
    assert [density for _, density in seen] == [0.01] * 2 + [0.5] * 7


@pytest.mark.filterwarnings("ignore")
def test_lightning_cli_yaml(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  logger: false\n  strategy:\n"
        "    class_path: lightning_compress.CompressedDDPStrategy\n    init_args:\n"
        "      compressor: topk\n      schedule:\n        density: {0: 0.25, 100: 0.0625}\n"
    )
    cli = LightningCLI(Net, args=[f"--config={config}"], run=False)
    schedule = cli.trainer.strategy._settings.options.schedule
    assert schedule.values(Progress(step=100)) == {"density": 0.0625}


@pytest.mark.parametrize(
    ("compressor", "schedule", "values"),
    [
        ("dgc", None, DGC),
        ({"name": "dgc", "density": 0.01}, "dgc", [0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01]),
        ({"name": "dgc", "density": 0.5}, "dgc", [0.5] * 6),
        ("dgc", {"density": {"unit": "epoch", "values": {1: 0.1}}}, [0.001] + [0.1] * 5),
        ("dgc", {"preset": "dgc", "epochs": 5}, [0.25] * 5 + [0.0625]),
    ],
)
def test_dgc_warms_up_as_in_the_paper(compressor, schedule, values):
    settings = RunState.of(compressor, schedule=schedule)
    moments = [settings.options.schedule.values(moment) for moment in at("epoch", 0, 1, 2, 3, 4, 5)]
    assert [each["density"] for each in moments] == values


@pytest.mark.parametrize(
    ("without", "schedule"), [({}, "none"), ({"density": 0.01}, None), ({"sparsifier": "topk"}, None)], ids=str
)
def test_dgc_without_warm_up(without, schedule):
    assert not RunState.of({"name": "dgc", **without}, schedule=schedule).options.schedule.courses


def _warmed_up(schedule):
    watch = Epochs()
    fit(CompressedDDPStrategy("dgc", schedule=schedule), 12, callbacks=[watch], limit_train_batches=2)
    return watch.seen


def test_dgc_warms_up_by_the_epochs_of_the_trainer(pools):
    for seen in pools[2].run(_warmed_up, None):
        by_epoch = dict(seen)
        assert [by_epoch[epoch] for epoch in range(6)] == DGC
    assert {density for _, density in pools[1].run(_warmed_up, "none")[0]} == {0.001}


def _warned(**given):
    """What the log says when a bare model warms up, and the densities by epochs that are set and not."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lightning_compress").addHandler(handler)
    ratios = []
    for epochs in (None, [0, 1, 2, 3, 4, 5]):
        ratios.append(_attached(given.get("schedule"), None, epochs, given.get("compressor", "dgc"))[0])
    logging.getLogger("lightning_compress").removeHandler(handler)
    return [each for each in said if "schedule='none'" in each], ratios


def test_a_bare_model_is_told_its_epoch(pools):
    (said, (unset, told)), (others, _) = pools[2].run(_warned)
    assert len(said) == 2
    assert not others
    assert len(set(unset)) == 1
    assert told == sorted(told)
    assert told[4] > 20 * told[0]


def _silent():
    return _warned(schedule={"preset": "dgc", "steps": 1}), _warned(schedule="none")


def test_a_bare_model_warms_up_by_steps_or_not_at_all(pools):
    for by_steps, never in pools[2].run(_silent):
        assert not by_steps[0]
        assert not never[0]
        assert by_steps[1][0][4] > 20 * by_steps[1][0][0]
        assert len(set(never[1][0])) == 1


def test_dgc_goes_on_from_a_run_without_warm_up():
    """Of an earlier version, in which it was a setting of the method."""
    made = {
        warmup: Compression(trained(nn.Linear(4, 4)), RunState.of("dgc", schedule=warmup), run_threads(1, alone)[0])
        for warmup in ("none", None)
    }
    saved = made["none"].state_dict()
    saved["running"]["compressor"]["warmup"] = False
    made[None].load_state_dict(saved)
    densities = []
    for epoch in (7, 8):
        made[None].epoch = epoch
        made[None].count(0, 0)
        densities.append(made[None].settings.method.density)
        made[None].roll_back()
    assert densities == [0.001, 0.001]


def test_values_of_numpy_are_saved_and_gone_on_with(tmp_path):
    densities = np.geomspace(0.1, 0.001, 3)
    settings = RunState.of({"name": "topk", "density": densities[0]}, schedule={"density": {0: densities[1]}})
    made, again = (Compression(trained(nn.Linear(4, 4)), settings, run_threads(1, alone)[0]) for _ in range(2))
    made.count(0, 0)
    assert made.settings.method.density == densities[1]
    made.retune(density=densities[2])
    torch.save(made.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.next_settings.method.density == densities[2]
    kind = Enum("Kind", {"A": "a"}, type=str)
    assert plain({"a": [np.float32(0.5), (np.int64(3),)], "b": kind.A}) == {"a": [0.5, (3,)], "b": kind.A}


def alone(collective):
    return collective
