"""Asynchronous gossip by Lightning: who waits, what is evaluated and saved, and what is refused."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import AsyncGossipStrategy
from lightning_compress.codecs import Dense, TopK
from lightning_compress.core.errors import ExchangeError
from lightning_compress.reducers.powersgd import PowerSGD
from tests.helpers.lives import live
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer, saving_on_exception

METHODS = {
    "exact": {},
    "8 bits": {"compressor": "moniqua"},
    "4 bits": {"compressor": {"name": "moniqua", "bits": 4}},
    "ssp": {"algorithm": "ssp"},
    "ssp, onebit": {"algorithm": {"name": "ssp", "staleness": 2}, "compressor": "onebit"},
}


class Validated(Net):
    """With a validation over all ranks."""

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(images), labels), sync_dist=True)


class Watch(Callback):
    """What each rank trained and what was evaluated."""

    def __init__(self):
        self.steps, self.evaluated, self.losses = [], [], []

    def on_train_epoch_start(self, trainer, module):
        self.steps.append(0)

    def on_train_batch_end(self, trainer, module, *_):
        self.steps[-1] += 1

    def on_validation_batch_start(self, trainer, module, *_):
        self.evaluated.append(parameters(module).numpy())

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def fit(strategy, make=Validated, callbacks=(), resume=None, epochs=2, **options):
    """Two epochs over all digits."""
    torch.manual_seed(1)
    model = make("adamw")
    saves = any(isinstance(each, Checkpoint) for each in callbacks)
    trainer = quiet_trainer(
        strategy, enable_checkpointing=saves, callbacks=list(callbacks), max_epochs=epochs, **options
    )
    trainer.fit(model, loader(digits()), loader(digits(5, 96)), ckpt_path=resume)
    return trainer, model


class Logs(Validated):
    """With a metric of all ranks at the end of an epoch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss


def _trains(method, share):
    watch = Watch()
    trainer, model = fit(AsyncGossipStrategy(**method, share_work=share), Logs, [watch])
    stats = trainer.strategy.comm_stats()
    return watch.steps, watch.evaluated, watch.losses, parameters(model).numpy(), stats


CELLS = [(2, "8 bits", True), (3, "ssp, onebit", False)]
CELLS += [
    pytest.param(*each, marks=pytest.mark.thorough)
    for each in product((2, 3), METHODS, (True, False))
    if each not in CELLS
]


@pytest.mark.parametrize(("size", "name", "share"), CELLS)
def test_one_model_is_evaluated_and_left(pools, size, name, share):
    method = METHODS[name]
    ranks = pools[size].run(_trains, method, share)
    batches = 60 if share else 60 // size * size
    assert [sum(steps) for steps in zip(*(rank[0] for rank in ranks), strict=True)] == [batches] * 2
    for rank in ranks[1:]:
        for mine, theirs in zip(rank[1], ranks[0][1], strict=True):
            assert np.array_equal(mine, theirs)
        assert rank[2] == ranks[0][2]
        assert np.array_equal(rank[3], ranks[0][3])
    assert ranks[0][2][1] < ranks[0][2][0] < 2.3
    for *_, stats in ranks:
        assert stats["total_bytes_sent"] > 0
        assert stats.get("answers", 1) > 0
        assert 0 <= stats["staleness"] < 60
        assert 0 <= stats["consensus_distance"] < (1e-6 if "algorithm" in method else 1)


