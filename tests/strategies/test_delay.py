"""``CompressedDDPStrategy(delay=1)``: Lightning's loop around averages that are applied one step later."""

import contextlib
import logging
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from torch import nn
from torch.utils.data import DataLoader

from lightning_compress import CompressedDDPStrategy
from lightning_compress.codecs import Codec, OneBit, TopK
from tests.conformance.test_interrupted import STEPS, Fails, Kept
from tests.conformance.test_one_rank_fails import FailsOnOne
from tests.conformance.training import ByStep, outcome, train
from tests.engine.test_delayed import ALL, MOMENTUM, RATE, batches, delayed_sgd, flat, network
from tests.engine.test_modes import TwoOptimizers
from tests.helpers.lives import live
from tests.helpers.training import Net, fit, quiet_trainer
from tests.strategies.test_report import Measures, _said
from tests.strategies.test_resume import KEEPERS, METHODS, interrupted
from tests.strategies.test_resume import fit as fit_epochs
from tests.turns import by_turns

DELAY = {"delay": 1}


class Small(pl.LightningModule):
    """The network of the reference, which writes its parameters down after each optimizer step."""

    def __init__(self):
        super().__init__()
        self.net, self.path = network(), []

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE, momentum=MOMENTUM)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.path.append(flat(self.net).numpy())


def path_of(compressor, clip, accumulate, scaled, steps):
    """Parameters after each step on this rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    model, plugins = Small(), [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []
    if scaled:
        plugins[0].forward_context = contextlib.nullcontext  # a scale, but no half precision
    trainer = quiet_trainer(
        CompressedDDPStrategy(compressor, min_numel=1, bucket_cap_mb=0.005, **DELAY),
        max_steps=steps,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        plugins=plugins,
        use_distributed_sampler=False,
    )
    trainer.fit(model, DataLoader(batches(dist.get_rank(), steps * accumulate), batch_size=None))
    return model.path


@pytest.mark.parametrize(
    ("compressor", "clip", "accumulate", "scaled"),
    [
        ("none", None, 1, False),
        (ALL, 0.5, 1, False),
        (ALL, None, 3, False),
        (ALL, 0.5, 2, True),
        ("none", 0.5, 1, True),
    ],
    ids=str,
)
def test_a_trainer_does_delayed_sgd_bit_for_bit(pools, compressor, clip, accumulate, scaled):
    expected = delayed_sgd(2, accumulate, steps=12, clip=clip)
    for path in pools[2].run(path_of, compressor, clip, accumulate, scaled, 12):
        assert len(path) == 12
        assert all(np.array_equal(ours, theirs.numpy()) for ours, theirs in zip(path, expected, strict=True))


class Head(Small):
    """The optimizer has the last layer alone."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[-1].parameters(), RATE)


class ClosureFirst(Small):
    """Gradients are computed before the optimizer steps."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer.step()


class EverySecond(Small):
    """Every second batch's gradients are not to be applied; as in Lightning's page on optimization."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def loop(make, steps=6):
    """Parameters after each step on this rank, and the error that ended the fit."""
    model, said = make(), ""
    strategy = CompressedDDPStrategy(ALL, min_numel=1, bucket_cap_mb=0.005, **DELAY)
    trainer = quiet_trainer(strategy, max_steps=steps, use_distributed_sampler=False)
    try:
        trainer.fit(model, DataLoader(batches(dist.get_rank(), steps), batch_size=None))
    except RuntimeError as error:
        said = str(error)
    return model.path, said


@pytest.mark.parametrize("size", [2, 3])
def test_a_head_alone_is_trained(pools, size):
    first, last = flat(network()).numpy(), flat(network()[-1]).numel()
    for path, said in pools[size].run(loop, Head):
        assert not said
        moved = [np.flatnonzero(each != before) for before, each in zip([first, *path], path, strict=False)]
        assert [len(each) > 0 for each in moved] == [False] + [True] * 5  # the first step applies nothing
        assert all(each.min() >= len(first) - last for each in moved[1:])


def test_gradients_may_be_computed_before_the_step(pools):
    expected = [each.numpy() for each in delayed_sgd(2, steps=6)]
    for path, said in pools[2].run(loop, ClosureFirst):
        assert not said
        assert np.array_equal(path, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_a_backward_without_a_step_is_refused_on_every_rank(pools, size):
    for path, said in pools[size].run(loop, EverySecond):
        assert len(path) == 2
        assert "a second backward began before the optimizer stepped" in said


CODECS = [case for case in METHODS if isinstance(case.codec, Codec)]


@pytest.mark.parametrize(("case", "size"), by_turns(CODECS, (2, 3, 4), 1))
def test_resumes_bit_for_bit(pools, tmp_path, case, size):
    for same, said in pools[size].run(partial(interrupted, **DELAY), str(tmp_path), case.codec):
        assert same
        assert not said
    kept = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["lightning_compress"]
    parts = [torch.load(path, weights_only=True) for path in tmp_path.glob("epoch=0.ckpt.lc/*")]
    assert all(each["tree"]["in_flight"]["means"] for each in parts or [kept])


def keeper(folder, name):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # large enough to overflow at first
    more = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]} if name == "scaler" else {}
    given = {"none": {"compressor": "none"}, "scaler": {"compressor": TopK(0.05)}}.get(name) or KEEPERS[name]
    return interrupted(folder, **given, **more, **DELAY)


