"""Local steps in Lightning, in real processes."""

import copy
import os
import pickle
import signal
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_compress import CommunicationMonitor, LocalSGDStrategy
from lightning_compress.strategies.constructors import LOCAL_STEPS
from tests.helpers.lives import live
from tests.helpers.training import LATER, Net, digits, loader, parameters, quiet_trainer, saving_on_exception
from tests.strategies.test_periodic import (
    ByStep,
    Stream,
    Terminated,
    TwoOptimizers,
    Validated,
    Watch,
    fit,
    fit_again,
    fit_with_swa,
)

TOPK = {"name": "topk", "density": 0.1}
KINDS = {
    **{name: {**given, "sync_every": 3} for name, given in LOCAL_STEPS.items()},
    "post_local_sgd": {**LOCAL_STEPS["post_local_sgd"], "sync_every": 3, "averaged_steps": 2},
    "streaming": {"sync_every": 3, "fragments": 2, "delay": 2, "outer": "nesterov", "compressor": TOPK},
    "mean": {"sync_every": 3, "evaluate": "mean", "compressor": "onebit"},
    "averaged": {
        "sync_every": 3,
        "fragments": 2,
        "delay": 2,
        "outer": "nesterov",
        "compressor": TOPK,
        "average_gradients": ["*.bias", {"kind": "norm"}],
    },
}
"""Arguments of strategies whose rounds are short."""


def strategy(kind, **more):
    return LocalSGDStrategy(**{**KINDS[kind], **more})


def _trains(kind):
    watch = Watch()
    trainer, model = fit(strategy(kind), make=Validated, callbacks=[watch])
    return watch.trained, watch.evaluated, parameters(model).numpy(), trainer.strategy.comm_stats()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_evaluate_one_model_and_end_on_one(pools, kind):
    ranks = pools[2].run(_trains, kind)
    (first, evaluated, end, stats), (second, others, last, _) = ranks
    assert np.array_equal(end, last)
    assert np.isfinite(end).all()
    assert all(np.array_equal(each, other) for each, other in zip(evaluated, others, strict=True))
    apart = [not np.array_equal(each, other) for each, other in zip(first, second, strict=True)]
    assert apart == {
        "post_local_sgd": [False, False, True, True, False, True, True, False],
        "streaming": [True] * 8,
        "averaged": [True] * 8,
    }.get(kind, [True, True, False, True, True, False, True, True])
    assert stats["steps"] == (2 if kind == "post_local_sgd" else 3)  # the last round is shorter
    assert stats["total_bytes_dense"] == pytest.approx(8 * 4 * end.size)
    assert stats["total_bytes_sent"] < 0.7 * stats["total_bytes_dense"]


def _says():
    own = LocalSGDStrategy(4, compressor={"name": "rotated", "bits": 8}, exchange="all_gather")
    fit(own, limit_val_batches=0, max_epochs=1)
    return own.comm_stats()["summary"], own.synchroniser._forecast.ratio, own.comm_stats()["ratio"]


def test_bytes_are_told_by_round_and_by_step(pools):
    for summary, foretold, ratio in pools[2].run(_says):
        assert " x fewer bytes a round than float32, " in summary
        assert summary.endswith(" x fewer than DDP in its 4 steps")
        assert foretold == pytest.approx(ratio, rel=0.1)  # of all four steps, as in the summary
        assert float(summary.split()[-9]) == pytest.approx(foretold, rel=0.05)


def _averaged(steps):
    options = {"max_steps": steps, "max_epochs": 9, "make": lambda _: Net()}
    _, ddp = fit(DDPStrategy(), **options)
    _, ours = fit(LocalSGDStrategy(averaged_steps=100), **options)
    return (parameters(ddp) - parameters(ours)).abs().max().item()


def test_averaged_steps_are_those_of_ddp(pools):
    assert max(pools[3].run(_averaged, 6)) < 1e-6


class Branches(Net):
    """One layer is used on rank 0 only, one on none."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.some, self.none = torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)

    def forward(self, images):
        found = super().forward(images)
        return self.some(found) if dist.get_rank() == 0 else found


def _unused():
    options = {"max_steps": 4, "make": Branches}
    _, ddp = fit(DDPStrategy(find_unused_parameters=True), **options)
    _, ours = fit(LocalSGDStrategy(averaged_steps=100), **options)
    assert ours.none.weight.grad is None
    return (parameters(ddp) - parameters(ours)).abs().max().item()


def test_averaged_steps_leave_alone_what_no_rank_uses(pools):
    assert max(pools[2].run(_unused)) < 1e-6


class Statistics(Callback):
    """Running means of batch norm after each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(module.body[1].running_mean.clone().numpy())


def _statistics():
    look = Statistics()
    fit(LocalSGDStrategy(sync_every=2), callbacks=[look])
    return look.seen