class Slow(Validated):
    """Rank 1 takes a while for each batch."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.1 if dist.get_rank() == 1 else 0.005)
        return super().training_step(batch, batch_idx)


def _shares():
    watch = Watch()
    fit(AsyncGossipStrategy(), Slow, [watch], epochs=1)
    return watch.steps[0]


def test_a_slow_rank_takes_fewer_batches(pools):
    fast, slow, other = pools[3].run(_shares)
    assert fast + slow + other == 60
    assert 1 <= slow < min(fast, other) / 2


class Saves(Callback):
    """Notes what a rank has when a checkpoint is written, and when it goes on."""

    def __init__(self):
        self.saved = self.began = None

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.saved = parameters(module).numpy(), trainer.strategy.attempts

    def on_train_start(self, trainer, module):
        self.began = parameters(module).numpy(), trainer.strategy.attempts


def _resumes(folder, method):
    saves = Saves()
    save = ModelCheckpoint(folder, "last", save_top_k=1)
    _, model = fit(AsyncGossipStrategy(**method), Slow, [saves, save], epochs=1)
    mean = parameters(model).numpy()
    again = Saves()
    fit(AsyncGossipStrategy(**method, strict_state=True), Slow, [again], f"{folder}/last.ckpt", epochs=2)
    kept = torch.load(f"{folder}/last.ckpt", weights_only=True)["state_dict"]
    kept = torch.cat([kept[name].reshape(-1) for name, _ in model.named_parameters()]).numpy()
    return saves.saved, again.began, mean, kept


@pytest.mark.parametrize("name", ["exact", "8 bits", "ssp, onebit"])
def test_each_rank_goes_on_with_its_own_model_and_step(pools, tmp_path, name):
    ranks = pools[3].run(_resumes, str(tmp_path), METHODS[name])
    for (saved, step), (began, at), mean, kept in ranks:
        assert np.array_equal(saved, began)
        assert step == at > 0
        np.testing.assert_allclose(mean, kept, atol=1e-6)
    assert len({rank[0][1] for rank in ranks}) > 1
    np.testing.assert_allclose(np.mean([rank[0][0] for rank in ranks], 0), ranks[0][3], atol=1e-6)


class Terminated(Callback):
    """SIGTERM comes to one rank in its third batch."""

    def __init__(self, rank):
        self.rank, self.ended = rank, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2 and dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer, module, exception):
        self.ended = type(exception).__name__, trainer.strategy.attempts


def _terminates(folder, rank):
    terminated = Terminated(rank)
    save = saving_on_exception(folder)
    with pytest.raises(SIGTERMException):
        fit(AsyncGossipStrategy(), Slow, [terminated, save], epochs=3)
    again = Saves()
    fit(AsyncGossipStrategy(strict_state=True), Slow, [again], f"{folder}/stopped.ckpt", epochs=1)
    return terminated.ended, again.began[1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sigterm_of_one_rank_ends_all_and_each_goes_on_from_its_step(pools, tmp_path, rank):
    for (said, step), again in pools[3].run(_terminates, str(tmp_path), rank):
        assert said == "SIGTERMException"
        assert 1 <= step == again


class Records(Validated):
    """Which images it has trained, by epoch; rank 1 takes a while for each batch."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.trained = []

    def training_step(self, batch, batch_idx):
        images, labels, places = batch
        time.sleep(0.03 if dist.get_rank() == 1 else 0.005)
        self.trained += [(self.current_epoch, place) for place in places.tolist()]
        return super().training_step((images, labels), batch_idx)


class Interrupted(Terminated):
    """In the second epoch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


def _numbered(several=False):
    images, labels = digits(0, 480).tensors
    made = DataLoader(TensorDataset(images, labels, torch.arange(480)), 16, shuffle=True)
    return {"first": made, "second": made} if several else made


def _trained(method, data, resume=None, callbacks=(), make=Records, **options):
    torch.manual_seed(1)
    model = make("adamw")
    trainer = quiet_trainer(
        AsyncGossipStrategy(**method), callbacks=list(callbacks), num_sanity_val_steps=0, **{"max_epochs": 2, **options}
    )
    with suppress(SIGTERMException):
        trainer.fit(model, data, loader(digits(5, 96)), ckpt_path=resume)
    return model.trained


def _interrupts(folder, method, rank):
    callbacks = [Interrupted(rank), saving_on_exception(folder)]
    before = _trained(method, _numbered(), callbacks=callbacks, enable_checkpointing=True)
    return before, _trained({**method, "strict_state": True}, _numbered(), f"{folder}/stopped.ckpt")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["ssp", "8 bits"])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_an_interrupted_epoch_goes_on_with_the_batches_that_nobody_has_trained(pools, tmp_path, size, name, rank):
    found = pools[size].run(_interrupts, str(tmp_path), METHODS[name], rank)
    assert 0 < sum(len(again) for _, again in found) < 480
    trained = [each for before, again in found for each in before + again]
    assert {*trained} == {(epoch, place) for epoch in (0, 1) for place in range(480)}
    assert len(trained) <= 960 + 16 * (size - 1)  # a rank that had ended the epoch before the others repeats a batch


class RecordsSeveral(Records):
    """Of two loaders, it notes the second one's."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["second"], batch_idx)


