"""The strategy over a synchroniser, by way of the smallest one."""

import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_compress.core.errors import ExchangeError
from lightning_compress.strategies.periodic import PeriodicMixin
from lightning_compress.strategies.resume import _checked
from lightning_compress.strategies.signals import CLOCK, HANDLERS, LOOP
from tests.conformance.test_interrupted import _slurm as slurm_job
from tests.helpers.training import LATER, Net, digits, loader, parameters, quiet_trainer, saving_on_exception
from tests.strategies.averaging import Averaging, Mean


def fit(strategy=None, make=Net, resume=None, data=None, **options):
    """Two epochs of four steps; every rank has its own share of the data, in one order."""
    torch.manual_seed(1)
    model = make("adamw")
    options = {"max_epochs": 2, "limit_train_batches": 4, "callbacks": [], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saves = any(isinstance(each, Checkpoint) for each in options["callbacks"])
        trainer = quiet_trainer(strategy or Averaging(), enable_checkpointing=saves, **options)
        trainer.fit(model, loader(digits()) if data is None else data, loader(digits(5, 96)), ckpt_path=resume)
    return trainer, model


class Watch(Callback):
    """Notes how far this rank's model is from the others, and what is evaluated."""

    def __init__(self):
        self.trained, self.evaluated = [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.trained.append(parameters(module).numpy())

    def on_validation_batch_start(self, trainer, module, *_):
        self.evaluated.append(parameters(module).numpy())


class Validated(Net):
    """With a validation that does nothing."""

    def validation_step(self, batch, batch_idx):
        self.log("score", float(batch_idx))


def _trains(**options):
    watch = Watch()
    trainer, model = fit(make=Validated, callbacks=[watch], **options)
    return watch.trained, watch.evaluated, trainer.strategy.synchroniser.met, parameters(model).numpy()


@pytest.mark.parametrize("size", [2, 3])
def test_models_differ_between_meetings_and_are_one_at_the_end(pools, size):
    ranks = pools[size].run(_trains)
    for step in range(8):
        first, second = (ranks[rank][0][step] for rank in (0, 1))
        assert np.array_equal(first, second) == (step in (2, 5)), step
    for evaluated in zip(*(rank[1] for rank in ranks), strict=True):
        assert all(np.array_equal(each, evaluated[0]) for each in evaluated)
    assert all(rank[2] == [3, 6] for rank in ranks)
    assert all(np.array_equal(rank[3], ranks[0][3]) for rank in ranks)
    last = np.stack([rank[0][-1] for rank in ranks]).astype(np.float64).mean(axis=0).astype(np.float32)
    assert np.array_equal(ranks[0][3], last)
    assert np.array_equal(ranks[0][1][-1], ranks[0][0][5])  # what was in common last


def _accumulates():
    trainer, _ = fit(accumulate_grad_batches=2)
    return trainer.strategy.attempts, trainer.strategy.synchroniser.met


def test_accumulation_counts_steps(pools):
    assert pools[2].run(_accumulates) == [(4, [3])] * 2


class TwoOptimizers(Net):
    """One for the body, in every second batch, and one for the head."""

    def __init__(self, _):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        body.zero_grad()
        head.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        head.step()
        if batch_idx % 2:
            body.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.body, self.head)]


def _several():
    trainer, _ = fit(make=TwoOptimizers)
    return trainer.strategy.attempts, trainer.strategy.synchroniser.met, sorted(trainer.strategy._steps.steps.values())


def test_several_optimizers_in_manual_optimization_count_as_the_most_of_them(pools):
    assert pools[2].run(_several) == [(8, [3, 6], [8, 8])] * 2


class Raw(Net):
    """Steps that Lightning does not see."""

    def __init__(self, _):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class SkipsOne(TwoOptimizers):
    """Rank 1 does not step in one batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx != 1 or dist.get_rank() == 0:
            super().training_step(batch, batch_idx)


class Grows(Net):
    """A cache that validation makes longer."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def validation_step(self, batch, batch_idx):
        self.register_buffer("cache", torch.ones(6), persistent=False)