def test_buffers_are_averaged_where_the_models_are(pools):
    first, second = pools[2].run(_statistics)
    same = [np.array_equal(each, other) for each, other in zip(first, second, strict=True)]
    assert same == [False, True] * 4


QUIET = ("diloco", "streaming")
"""Kinds whose run is compared with one that saves nothing, too."""


def _resumes(kind, folder, scaled, steps=(2, 3, 5)):
    def plugins():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + dist.get_rank()), growth_interval=2)
        return [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []

    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    _, whole = fit(strategy(kind), make=ByStep, callbacks=[save], plugins=plugins())
    same = []
    if steps and kind in QUIET:
        _, quiet = fit(strategy(kind), make=ByStep, plugins=plugins())
        same.append(parameters(quiet).equal(parameters(whole)))
    for step in steps:
        _, again = fit(strategy(kind), make=ByStep, resume=f"{folder}/step={step}.ckpt", plugins=plugins())
        same.append(parameters(again).equal(parameters(whole)))
    return same


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=() if size == 2 + number % 2 else pytest.mark.thorough)
        for number, kind in enumerate(KINDS)
        for size in (2, 3)
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(pools, tmp_path, kind, size):
    assert pools[size].run(_resumes, kind, str(tmp_path), False) == [[True] * (3 + (kind in QUIET))] * size


@pytest.mark.parametrize("kind", ["diloco", "averaged", pytest.param("streaming", marks=pytest.mark.thorough)])
def test_so_it_is_with_a_scaler_of_each_ranks_own(pools, tmp_path, kind):
    assert pools[2].run(_resumes, kind, str(tmp_path), True) == [[True] * (3 + (kind in QUIET))] * 2


def _elsewhere(path, kind="diloco"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        trainer = quiet_trainer(strategy(kind), max_steps=8)
        model = ByStep("adamw")
        trainer.fit(model, loader(digits()), ckpt_path=path)
    said = [str(each.message) for each in caught if "begin from the checkpoint's own model" in str(each.message)]
    return said, parameters(model).numpy(), trainer.strategy


def _goes_on(path, kind):
    *found, strategy = _elsewhere(path, kind)
    return *found, strategy.attempts, strategy.comm_stats()


def test_another_number_of_ranks_begins_from_the_anchors_and_counts_the_runs_steps(pools, tmp_path):
    pools[2].run(_resumes, "post_local_sgd", str(tmp_path), False, ())
    ranks = pools[3].run(_goes_on, f"{tmp_path}/step=4.ckpt", "post_local_sgd")
    assert "the checkpoint is of 2 ranks, and this run has 3" in ranks[0][0][0]
    assert all(np.array_equal(end, ranks[0][1]) for _, end, _, _ in ranks)
    for _, end, attempts, stats in ranks:
        assert attempts == 8
        assert stats["steps"] == 2  # after a step that is left of one round, and after three
        assert stats["total_bytes_dense"] == pytest.approx(4 * 4 * end.size * 4 / 3, rel=1e-4)


def _after(folder):
    """A checkpoint that is saved when the fit is over, and whose run goes on."""
    trainer, model = fit(strategy("diloco"), make=ByStep, max_epochs=1)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    again, other = fit(strategy("diloco"), make=ByStep, resume=f"{folder}/after.ckpt", max_epochs=3)
    start = torch.load(f"{folder}/after.ckpt", weights_only=True)["state_dict"]
    assert all(start[name].equal(each) for name, each in model.state_dict().items())
    return again.strategy.attempts, parameters(other).numpy()


def test_a_checkpoint_that_is_saved_after_the_fit_goes_on(pools, tmp_path):
    first, second = pools[2].run(_after, str(tmp_path))
    assert first[0] == 12
    assert np.array_equal(first[1], second[1])


@pytest.mark.parametrize(("kind", "swa"), [("diloco", False), ("streaming", False), ("diloco", True)])
def test_a_run_that_had_ended_ends_again_on_its_model(pools, tmp_path, kind, swa):
    but = (
        "running_" if kind == "streaming" else "nothing"
    )  # counted when what travels is back, of batches that are gone
    ranks = pools[2].run(fit_again, partial(strategy, kind), str(tmp_path), swa, but)
    for ended, again in ranks:
        np.testing.assert_allclose(again, ended, atol=1e-6 if swa else 0)
        assert np.array_equal(again, ranks[0][1])


def test_what_swa_leaves_is_evaluated_in_its_epoch_and_saved_at_its_end(pools, tmp_path):
    ranks = pools[2].run(fit_with_swa, partial(strategy, "diloco"), str(tmp_path))
    for ended, saved, evaluated, first in ranks:
        np.testing.assert_allclose(saved, ended, atol=1e-6)
        np.testing.assert_allclose(evaluated, first, atol=1e-6)
        assert np.array_equal(evaluated, ranks[0][2])


class FailsOnOne(ByStep):
    """Rank 1 raises in the middle of a round."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 4 and dist.get_rank() == 1:
            raise ArithmeticError("no more")
        return super().training_step(batch, batch_idx)


def _fails(kind, folder):
    save = saving_on_exception(folder)
    fit(strategy(kind), make=FailsOnOne, callbacks=[save])


@pytest.mark.parametrize("kind", [pytest.param("diloco", marks=pytest.mark.thorough), "streaming"])
def test_an_exception_in_one_rank_stops_all_and_what_they_save_is_not_taken_for_one_state(pools, tmp_path, kind):
    codes, said = live(2, tmp_path / "ranks", _fails, kind, str(tmp_path), seconds=20)
    assert codes == [1, 1], said
    assert "ArithmeticError: no more" in said[1]
    assert "terminate called" not in said[0] + said[1]
    (warned, first, *_), (_, second, *_) = pools[2].run(_goes_on, f"{tmp_path}/stopped.ckpt", kind)
    assert warned
    assert np.array_equal(first, second)


class Overflows(ByStep):
    """One rank's loss is not finite in one step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.global_step == 3 and dist.get_rank() == 1 else loss


def _overflows(kind, scaled):
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))] if scaled else []
    watch = Watch()
    trainer, model = fit(strategy(kind), make=Overflows, callbacks=[watch], plugins=plugins, max_epochs=4)
    return watch.trained, parameters(model).numpy(), trainer.strategy.attempts, trainer.strategy.comm_stats()