def _each_epoch(several):
    make = RecordsSeveral if several else Records
    return _trained({}, _numbered(several), make=make, reload_dataloaders_every_n_epochs=1, max_epochs=3)


@pytest.mark.parametrize("several", [False, True])
def test_loaders_that_are_built_again_and_several_have_lists_of_their_own(pools, several):
    first, second = pools[2].run(_each_epoch, several)
    assert {*first, *second} == {(epoch, place) for epoch in range(3) for place in range(480)}
    assert several or len(first) + len(second) == 3 * 480


class Late(Validated):
    """Rank 1 is still in its first batch when others have stepped."""

    def training_step(self, batch, batch_idx):
        time.sleep(2.0 if dist.get_rank() == 1 and batch_idx == 0 else 0.0)
        return super().training_step(batch, batch_idx)


class SavesAnyway(Terminated):
    """A ModelCheckpoint writes nothing on a rank that has not stepped."""

    def on_exception(self, trainer, module, exception):
        super().on_exception(trainer, module, exception)
        trainer.save_checkpoint(f"{self.folder}/stopped.ckpt")


def _stops_early(folder):
    terminated, again = SavesAnyway(0), Saves()
    terminated.folder = folder
    options = {"epochs": 1, "accumulate_grad_batches": 2}
    with pytest.raises(SIGTERMException):
        fit(AsyncGossipStrategy(), Late, [terminated], **options)
    fit(AsyncGossipStrategy(strict_state=True), Validated, [again], f"{folder}/stopped.ckpt", **options)
    return terminated.ended[1], again.began[1]


def test_a_run_goes_on_that_ended_before_the_first_step_of_a_slow_rank(pools, tmp_path):
    ranks = pools[3].run(_stops_early, str(tmp_path))
    assert all(step == again for step, again in ranks)
    assert ranks[1][0] == 0 < ranks[0][0]


def _dies(told, rank, step, number):
    class Dies(Slow):
        def on_train_batch_start(self, batch, batch_idx):
            if dist.get_rank() == rank and batch_idx == step:
                Path(told).write_text(str(time.time()))
                subprocess.Popen(["sh", "-c", f"sleep 10; kill -KILL {os.getpid()}"])  # one that only stopped
                os.kill(os.getpid(), number)

    try:
        fit(AsyncGossipStrategy(answer_timeout=2.0), Dies, epochs=3)
    except Exception:
        print(f"\nended {time.time() - float(Path(told).read_text()):.2f} s later", file=sys.stderr)
        raise


@pytest.mark.parametrize(("rank", "step"), [(0, 3), (1, 1), pytest.param(2, 4, marks=pytest.mark.thorough)])
def test_a_rank_that_is_killed_is_named_by_all_others(tmp_path, rank, step):
    codes, said = live(4, tmp_path / "ranks", _dies, str(tmp_path / "told"), rank, step, signal.SIGKILL)
    assert codes[rank] == -signal.SIGKILL
    for other in {0, 1, 2, 3} - {rank}:
        assert codes[other] == 1
        assert f"rank {rank} died" in said[other]


def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path):
    codes, said = live(3, tmp_path / "ranks", _dies, str(tmp_path / "told"), 1, 2, signal.SIGSTOP)
    assert codes[1] == -signal.SIGKILL
    for other in (0, 2):
        assert codes[other] == 1
        assert "rank 1 does not answer within 2 s" in said[other]
        (seconds,) = re.findall("ended ([0-9.]+) s later", said[other])
        assert float(seconds) < 8  # before it was killed