@pytest.mark.parametrize(
    "name", ["none", "scaler", "dgc", "onebit_adam", "ef21", "adagrad", "schedule", "warmup", "nested"]
)
def test_resumes_bit_for_bit_with_everything_that_is_kept(pools, tmp_path, name):
    assert all(same and not said for same, said in pools[2].run(keeper, str(tmp_path), name))


def in_the_middle(folder):
    """A checkpoint in the middle of an epoch, and the run that goes on from it."""
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    options = {"settings": {**DELAY, "error_feedback": True}, "max_epochs": -1, "max_steps": STEPS}
    whole = train("onebit", ByStep, callbacks=[saves], enable_checkpointing=True, **options)
    again = train("onebit", ByStep, resume=f"{folder}/step=5.ckpt", **options)
    return outcome(*whole), outcome(*again)


def test_resumes_in_the_middle_of_an_epoch(pools, tmp_path):
    for whole, again in pools[2].run(in_the_middle, str(tmp_path)):
        assert again["committed"] == whole["committed"] == STEPS
        assert whole["kept"] == again["kept"] > 0
        assert np.array_equal(again["parameters"], whole["parameters"])


def at_first(folder, delay, **settings):
    """The first steps of a run from a checkpoint: how far each moved the parameters; and the last state."""

    class Watched(Net):
        moved = ()

        def on_train_batch_start(self, batch, batch_idx):
            self.before = flat(self)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.moved = (*self.moved, float((flat(self) - self.before).abs().max()))

    make = Watched()
    _, strategy, _ = fit_epochs(
        f"{folder}/again", OneBit(), f"{folder}/epoch=0.ckpt", make=lambda: make, delay=delay, **settings
    )
    return make.moved, sorted(strategy.compression.state_dict())


def first_epoch(folder, **settings):
    fit_epochs(folder, OneBit(), epochs=1, **settings)


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_in_flight_is_applied_on_any_number_of_ranks(pools, tmp_path, size):
    pools[3].run(partial(first_epoch, **DELAY), str(tmp_path))
    for moved, keys in pools[size].run(at_first, str(tmp_path), 1):
        assert all(moved)
        assert "in_flight" in keys