@pytest.mark.parametrize("kind", ["diloco", "streaming"])
def test_a_rank_that_overflows_goes_back_to_the_anchors_with_all(pools, kind):
    ranks = pools[2].run(_overflows, kind, False)
    assert all(np.isfinite(end).all() for _, end, _, _ in ranks)
    assert np.array_equal(ranks[0][1], ranks[1][1])
    assert all(stats["nonfinite_steps"] >= 1 for *_, stats in ranks)
    assert np.isnan(ranks[1][0][3]).any()
    assert np.isfinite(ranks[1][0][-1]).all()
    if kind == "diloco":
        assert np.array_equal(ranks[0][0][5], ranks[0][0][2])


class NanInput(Validated):
    """One rank's batch is not finite in one step of those with averaged gradients, nor what its norms count then."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        if self.trainer.global_step == 3 and dist.get_rank() == 1:
            images = images * float("nan")
        return super().training_step((images, labels), batch_idx)

    def on_validation_epoch_start(self):
        self.normed = self.body[1].running_mean.numpy().copy()


def _averages_nan(policy, folder):
    watch, save = Watch(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    own = LocalSGDStrategy(3, averaged_steps=6, on_nonfinite=policy)
    _, model = fit(own, make=NanInput, callbacks=[watch, save], limit_train_batches=4, max_epochs=3)
    saved = torch.load(f"{folder}/epoch=0.ckpt", weights_only=True)["state_dict"]
    first = saved["body.1.running_mean"].isfinite().all().item()
    finite = all(each.isfinite().all().item() for each in model.state_dict().values())
    return watch.trained, first, finite, model.normed, own.comm_stats()["nonfinite_steps"]


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_that_is_not_finite_costs_all_one_step_with_averaged_gradients(pools, tmp_path, size):
    ranks = pools[size].run(_averages_nan, "skip", str(tmp_path))
    for trained, saved, finite, _, left_out in ranks:
        assert np.array_equal(trained[3], trained[2])
        assert not np.array_equal(trained[4], trained[3])
        assert saved
        assert finite
        assert left_out == 1
        assert all(np.array_equal(trained[step], ranks[0][0][step]) for step in range(6))


def test_what_is_to_be_done_about_it_is_done(pools, tmp_path):
    assert not any(finite for _, _, finite, *_ in pools[2].run(_averages_nan, "pass", str(tmp_path)))
    with pytest.raises(Exception, match="step 3: the mean of the ranks' gradients is not finite; on_nonfinite='skip'"):
        pools[2].run(_averages_nan, "raise", str(tmp_path))


class SeesNorms(Validated):
    def on_validation_epoch_start(self):
        self.normed = self.body[1].running_mean.numpy().copy()


def _in_common(folder):
    look, save = Statistics(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    _, model = fit(LocalSGDStrategy(averaged_steps=100), make=SeesNorms, callbacks=[look, save], max_epochs=1)
    saved = torch.load(f"{folder}/epoch=0.ckpt", weights_only=True)["state_dict"]
    return look.seen[-1], model.normed, saved["body.1.running_mean"].numpy()


@pytest.mark.parametrize("size", [2, 3])
def test_while_gradients_are_averaged_what_is_evaluated_is_what_is_saved(pools, tmp_path, size):
    ranks = pools[size].run(_in_common, str(tmp_path))
    mean = np.mean([own for own, *_ in ranks], axis=0)
    assert not np.allclose(ranks[0][0], mean)
    for _, evaluated, saved in ranks:
        np.testing.assert_allclose(evaluated, mean, rtol=1e-5)
        assert np.array_equal(evaluated, saved)


class Finite(Callback):
    """Whether this rank's model is, after each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(bool(parameters(module).isfinite().all()))