class Talks(Validated):
    """With a metric of all ranks in each step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


REFUSED = [
    ({}, {"make": Talks}, "a training step talks to all ranks"),
    ({}, {"max_steps": 5}, "max_steps=5: ranks that share their batches"),
    ({}, {"min_steps": 5}, "min_steps=5: ranks that share their batches"),
    ({}, {"limit_train_batches": 4}, "limit_train_batches=4"),
    ({}, {"val_check_interval": 0.5}, "val_check_interval=0.5"),
    ({}, {"callbacks": [ModelCheckpoint("unused", every_n_train_steps=2)]}, "every_n_train_steps=2"),
    ({"topology": "one_peer"}, {}, "edges change from round to round"),
    ({"topology": [[0.5, 0.5], [0.4, 0.6]]}, {}, "sums to"),
    ({"topology": [[0.6, 0.4], [0.4, 0.4]]}, {}, "sums to"),
    ({"topology": [[0.4, 0.5], [0.6, 0.5]]}, {}, "must be symmetric"),
]


def _refuses(arguments, options):
    """What a rank says. What a step does shows in the first step: who is not there yet names the rank that was."""
    with pytest.raises((ValueError, ExchangeError) if "make" in options else ValueError) as said:
        fit(AsyncGossipStrategy(**arguments), **options)
    return str(said.value)


@pytest.mark.parametrize(("arguments", "options", "said"), REFUSED)
def test_what_cannot_work_is_refused_on_all_ranks(pools, arguments, options, said):
    for text in pools[4 if arguments == {"topology": "one_peer"} else 2].run(_refuses, arguments, options):
        assert said in text


class Lbfgs(Validated):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Double(Validated):
    """Float64."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.double()


def _refuses_models():
    return [_refuses({}, {"make": make}) for make in (Lbfgs, Double)]


def test_models_and_optimizers_that_cannot_work_are_refused(pools):
    for lbfgs, double in pools[2].run(_refuses_models):
        assert "LBFGS calls its closure several times" in lbfgs
        assert "parameters are torch.float64" in double


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"algorithm": "dpsgd"}, "algorithm='dpsgd' must be one of 'adpsgd', 'ssp'"),
        ({"answer_timeout": 0}, "answer_timeout=0 must be a number of seconds above 0"),
        ({"answer_timeout": True}, "answer_timeout=True"),
        ({"seed": -1}, "seed=-1"),
        ({"compressor": "topk"}, "use 'none' or 'moniqua'"),
        ({"compressor": TopK(0.01)}, "use 'none' or 'moniqua'"),
        ({"compressor": PowerSGD()}, "use 'none' or 'moniqua'"),
        ({"algorithm": {"name": "ssp", "stale": 1}}, "ssp has no 'stale'; it has"),
        ({"algorithm": {"name": "ssp", "staleness": -1}}, "staleness=-1"),
        ({"algorithm": "ssp", "compressor": "powersgd"}, "they talk more than once"),
        ({"algorithm": "ssp", "topology": "ring"}, "'ssp' sends to all ranks"),
        ({"compressor": {"name": "moniqua", "bits": 1}}, "use 4 or 8 bits"),
        ({"share_work": "perhaps"}, "share_work"),
        ({"state": "mean"}, "state='mean' is not possible"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_construction(arguments, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        AsyncGossipStrategy(**arguments)


@pytest.mark.parametrize("given", [None, "none", {"name": "none"}, Dense()])
def test_exact_averages_by_any_name(given):
    assert AsyncGossipStrategy(compressor=given).synchroniser._settings.compressor is None


def _unequal():
    """What is said where the ranks that do not share their batches have 6, 5, ... of them."""
    rank = dist.get_rank()
    trainer = quiet_trainer(AsyncGossipStrategy(share_work=False), max_epochs=1, use_distributed_sampler=False)
    try:
        trainer.fit(Net(), loader(digits(rank, 16 * (6 - rank))))
    except ValueError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_do_not_share_batches_need_equally_many(pools, size):
    numbers = ", ".join(map(str, (6, 5, 4)[:size]))
    for said in pools[size].run(_unequal):
        assert f"different numbers of training batches ({numbers}, by rank)" in said