class Early(Callback):
    """Looks when validation begins and ends, after a step of each rank's own."""

    def __init__(self):
        self.seen = []

    def on_validation_start(self, trainer, module):
        self.seen.append(parameters(module).numpy())

    on_validation_end = on_validation_start


def _early():
    look = Early()
    fit(make=Validated, callbacks=[look], num_sanity_val_steps=0)
    return look.seen


def test_hooks_around_validation_see_the_model_that_is_evaluated(pools):
    first, second = pools[2].run(_early)
    assert len(first) == 4
    assert all(np.array_equal(own, other) for own, other in zip(first, second, strict=True))


def _swa():
    watch = Watch()
    trainer, model = fit(callbacks=[StochasticWeightAveraging(0.01, 2), watch], max_epochs=3)
    momenta = [each.momentum for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    return trainer.strategy.attempts, parameters(model).numpy(), momenta, watch.trained


def test_swa_ends_on_the_mean_of_averages_and_its_epoch_without_gradients_does_not_count(pools):
    ranks = pools[2].run(_swa)
    assert [rank[0] for rank in ranks] == [12, 12]
    assert np.array_equal(ranks[0][1], ranks[1][1])
    assert ranks[0][2] == [0.1]
    averages = [np.stack([rank[3][step].astype(np.float64) for step in (3, 7)]).mean(axis=0) for rank in ranks]
    assert np.allclose(ranks[0][1], np.mean(averages, axis=0), atol=1e-6)


def fit_with_swa(make, folder):
    """The model that an averaging of weights leaves, what was saved at the end of its last epoch, and parameters.

    These are what was evaluated in the middle of that epoch, and what it ended on.
    """
    save, watch = ModelCheckpoint(folder, save_last=True), Watch()
    callbacks = [StochasticWeightAveraging(0.01, 2), save, watch]
    _, model = fit(make(), Validated, callbacks=callbacks, max_epochs=3, val_check_interval=2)
    dist.barrier()
    saved = torch.load(f"{folder}/last.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == model.state_dict().keys()
    ends = [
        torch.cat([each.reshape(-1).float() for each in one.values()]).numpy() for one in (model.state_dict(), saved)
    ]
    batches = len(watch.evaluated) // 8  # of a validation; twice in each of three epochs and SWA's
    return *ends, watch.evaluated[-batches - 1], parameters(model).numpy()


class ByStep(Validated):
    """Its data follows from the step alone, so that a run may go on in the middle of an epoch."""

    def training_step(self, batch, batch_idx):
        images, labels = digits(3).tensors
        turn = 16 * (self.trainer.global_step * dist.get_world_size() + dist.get_rank())
        places = torch.arange(turn, turn + 16) % len(labels)
        return nn.functional.cross_entropy(self(images[places]), labels[places])


def _resumes(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    _, whole = fit(make=ByStep, callbacks=[save])
    saved = [torch.load(f"{folder}/step={step}.ckpt", weights_only=True)["state_dict"] for step in (3, 4, 6)]
    assert all(each.equal(saved[0][name]) for name, each in saved[1].items())  # what is evaluated is saved
    assert not saved[2]["head.0.weight"].equal(saved[0]["head.0.weight"])
    again = [fit(make=ByStep, resume=f"{folder}/step={step}.ckpt")[1] for step in (2, 3, 4, 5)]
    return [parameters(each).equal(parameters(whole)) for each in again]


@pytest.mark.parametrize("size", [2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(pools, tmp_path, size):
    assert pools[size].run(_resumes, str(tmp_path)) == [[True] * 4] * size


class ByOwnMetric(ByStep):
    """Its learning rate falls if a metric of the rank's own stops falling, which it does not."""

    def on_train_epoch_end(self):
        self.log("own", 1.0 + 10 * dist.get_rank() - self.current_epoch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own"}}


def _resumes_schedules(folder):
    save = ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    _, whole = fit(make=ByOwnMetric, callbacks=[save], max_epochs=4)
    trainer, again = fit(make=ByOwnMetric, resume=f"{folder}/epoch=1.ckpt", max_epochs=4)
    return trainer.optimizers[0].param_groups[0]["lr"], parameters(again).equal(parameters(whole))


def test_each_rank_resumes_its_own_learning_rate_schedule(pools, tmp_path):
    assert pools[2].run(_resumes_schedules, str(tmp_path)) == [(0.05, True)] * 2


def fit_again(make, folder, swa=False, but="nothing"):
    """The model that a fit leaves, and the one that it leaves when it is resumed where it had ended.

    Without what has ``but`` in its name.
    """

    def more():
        return [StochasticWeightAveraging(0.01, 2)] if swa else []

    save = ModelCheckpoint(folder, save_last=True)
    _, ended = fit(make(), ByStep, callbacks=[*more(), save], max_epochs=3)
    trainer, again = fit(make(), ByStep, resume=f"{folder}/last.ckpt", callbacks=more(), max_epochs=3)
    assert trainer.strategy.attempts == 12
    return [
        torch.cat([each.reshape(-1).float() for name, each in one.state_dict().items() if but not in name]).numpy()
        for one in (ended, again)
    ]


def _nothing_to_do():
    _, model = fit(max_epochs=0)
    torch.manual_seed(1)
    return parameters(model).equal(parameters(Net("adamw")))


def test_a_fit_of_no_steps_changes_no_model(pools):
    assert pools[3].run(_nothing_to_do) == [True] * 3


def test_a_run_that_had_ended_ends_again_on_its_model(pools, tmp_path):
    for ended, again in pools[2].run(fit_again, Averaging, str(tmp_path)):
        assert np.array_equal(ended, again)


class NumpyRate(ByStep):
    """Its schedule computes by NumPy."""

    def on_train_batch_start(self, *_):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = np.float64(1e-3)


def _by_numpy(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(make=NumpyRate, callbacks=[save])
    (own,) = Path(folder).glob(f"step=4.ckpt.lc/*.rank{dist.get_rank()}.pt")
    content = torch.load(own, weights_only=True)
    rate = content["tree"]["optimizers"][0]["param_groups"][0]["lr"]
    torch.save(content | {"rate": np.float64(rate)}, own)
    dist.barrier()
    return type(rate), _elsewhere(folder)


def test_numbers_of_numpy_are_saved_as_those_of_python_and_others_named(pools, tmp_path):
    (kind, (said,)), _ = pools[2].run(_by_numpy, str(tmp_path))
    assert kind is float
    assert "cannot be read: it holds a numpy" in said


def _elsewhere(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        trainer = quiet_trainer(Averaging(), max_steps=6)
        trainer.fit(ByStep("adamw"), loader(digits()), ckpt_path=f"{folder}/step=4.ckpt")
    return [str(each.message) for each in caught if "begin from the checkpoint's own model" in str(each.message)]


def test_another_number_of_ranks_begins_from_the_checkpoints_model(pools, tmp_path):
    pools[2].run(_resumes, str(tmp_path))
    said, *_ = pools[3].run(_elsewhere, str(tmp_path))
    assert "the checkpoint is of 2 ranks, and this run has 3" in said[0]


class Caches(ByStep):
    """Forward makes a buffer, as rotary embeddings do, and another one longer."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.register_buffer("table", torch.ones(1), persistent=False)

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(4), persistent=False)
            self.table = torch.ones(2)
        return super().training_step(batch, batch_idx) * self.cache.mean()


class MeanOfParameters(Mean):
    """Leaves buffers to each rank."""

    def shared(self):
        return dict(self.model.named_parameters())


class Parameters(PeriodicMixin, DDPStrategy):
    def __init__(self, **kwargs):
        super().__init__(MeanOfParameters(), **kwargs)


def _caches(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    _, whole = fit(Parameters(), Caches, callbacks=[save], limit_val_batches=0)
    _, again = fit(Parameters(strict_state=True), Caches, f"{folder}/step=4.ckpt", limit_val_batches=0)
    return parameters(again).equal(parameters(whole))


def test_caches_that_forward_makes_are_made_again_in_a_resumed_run(pools, tmp_path):
    assert pools[2].run(_caches, str(tmp_path)) == [True] * 2


def _lost(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(make=ByStep, callbacks=[save])
    if dist.get_rank() == 1:
        for path in Path(folder).glob("step=4.ckpt.lc/*.rank1.pt"):
            path.unlink()
    dist.barrier()
    return _elsewhere(folder)


def test_the_rank_that_warns_says_what_another_one_misses(pools, tmp_path):
    (said,), others = pools[2].run(_lost, str(tmp_path))
    assert not others
    assert "rank 1: " in said
    assert ".rank1.pt is missing" in said


def _kept_nothing(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(Averaging(state="none"), ByStep, callbacks=[save])
    return fit(Averaging(state="none", strict_state=True), ByStep, f"{folder}/step=4.ckpt")[0].strategy.attempts


def test_where_nothing_was_to_be_saved_nothing_is_missing(pools, tmp_path):
    assert pools[2].run(_kept_nothing, str(tmp_path)) == [8] * 2


class Terminated(Callback):
    """SIGTERM arrives on some ranks after the fourth step."""

    def __init__(self, ranks):
        self.ranks = ranks

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 4 and dist.get_rank() in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)


def _terminated(folder, ranks, batches):
    save = saving_on_exception(folder)
    strategy, length = Averaging(), {"limit_train_batches": batches, "max_epochs": 8 // batches}
    with pytest.raises(SIGTERMException):
        fit(strategy, ByStep, callbacks=[Terminated(ranks), save], **length)
    stopped = strategy.attempts
    _, again = fit(make=ByStep, resume=f"{folder}/stopped.ckpt", **length)
    _, whole = fit(make=ByStep, **length)
    return stopped, parameters(again).equal(parameters(whole))


@pytest.mark.parametrize(("ranks", "batches", "at"), [((1,), 8, 6), ((0, 1), 8, 6), ((1,), 4, 4)])
def test_sigterm_ends_the_run_on_all_ranks_where_they_meet(pools, tmp_path, ranks, batches, at):
    assert pools[2].run(_terminated, str(tmp_path), ranks, batches) == [(at, True)] * 2


class Requeued(Callback):
    """The cluster's signal to save and start again arrives on one rank, in the middle of a round."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def _requeued(folder, step, batches):
    before = os.environ.copy()
    os.environ.update(slurm_job(folder))
    try:
        length = {"limit_train_batches": batches, "max_epochs": 8 // batches}
        options = {"plugins": [SLURMEnvironment()], "default_root_dir": folder, **length}
        _, whole = fit(make=ByStep, callbacks=[Requeued(step)], **options)
    finally:
        os.environ.clear()
        os.environ.update(before)
    saved = torch.load(f"{folder}/hpc_ckpt_1.ckpt", weights_only=True)["global_step"]
    _, again = fit(make=ByStep, resume="hpc", default_root_dir=folder, **length)
    return saved, parameters(again).equal(parameters(whole))


@pytest.mark.parametrize(
    ("step", "batches", "saved"),
    [(4, 8, 6), (4, 4, 4), (7, 4, 8)],
    ids=["in a round", "at the end of an epoch", "in the last round"],
)
def test_a_job_that_is_to_be_started_again_is_saved_between_two_batches(pools, tmp_path, step, batches, saved):
    assert pools[2].run(_requeued, str(tmp_path), step, batches) == [(saved, True)] * 2
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def _cannot_connect():
    refused = mock.patch.object(dist, "new_group", side_effect=RuntimeError("Gloo connectFullMesh failed"))
    with refused, pytest.raises(ExchangeError, match="GLOO_SOCKET_IFNAME"):
        fit()


def test_hosts_that_cannot_reach_each_other_are_told_what_to_set(pools):
    pools[2].run(_cannot_connect)


def _left_alone():
    timer = Timer(timedelta(hours=1))
    trainer, _ = fit(max_epochs=1, callbacks=[timer])
    assert hasattr(timer, CLOCK)
    assert CLOCK not in vars(timer)
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    loops = trainer.fit_loop, loop.val_loop
    assert not {"on_run_end", "on_run_start"} & {name for each in loops for name in vars(each)}
    assert not {LOOP, *HANDLERS} & {*vars(loop), *vars(connector)}
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    assert trainer.strategy.rendezvous.signals.taken
    assert all(hasattr(connector, name) for name in HANDLERS)


def test_lightning_has_what_is_taken_and_gets_it_back(pools):
    pools[2].run(_left_alone)


class Longer(Callback):
    """After an epoch rank 1 has more data than before."""

    def on_train_epoch_end(self, trainer, *_):
        trainer.train_dataloader.dataset.indices = range(64 + 64 * dist.get_rank())


class Stream(IterableDataset):
    """No length, and as many batches as this rank's number says more."""

    def __init__(self, more):
        self.more = more

    def __iter__(self):
        images, labels = digits().tensors
        for batch in range(5 + self.more * dist.get_rank()):
            yield images[batch * 16 : batch * 16 + 16], labels[batch * 16 : batch * 16 + 16]


def _refused(what):
    options = {
        "unequal": lambda: fit(
            data=DataLoader(digits(0, 64 + 64 * dist.get_rank()), 16),
            limit_train_batches=1.0,
            use_distributed_sampler=False,
        ),
        "stream": lambda: fit(data=DataLoader(Stream(2), batch_size=None), limit_train_batches=1.0),
        "longer": lambda: fit(
            data=DataLoader(Subset(digits(), range(64)), 16),
            limit_train_batches=1.0,
            use_distributed_sampler=False,
            reload_dataloaders_every_n_epochs=1,
            callbacks=[Longer()],
            max_epochs=3,
        ),
        "syncbn": lambda: fit(sync_batchnorm=True),
        "clock": lambda: fit(val_check_interval="00:00:00:10"),
        "ema": lambda: fit(callbacks=[lightning_callbacks.EMAWeightAveraging()]),
        "raw": lambda: fit(make=Raw),
        "skipped": lambda: fit(make=SkipsOne),
        "grows": lambda: fit(make=Grows, num_sanity_val_steps=0),
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        options[what]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("unequal", "different numbers of training batches (4, 8, by rank)"),
        ("stream", "different numbers of training batches: rank"),
        ("longer", "different numbers of training batches: rank"),
        ("syncbn", "SyncBatchNorm"),
        pytest.param("clock", "val_check_interval of 10 s", marks=LATER),
        pytest.param("ema", "EMAWeightAveraging", marks=LATER),
        ("raw", "stepped without Lightning, as with self.optimizers(use_pl_optimizer=False)"),
        ("skipped", "or an optimizer's step was skipped on one of them"),
        ("grows", "the buffer 'cache' of shape (4,) became one of shape (6,)"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(pools, what, said):
    for each in pools[2].run(_refused, what):
        assert said in each


def _streams():
    trainer, model = fit(data=DataLoader(Stream(0), batch_size=None), limit_train_batches=1.0)
    return trainer.strategy.attempts, parameters(model).numpy()


def test_loaders_without_a_length_train_where_they_end_alike(pools):
    first, second = pools[2].run(_streams)
    assert first[0] == second[0] == 10
    assert np.array_equal(first[1], second[1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ddp_comm_hook": print}, "ddp_comm_hook"),
        ({"model_averaging_period": 4}, "model_averaging_period"),
        ({"find_unused_parameters": True}, "find_unused_parameters"),
        ({"bucket_cap_mb": 10}, "bucket_cap_mb"),
        ({"static_graph": True}, "static_graph"),
        ({"evry": 2}, "did you mean 'every'"),
        ({"state": "mean"}, "state='mean'"),
    ],
)
def test_arguments_of_the_wrapper_are_refused_by_name(arguments, said):
    with pytest.raises(ValueError, match=said):
        Averaging(**arguments)


def test_defaults_of_the_wrapper_are_what_the_command_line_gives():
    assert Averaging(find_unused_parameters=False, bucket_cap_mb=None, static_graph=False)._ddp_kwargs == {}


FORM = ("common", "model", "optimizers", "precision", "own")


@pytest.mark.parametrize(
    "tree",
    [{}, {"model": {}, "local": {}}, {each: {} for each in FORM}],
)
def test_files_of_an_earlier_version_are_said_to_be(tree):
    with pytest.raises(ValueError, match="files are of an earlier version"):
        _checked(tree)