def _recovers(fragments, delay):
    look, options = Finite(), {"limit_val_batches": 0, "max_epochs": 5}  # an evaluation has all fragments come back
    fit(LocalSGDStrategy(6, fragments=fragments, delay=delay), make=Overflows, callbacks=[look], **options)
    return look.seen


@pytest.mark.parametrize(("fragments", "delay"), [(3, 0), (2, 2)])
def test_fragments_that_are_not_finite_do_not_spoil_each_other_for_ever(pools, fragments, delay):
    first, second = pools[2].run(_recovers, fragments, delay)
    assert all(first)
    assert all(second[-12:])


def _evaluates(folder):
    save, watch = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1), Watch()
    fit(strategy("mean"), make=Overflows, callbacks=[save, watch])
    saved = torch.load(f"{folder}/step=4.ckpt", weights_only=True)["state_dict"]
    return watch.trained, watch.evaluated, [each.isfinite().all().item() for each in saved.values()]


def test_a_mean_that_is_not_finite_is_not_evaluated_or_saved(pools, tmp_path):
    (first, own, saved), (second, others, _) = pools[2].run(_evaluates, str(tmp_path))
    assert np.isfinite(first[3]).all()
    assert np.isnan(second[3]).any()
    assert all(saved)
    assert np.array_equal(own[-4], first[2])  # what they had in common last
    assert np.isfinite(own[-1]).all()
    assert all(np.array_equal(each, other) for each, other in zip(own, others, strict=True))


class Registers(Validated):
    """Buffers of all kinds; a module may put a new tensor in a buffer's place."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.register_buffer("rotations", torch.polar(torch.ones(4), torch.arange(4) * 0.3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("causal", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("seen", torch.zeros(2))
        self.evaluated = []

    def training_step(self, batch, batch_idx):
        self.seen = self.seen + 1 + dist.get_rank()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(self.seen.tolist())


def _registers(evaluate, buffers=None):
    _, model = fit(LocalSGDStrategy(3, evaluate=evaluate, buffers=buffers), make=Registers)
    fresh = Registers("sgd")
    kept = [getattr(model, name).equal(getattr(fresh, name)) for name in ("rotations", "mask", "causal")]
    return kept, model.evaluated[-1], model.seen.tolist()


@pytest.mark.parametrize(("evaluate", "seen"), [("anchor", 6.0), ("mean", 8.0)])
def test_buffers_that_do_not_change_stay_and_new_ones_in_their_place_are_those_of_rank_0(pools, evaluate, seen):
    assert pools[2].run(_registers, evaluate) == [([True] * 3, [seen] * 2, [8.0] * 2)] * 2


@pytest.mark.parametrize(("evaluate", "seen"), [("anchor", 9.0), ("mean", 12.0)])
def test_buffers_that_a_user_names_are_averaged(pools, evaluate, seen):
    assert pools[2].run(_registers, evaluate, {"se*": "mean"}) == [([True] * 3, [seen] * 2, [12.0] * 2)] * 2


class Grows(Net):
    """A buffer changes its shape."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.register_buffer("cache", torch.zeros(2))

    def on_train_batch_end(self, *_):
        self.cache = torch.zeros(3)


def test_a_scaler_that_skips_on_one_rank_does_not_shift_its_rounds(pools):
    ranks = pools[2].run(_overflows, "local_sgd", True)
    assert [attempts for _, _, attempts, _ in ranks] == [16, 16]
    assert np.array_equal(ranks[1][0][3], ranks[1][0][2])  # skipped
    for step in (2, 5, 8, 11):
        assert np.array_equal(ranks[0][0][step], ranks[1][0][step])
    assert all(stats["nonfinite_steps"] == 0 for *_, stats in ranks)


class Pretrained(ByStep):
    """A hook loads weights, the same on all ranks."""

    def __init__(self, optimizer, hook="on_fit_start"):
        super().__init__(optimizer)
        setattr(self, hook, self.load)
        self.before = []

    def load(self):
        with torch.no_grad():
            for each in self.parameters():
                each.mul_(0.5)

    def validation_step(self, batch, batch_idx):
        self.before.append(parameters(self).numpy())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def _pretrained(kind, hook):
    torch.manual_seed(1)
    wanted = 0.5 * parameters(Pretrained("sgd"))
    _, model = fit(strategy(kind), make=lambda _: Pretrained("sgd", hook), max_epochs=1)
    sane = hook == "on_train_start" or np.array_equal(model.before[0], wanted.numpy())
    return sane, (parameters(model) - wanted).abs().max().item() < 1e-6