def without_delay(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning_compress.engine.compression").addHandler(handler)
    moved, keys = at_first(folder, 0)
    return all(moved), "in_flight" in keys, any("average is lost: this run has delay=0" in each for each in lines)


def test_without_a_delay_what_was_in_flight_is_lost_and_said_so(pools, tmp_path):
    pools[2].run(partial(first_epoch, **DELAY), str(tmp_path))
    assert pools[2].run(without_delay, str(tmp_path)) == [(True, False, True), (True, False, False)]


def test_with_a_delay_a_run_without_one_goes_on_after_a_step_that_applies_nothing(pools, tmp_path):
    pools[2].run(first_epoch, str(tmp_path))
    for moved, keys in pools[2].run(at_first, str(tmp_path), 1):
        assert [bool(each) for each in moved] == [False, True, True]
        assert "in_flight" in keys


def goes_on(folder, compressor, **settings):
    """Parameters after the first step of a run from a checkpoint, which applies what was in flight; what is said."""

    class Watched(Net):
        path = ()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.path = (*self.path, flat(self).numpy())

    make = Watched()
    _, _, said = fit_epochs(
        f"{folder}/again", compressor, f"{folder}/epoch=0.ckpt", make=lambda: make, **{**DELAY, **settings}
    )
    return make.path[0], said


def both_go_on(folder, first, second, **settings):
    return goes_on(folder, first, **settings), goes_on(folder, second, **settings)


def trained_with(folder, compressor, **settings):
    fit_epochs(folder, compressor, epochs=1, **DELAY, **settings)


SLOW = {"name": "dgc", "density": 0.05}
LOST = "The average in flight is lost; only delay=1 and the compressor that made it can apply it"


@pytest.mark.parametrize(
    ("before", "after", "state", "size"),
    [
        (OneBit(), TopK(0.05), "sidecar", 2),
        (OneBit(), TopK(0.05), "mean", 3),
        ("none", OneBit(), "sidecar", 3),
    ],
    ids=["files", "mean", "none"],
)
def test_another_compressor_applies_what_was_in_flight(pools, tmp_path, before, after, state, size):
    """The first step applies a mean of gradients, whichever method made it and makes the next ones."""
    pools[3].run(partial(trained_with, state=state), str(tmp_path), before)
    ranks = pools[size].run(partial(both_go_on, state=state), str(tmp_path), before, after)
    for (whole, nothing), (path, _) in ranks:
        assert np.array_equal(path, whole)
        assert not nothing
    (said,) = ranks[0][1][1]
    assert "Error feedback begins again from zero" in said
    assert "in flight" not in said


@pytest.mark.parametrize(
    ("before", "after", "settings", "size"),
    [
        (SLOW, OneBit(), {}, 2),
        (OneBit(), SLOW, {}, 3),
        (OneBit(), TopK(0.05), {"delay": 0}, 2),
    ],
    ids=["from_dgc", "to_dgc", "without_delay"],
)
def test_what_was_in_flight_is_lost_where_it_is_no_gradient_and_said_so(pools, tmp_path, before, after, settings, size):
    pools[size].run(trained_with, str(tmp_path), before)
    (_, (said,)), *_ = pools[size].run(partial(goes_on, **settings), str(tmp_path), after)
    assert LOST in said


def test_nothing_is_said_where_nothing_was_in_flight(pools, tmp_path):
    pools[2].run(first_epoch, str(tmp_path))
    (_, (said,)), _ = pools[2].run(partial(goes_on, delay=0), str(tmp_path), TopK(0.05))
    assert "in flight" not in said


def _whole():
    return outcome(*train("onebit", ByStep, max_epochs=-1, max_steps=STEPS, settings=DELAY))


def _again(folder):
    options = {"settings": DELAY, "max_epochs": -1, "max_steps": STEPS}
    return outcome(*train("onebit", ByStep, resume=f"{folder}/on_exception.ckpt", **options)), _whole()


def _fails(folder, make=Fails):
    options = {"settings": DELAY, "max_epochs": -1, "max_steps": STEPS, "enable_checkpointing": True}
    train("onebit", make, callbacks=[Kept(folder)], **options)


def _all_fail(folder):
    with contextlib.suppress(ArithmeticError):
        _fails(folder)
    return _again(folder)


def test_an_exception_on_all_ranks(pools, tmp_path):
    for again, whole in pools[2].run(_all_fail, str(tmp_path)):
        assert again["global_step"] == again["committed"] == STEPS
        assert np.array_equal(again["parameters"], whole["parameters"])


def test_an_exception_on_one_rank(pools, tmp_path):
    """Rank 0 takes the step in which rank 1 fails; only that step's average is lost."""
    codes, said = live(2, tmp_path / "ranks", _fails, str(tmp_path), FailsOnOne, seconds=10)
    assert codes == [1, 1], said
    assert "ArithmeticError: no more" in said[1]
    assert "terminate called" not in said[0] + said[1]
    kept = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("on_exception.ckpt.lc/*.pt"))]
    assert ["in_flight" in each["tree"] for each in kept] == [False, True]
    (ours, whole), (theirs, _) = pools[2].run(_again, str(tmp_path))
    assert ours["global_step"] == STEPS
    assert ours["committed"] == STEPS - 1
    assert np.array_equal(ours["parameters"], theirs["parameters"])
    assert ours["finite"]
    assert np.linalg.norm(ours["parameters"] - whole["parameters"]) < 0.1 * np.linalg.norm(whole["parameters"])


class Newton(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def refused(make, settings):
    try:
        fit(CompressedDDPStrategy("topk", **DELAY, **settings), 2, make)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (TwoOptimizers, {}, "delay=1 does not work with manual optimization"),
        (Newton, {}, "delay=1 does not work with LBFGS"),
        (Net, {"find_unused_parameters": True}, "Set find_unused_parameters=False and use every parameter"),
        (Net, {"static_graph": True}, "Set static_graph=False and use every parameter"),
        (Net, {"rules": [{"kind": "conv", "compressor": "powersgd"}]}, "which needs several rounds of messages"),
    ],
    ids=["manual", "lbfgs", "unused", "static", "reducer"],
)
def test_what_cannot_work_is_refused_on_every_rank(pools, make, settings, said):
    assert all(said in each for each in pools[2].run(refused, make, settings))


def said():
    assert rank_zero_module.log
    return _said(CompressedDDPStrategy("topk", **DELAY), callbacks=[Measures()])[0]


def test_a_fit_says_that_averages_are_late_and_that_the_last_one_is_not_applied(pools):
    lines = pools[2].run(said)[0]
    assert sum("applied one step later" in line for line in lines) == 1
    assert "lightning_compress: delay: the average of the last step was not applied; a checkpoint keeps it" in lines
    assert any(line.startswith("lightning_compress: expected: ") for line in lines)