@pytest.mark.parametrize("kind", ["diloco", "sparseloco", "streaming"])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_weights_that_hooks_load_are_what_training_begins_with(pools, kind, hook):
    assert pools[2].run(_pretrained, kind, hook) == [(True, True)] * 2


def _loads_after_a_checkpoint(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    _, model = fit(strategy("diloco", state="none"), lambda _: Pretrained("sgd", "no_hook"), callbacks=[save])
    wanted = 0.5 * parameters(model)
    _, again = fit(strategy("diloco", state="none"), lambda _: Pretrained("sgd"), f"{folder}/step=4.ckpt")
    return (parameters(again) - wanted).abs().max().item() < 1e-6


class LoadsByRank(Pretrained):
    """Other weights on each rank."""

    def load(self):
        with torch.no_grad():
            self.head[0].bias.fill_(dist.get_rank())


class Teacher(ByStep):
    """A frozen copy follows what is trained, as in BYOL; a backbone stands still."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.backbone = torch.nn.Linear(200, 200).requires_grad_(False)
        self.evaluated = []

    def training_step(self, batch, batch_idx):
        for mine, other in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(parameters(self.teacher).numpy())


def _teaches(kind):
    trainer, model = fit(strategy(kind), make=Teacher)
    before = parameters(model.backbone)
    torch.manual_seed(1)
    still = before.equal(parameters(Teacher("adamw").backbone))
    sent = trainer.strategy.comm_stats()["total_bytes_sent"]
    return model.evaluated, parameters(model.teacher).numpy(), still, sent


@pytest.mark.parametrize("kind", ["local_sgd", "mean", "streaming"])
def test_frozen_parameters_that_follow_are_evaluated_and_end_as_one(pools, kind):
    (seen, end, still, sent), (others, last, _, _) = pools[2].run(_teaches, kind)
    assert all(np.array_equal(own, other) for own, other in zip(seen, others, strict=True))
    assert np.array_equal(end, last)
    assert still
    assert sent < 3 * 4 * 200 * 200  # once would be the backbone in float32, and there were three means


def _keeps_once(folder, trigger):
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, **trigger)
    _, whole = fit(strategy("local_sgd"), make=Teacher, callbacks=[save])
    (path,) = Path(folder).glob(f"step=4.ckpt.lc/*-4.rank{dist.get_rank()}.pt")
    kept = torch.load(path, weights_only=True)["tree"]["model"]
    _, again = fit(strategy("local_sgd", strict_state=True), Teacher, f"{folder}/step=4.ckpt")
    return [name in kept for name in ("teacher.0.bias", "backbone.bias")], parameters(again).equal(parameters(whole))


@pytest.mark.parametrize("trigger", [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": False}], ids=str)
def test_what_is_frozen_and_the_same_on_all_ranks_is_saved_once(pools, tmp_path, trigger):
    """After a step, and in an evaluation, in which the model is another one."""
    assert pools[2].run(_keeps_once, str(tmp_path), trigger) == [([True, False], True)] * 2


def _short(kind, steps):
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strategy(kind), max_steps=steps).fit(ByStep("adamw"), loader(digits()))
    return [str(each.message) for each in caught if "fewer than a round" in str(each.message)]


def test_a_fit_that_is_shorter_than_a_round_says_so(pools):
    (said,), others = pools[2].run(_short, "diloco", 2)
    assert said.startswith("this fit has 2 steps, fewer than a round of sync_every=3")
    assert not others
    assert pools[2].run(_short, "diloco", 3) == [[], []]


class Evaluated(Callback):
    """Keeps the model that is evaluated."""

    def on_validation_start(self, trainer, module):
        self.seen = parameters(module).clone()


def _first_round():
    torch.manual_seed(1)
    seen, model = Evaluated(), Validated()
    before = parameters(model).clone()
    trainer = quiet_trainer(LocalSGDStrategy(sync_every=50), max_steps=4, callbacks=[seen], val_check_interval=2)
    trainer.fit(model, loader(digits()), loader(digits()))
    return float((seen.seen - before).norm()), seen.seen


def test_before_the_first_round_ends_the_mean_is_evaluated(pools):
    (moved, one), (_, other) = pools[2].run(_first_round)
    assert moved > 0.01
    assert one.equal(other)


def test_weights_that_a_hook_loads_beside_a_checkpoint_without_state_stay(pools, tmp_path):
    assert pools[2].run(_loads_after_a_checkpoint, str(tmp_path)) == [True] * 2


def _several(accumulate):
    options = {"make": Net, "accumulate_grad_batches": 2} if accumulate else {"make": TwoOptimizers}
    trainer, model = fit(strategy("diloco"), **options)
    return trainer.strategy.attempts, trainer.strategy.comm_stats()["steps"], parameters(model).numpy()


@pytest.mark.parametrize(("accumulate", "attempts", "rounds"), [(True, 4, 2), (False, 8, 3)])
def test_accumulation_and_several_optimizers_in_manual_optimization(pools, accumulate, attempts, rounds):
    first, second = pools[2].run(_several, accumulate)
    assert first[:2] == second[:2] == (attempts, rounds)
    assert np.array_equal(first[2], second[2])


class Logged(Validated):
    """Something to stop and to save by."""

    def validation_step(self, batch, batch_idx):
        self.log("loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def _callbacks(folder, trigger):
    monitor = {"monitor": "loss", "save_top_k": 1, "save_last": True}
    triggers = {
        "steps": {"every_n_train_steps": 2, "save_top_k": -1, "save_last": True},
        "epochs": {"save_on_train_epoch_end": True, **monitor},
        "validation": monitor,
        "time": {"train_time_interval": timedelta(milliseconds=1), "save_top_k": -1},
        "end": {"every_n_train_steps": 100, "save_last": True},
    }
    save = ModelCheckpoint(folder, "{epoch}-{step}", **triggers[trigger])
    stop = EarlyStopping("loss", patience=1, min_delta=100.0)
    watch, rate = Watch(), LearningRateMonitor()
    logger = pl.loggers.CSVLogger(folder)
    callbacks = [save, stop, watch, rate, CommunicationMonitor()]
    trainer, model = fit(strategy("diloco"), make=Logged, callbacks=callbacks, max_epochs=9, logger=logger)
    if trigger == "end":
        saved = torch.load(f"{folder}/last.ckpt", weights_only=True)["state_dict"] if save.last_model_path else None
        return trainer.current_epoch, saved is None or saved["head.0.weight"].equal(model.head[0].weight)
    files = sorted(path for path in os.listdir(folder) if path.endswith(".ckpt"))
    alike = [torch.load(f"{folder}/{path}", weights_only=True)["state_dict"]["head.0.weight"] for path in files]
    return trainer.current_epoch, all(bool(each.isfinite().all()) for each in alike) and bool(files)


@pytest.mark.parametrize("trigger", ["steps", "epochs", "validation", "time", pytest.param("end", marks=LATER)])
def test_checkpoints_early_stopping_and_monitors(pools, tmp_path, trigger):
    assert pools[2].run(_callbacks, str(tmp_path), trigger) == [(2, True)] * 2
    logged = (next(tmp_path.glob("**/metrics.csv"))).read_text()
    assert "lr-AdamW" in logged


def _swa():
    trainer, model = fit(strategy("diloco"), callbacks=[StochasticWeightAveraging(0.01, 2)], max_epochs=3)
    return trainer.strategy.attempts, parameters(model).numpy()


def test_swa_ends_on_one_model(pools):
    first, second = pools[2].run(_swa)
    assert first[0] == 12
    assert np.array_equal(first[1], second[1])


class Clock(Timer):
    """Rank 1's time is over after three steps, rank 0's after five."""

    def time_elapsed(self, stage="train"):
        return 10.0 * (self.steps() >= 5 - 2 * dist.get_rank())


def _by_the_clock(kind, batches):
    clock = Clock(timedelta(seconds=1))
    clock.steps = lambda: chosen.attempts
    chosen = strategy(kind)
    _, model = fit(chosen, callbacks=[clock], max_epochs=4, limit_train_batches=batches)
    return chosen.attempts, parameters(model).numpy()


@pytest.mark.parametrize(
    ("kind", "batches", "at"), [("diloco", 20, 6), ("streaming", 20, 8), ("diloco", 4, 4), ("streaming", 4, 4)]
)
def test_a_timer_ends_all_ranks_where_they_meet(pools, kind, batches, at):
    """After a round, or at the end of an epoch."""
    (first, end), (second, other) = pools[2].run(_by_the_clock, kind, batches)
    assert first == second == at
    assert np.array_equal(end, other)


def _terminated(folder, ranks, kind):
    save, length = saving_on_exception(folder), {"limit_train_batches": 12, "max_epochs": 1}
    stopped = strategy(kind)
    with pytest.raises(SIGTERMException):
        fit(stopped, ByStep, callbacks=[Terminated(ranks), save], **length)
    _, again = fit(strategy(kind), make=ByStep, resume=f"{folder}/stopped.ckpt", **length)
    _, whole = fit(strategy(kind), make=ByStep, **length)
    return stopped.attempts, parameters(again).equal(parameters(whole))


@pytest.mark.parametrize(("kind", "ranks", "at"), [("diloco", (1,), 6), ("streaming", (0, 1), 8)])
def test_sigterm_ends_the_run_on_all_ranks_after_a_round(pools, tmp_path, kind, ranks, at):
    assert pools[2].run(_terminated, str(tmp_path), ranks, kind) == [(at, True)] * 2


class Killed(Callback):
    """A rank dies in the middle of a round."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _killed(kind):
    fit(strategy(kind), callbacks=[Killed()])


@pytest.mark.parametrize("kind", ["diloco", pytest.param("streaming", marks=pytest.mark.thorough)])
def test_a_killed_rank_ends_the_others_with_an_error(tmp_path, kind):
    codes, said = live(2, tmp_path / "ranks", _killed, kind, seconds=20)
    assert codes[0] == 1
    assert "a rank died" in said[0], said[0][-2000:]
    assert "terminate called" not in said[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 4, "delay": 4}, "delay=4 must be less"),
        ({"sync_every": 4, "fragments": 5}, "fragments=5"),
        ({"averaged_steps": -1}, "averaged_steps=-1"),
        ({"warmup_steps": 1.5}, "warmup_steps=1.5"),
        ({"evaluate": "median"}, "evaluate='median'"),
        ({"outer": {"lr": -1}}, "outer.lr=-1"),
        ({"buffers": {"*.queue": "max"}}, "'max', and must have 'mean' or 'rank0'"),
        ({"compressor": "signsgd"}, "SignSGD"),
        ({"compressor": "dgc"}, "DGC"),
        ({"compressor": "onebit_adam"}, "OneBitAdam"),
        ({"compressor": "onebit", "exchange": {"name": "two_shot", "adagrad": 1e-8}}, "adagrad"),
        ({"compressor": "fft", "schedule": {"theta": {"kind": "lr", "factor": 5}}}, "schedule by learning rate"),
        ({"compressor": "topk", "schedule": {"density": {0: 2.0}}}, "density"),
        ({"compresor": "topk"}, "did you mean 'compressor'"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook"),
        ({"find_unused_parameters": True}, "find_unused_parameters"),
        ({"state": "mean"}, "state='mean'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(arguments, said):
    with pytest.raises(ValueError, match=said):
        LocalSGDStrategy(**arguments)


class Frozen(ByStep):
    """A layer is frozen before the fit."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.head[0].requires_grad_(False)


class Late(Frozen):
    """It is trained later."""

    ranks = (0, 1)

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step >= 4 and dist.get_rank() in self.ranks:
            self.head[0].requires_grad_(True)


def _unfreezes(kind, folder):
    save, watch = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1), Watch()
    trainer, whole = fit(strategy(kind), make=Late, callbacks=[save, watch])
    ends = [parameters(whole).numpy(), *watch.evaluated]
    torch.manual_seed(1)
    assert not whole.head[0].weight.equal(Late("adamw").head[0].weight)
    same = [parameters(whole).equal(parameters(fit(strategy(kind), make=Late)[1]))]
    for step in (3, 5, 7):
        _, again = fit(strategy(kind), make=Late, resume=f"{folder}/step={step}.ckpt")
        same.append(parameters(again).equal(parameters(whole)))
    late = sum(each.numel() for each in whole.head[0].parameters())
    wanted = 8 * 4 * (len(parameters(whole)) - late) + 4 * 4 * late
    return ends, same, trainer.strategy.comm_stats()["total_bytes_dense"] / wanted


@pytest.mark.parametrize("kind", ["diloco", "streaming"])
def test_what_is_unfrozen_in_a_fit_is_averaged_from_then_on(pools, tmp_path, kind):
    (ends, same, dense), (others, again, _) = pools[2].run(_unfreezes, kind, str(tmp_path))
    assert all(np.array_equal(own, other) for own, other in zip(ends, others, strict=True))
    assert same == again == [True] * 4
    assert dense == pytest.approx(1)


def _dense(precision):
    trainer, model = fit(strategy("diloco"), precision=precision)
    return trainer.strategy.comm_stats()["total_bytes_dense"] / parameters(model).numel()


@pytest.mark.parametrize(("precision", "size"), [("32-true", 4), ("bf16-true", 2), ("64-true", 8)])
def test_dense_bytes_are_those_of_the_parameters(pools, precision, size):
    assert pools[2].run(_dense, precision) == [pytest.approx(8 * size)] * 2


class Unfreezes(BaseFinetuning):
    """Lightning's own way to it."""

    def freeze_before_training(self, module):
        self.freeze(module.body, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body, optimizer)


class Trained(Validated):
    """Its optimizer begins with what is trained then."""

    def configure_optimizers(self):
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 1e-3)


def _finetunes():
    trainer, model = fit(strategy("local_sgd", averaged_steps=2), make=Trained, callbacks=[Unfreezes()])
    torch.manual_seed(1)
    moved = [not own.equal(was) for own, was in zip(model.parameters(), Trained().parameters(), strict=True)]
    return all(moved), len(trainer.strategy.synchroniser.fragments.parts), parameters(model).numpy()


def test_lightnings_callbacks_for_finetuning_work(pools):
    (moved, fragments, end), (_, _, other) = pools[2].run(_finetunes)
    assert moved
    assert fragments == 2
    assert np.array_equal(end, other)


class LateOnOne(Late):
    """On one rank only."""

    ranks = (1,)


class Thaws(Callback):
    """Does so without a hook of the model, which could end an epoch early."""

    def on_train_batch_start(self, trainer, module, *_):
        module.head[0].requires_grad_(trainer.global_step >= 4 and dist.get_rank() == 1)


def streams():
    """Rank 1 has two batches more."""
    return DataLoader(Stream(2), batch_size=None)


def _refused(what):
    options = {
        "fragments": lambda: fit(LocalSGDStrategy(sync_every=20, fragments=20)),
        "buffers": lambda: fit(LocalSGDStrategy(buffers={"*.queue": "mean"})),
        "settings": lambda: fit(LocalSGDStrategy(sync_every=4 + dist.get_rank())),
        "outer": lambda: fit(LocalSGDStrategy(outer={"lr": 1.0 + dist.get_rank()})),
        "late": lambda: fit(LocalSGDStrategy(sync_every=3), make=LateOnOne),
        "late streaming": lambda: fit(strategy("streaming"), make=LateOnOne),
        "late averaged": lambda: fit(strategy("diloco", averaged_steps=9), make=LateOnOne),
        "stream": lambda: fit(strategy("diloco"), Logged, data=streams(), limit_train_batches=1.0),
        "streaming": lambda: fit(strategy("streaming"), Logged, data=streams(), limit_train_batches=1.0),
        "averaged": lambda: fit(strategy("diloco", averaged_steps=9), data=streams(), limit_train_batches=1.0),
        "grows": lambda: fit(strategy("diloco"), make=Grows),
        "loads": lambda: fit(strategy("diloco"), make=LoadsByRank),
        "evaluated": lambda: fit(LocalSGDStrategy(20), Frozen, callbacks=[Thaws()], limit_train_batches=5),
        "evaluated again": lambda: fit(LocalSGDStrategy(20), LateOnOne, val_check_interval=2, limit_train_batches=5),
        "raise": lambda: fit(strategy("diloco", on_nonfinite="raise"), make=Overflows),
    }
    with pytest.raises((ValueError, FloatingPointError)) as caught:
        options[what]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fragments", "fragments=20 must be at most 10"),
        ("buffers", "'*.queue' matches no floating-point buffer of the model, which has body.1.running_mean, body.1"),
        ("settings", "settings of local steps of rank 1 differ from those of rank 0"),
        ("outer", "settings of local steps of rank 1 differ from those of rank 0"),
        ("late", "begun to train different parameters"),
        ("late streaming", "begun to train different parameters"),
        ("late averaged", "begun to train different parameters"),
        ("stream", "different numbers of training batches: rank"),
        ("streaming", "different numbers of training batches: rank"),
        ("averaged", "different numbers of training batches: rank"),
        ("grows", "the buffer 'cache' became torch.float32 of shape (3,)"),
        ("evaluated", "the ranks' models are not alike"),
        ("evaluated again", "begun to train different parameters"),
        ("loads", "1 parameters differ over the ranks before the first step, among them head.0.bias"),
        ("raise", "not finite"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(pools, what, said):
    assert all(said in each for each in pools[2].run(_refused, what))


def _one_rank():
    trainer, model = fit(strategy("diloco"))
    return trainer.strategy.comm_stats()["total_bytes_sent"], parameters(model).isfinite().all().item()


def test_one_rank_sends_nothing(pools):
    assert pools[1].run(_one_rank) == [(0, True)]


@pytest.mark.parametrize("name", LOCAL_STEPS)
@pytest.mark.parametrize("variant", ["", "_spawn", "_fork", "_notebook"])
def test_registered(name, variant):
    made = StrategyRegistry.get(name + variant)
    assert isinstance(made, LocalSGDStrategy)
    assert made.synchroniser.rounds.sync_every == LOCAL_STEPS[name]["sync_every"]
    assert pickle.loads(pickle.dumps(made)).synchroniser.settings == made.synchroniser.settings


@pytest.mark.filterwarnings("ignore")
def test_lightning_cli():
    path = "lightning_compress.LocalSGDStrategy"
    arguments = [f"--trainer.strategy={path}", "--trainer.strategy.sync_every=8", "--trainer.strategy.outer=nesterov"]
    cli = LightningCLI(Net, args=[*arguments, "--trainer.accelerator=cpu", "--trainer.logger=false"], run=False)
    assert cli.trainer.strategy.synchroniser.rounds.sync_every == 8
    assert cli.trainer.strategy.synchroniser.outer.nesterov
