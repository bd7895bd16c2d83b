"""MeProp in a real training: layers change and change back, schedules, memory that is resumed by rank."""

import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_compress import AsyncGossipStrategy, CompressedDDPStrategy, MeProp
from tests.backward.reference import enabled
from tests.helpers.training import FindsInBetween, Net, digits, loader, parameters


class Watch(Callback):
    """What is kept in each step, and what is remembered."""

    def __init__(self):
        self.kept, self.memory, self.fail_at = [], {}, None

    def on_after_backward(self, trainer, pl_module):
        layers = enabled(pl_module)
        self.kept.append({name: each.k for name, each in layers.items()})
        self.memory = {name: each.memory.clone() for name, each in layers.items() if each.memory is not None}
        if trainer.global_step == self.fail_at:
            raise RuntimeError("on purpose")


class Narrow(Net):
    """Without a batch norm."""

    lr = 0.05  # that a LearningRateFinder looks for

    def __init__(self):
        super().__init__()
        self.body[1] = nn.Identity()


def train(folder, epochs, callback, watch, strategy="auto", path=None, extra=(), **settings):
    """Three steps an epoch, one checkpoint each."""
    pl.seed_everything(3, verbose=False)
    model = Narrow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size() if dist.is_initialized() else 1,
            strategy=strategy,
            max_epochs=epochs,
            limit_train_batches=3,
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback, watch, *extra],
            **settings,
        )
        trainer.fit(model, loader(digits()), ckpt_path=path)
    return trainer, model


def test_trains_by_a_schedule_and_leaves_the_model_as_it_came(tmp_path):
    schedule = {0: 1.0, 2: {"head.*": 5}, 4: 0.25}
    watch = Watch()
    trainer, model = train(tmp_path, 2, MeProp(0.5, schedule=schedule), watch)
    dense, some, few = (
        {"body.0": each[0], "body.3": each[1], "head.0": each[2]} for each in ((16, 16, 64), (16, 16, 5), (4, 4, 16))
    )
    assert watch.kept == [dense] * 2 + [some] * 2 + [few] * 2
    assert type(model.head[0]) is nn.Linear
    assert not enabled(model)
    assert not any(each.gradients for each in trainer.callbacks[0].layers.values())  # as large as the weights
    content = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert content["state_dict"].keys() == Narrow().state_dict().keys()
    assert "MeProp" not in content["callbacks"]  # nothing is remembered


def test_a_run_that_goes_on_is_where_the_schedule_of_each_layer_is(tmp_path):
    schedule = {0: 0.5, 1: {"head.*": 5}, 2: {"body.0": 3}, 5: {"body.3": 0.25}}
    half, watch = Watch(), Watch()
    trainer, _ = train(tmp_path, 1, MeProp(1.0, schedule=schedule), half)
    train(tmp_path, 2, MeProp(1.0, schedule=schedule), watch, path=trainer.checkpoint_callback.best_model_path)
    assert half.kept[1:] == [{"body.0": 8, "body.3": 8, "head.0": 5}, {"body.0": 3, "body.3": 8, "head.0": 5}]
    assert watch.kept == [half.kept[2]] * 2 + [{"body.0": 3, "body.3": 4, "head.0": 5}]


@pytest.mark.filterwarnings("ignore")
def test_an_error_leaves_the_model_as_it_came(tmp_path):
    watch = Watch()
    watch.fail_at = 1
    model = Narrow()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[MeProp(0.5), watch],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(model, loader(digits()))
    assert not enabled(model)


class Recurrent(Narrow):
    """A layer through which sequences pass."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(9, 16, batch_first=True)
        self.head, self.tail = nn.Identity(), nn.Linear(16, 10)

    def forward(self, images):
        return self.tail(self.rnn(self.body(images).unflatten(1, (-1, 9)))[1][0])


@pytest.mark.parametrize(("k", "schedule", "warns"), [(0.5, {}, 0), (0.5, {9: {"rnn": 0.1}}, 1), (0.2, {9: 0.1}, 1)])
def test_what_a_schedule_comes_to_is_warned_of_once(k, schedule, warns, tmp_path):
    trainer = pl.Trainer(
        accelerator="cpu",
        fast_dev_run=True,
        callbacks=[MeProp(k, schedule=schedule)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Recurrent(), loader(digits()))
    assert sum("rnn would keep" in str(each.message) for each in caught) == warns


def resumed(folder, share):
    """Six steps at once, and three and three; parameters and memory of this rank."""
    results = []
    settings = {"memory": 1.0, "share": share}
    strategy = CompressedDDPStrategy({"name": "topk", "density": 0.1}) if share else "ddp"
    watch = Watch()
    _, model = train(f"{folder}/whole", 2, MeProp(0.1, **settings), watch, strategy)
    results.append((parameters(model).numpy(), {name: each.numpy() for name, each in watch.memory.items()}))
    strategy = CompressedDDPStrategy({"name": "topk", "density": 0.1}) if share else "ddp"
    trainer, _ = train(f"{folder}/half", 1, MeProp(0.1, **settings), Watch(), strategy)
    path = trainer.strategy.broadcast(trainer.checkpoint_callback.best_model_path)
    strategy = CompressedDDPStrategy({"name": "topk", "density": 0.1}) if share else "ddp"
    watch = Watch()
    _, model = train(f"{folder}/half", 2, MeProp(0.1, **settings), watch, strategy, path)
    results.append((parameters(model).numpy(), {name: each.numpy() for name, each in watch.memory.items()}))
    return results


@pytest.mark.parametrize("share", [False, True])
def test_resumes_exactly_with_each_ranks_memory(pools, tmp_path, share):
    ranks = pools[2].run(resumed, str(tmp_path), share)
    for (whole, memory), (again, memory_again) in ranks:
        assert (whole == again).all()
        assert memory.keys() == {"body.0", "body.3", "head.0"}
        assert all((memory[name] == memory_again[name]).all() for name in memory)
    (one, memory), (other, memory_other) = ranks[0][0], ranks[1][0]
    assert (one == other).all()
    assert not (memory["head.0"] == memory_other["head.0"]).all()


@pytest.mark.filterwarnings("ignore")
def test_another_number_of_ranks_takes_the_mean(tmp_path):
    callback, watch = MeProp(0.1, memory=1.0), Watch()
    trainer, _ = train(tmp_path, 1, callback, watch)
    path = trainer.checkpoint_callback.best_model_path
    content = torch.load(path, weights_only=True)
    (own,) = content["callbacks"]["MeProp"]["memory"]
    assert torch.equal(own["head.0"][""], watch.memory["head.0"])
    content["callbacks"]["MeProp"]["memory"] = [own, None, own, None]
    torch.save(content, path)
    seen = []

    class First(Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            seen.append(enabled(pl_module)["head.0"].memory.clone())

    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MeProp(0.1, memory=1.0), First()],
    )
    with pytest.warns(UserWarning, match="in a hurry"):
        trainer.fit(Narrow(), loader(digits()), ckpt_path=path)
    assert torch.equal(seen[0], own["head.0"][""] / 2)


def test_a_loss_scale_scales_the_memory(tmp_path):
    """Memory is saved as if there were no loss scale."""
    plain, scaled = MeProp(0.1, memory=1.0), MeProp(0.1, memory=1.0)
    train(tmp_path / "a", 1, plain, Watch())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1)  # another scale after each step
    watch = Watch()
    train(tmp_path / "b", 1, scaled, watch, plugins=[MixedPrecision("bf16-mixed", "cpu", None)])
    bf16 = scaled.state_dict()["memory"][0]["head.0"][""]
    watch = Watch()
    third = MeProp(0.1, memory=1.0)
    train(tmp_path / "c", 1, third, watch, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    saved = third.state_dict()["memory"][0]["head.0"][""]
    assert torch.allclose(saved, plain.state_dict()["memory"][0]["head.0"][""], atol=0.05)
    assert torch.allclose(saved, bf16, atol=0.05)
    assert float(watch.memory["head.0"].abs().max()) > 100 * float(saved.abs().max())


@pytest.mark.filterwarnings("ignore")
def test_says_which_layers_are_left_alone(tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(tmp_path, 1, MeProp(0.25, per_example=True), Watch())
    assert "meProp: backward passes keep head.0 16 of 64, and all of body.0, body.3, head.2" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k=0 must be"),
        ({"k": {"a": 2.0}}, "k['a']=2.0"),
        ({"memory": -1}, "memory=-1"),
        ({"share": True, "per_example": True}, "per_example=True"),
        ({"schedule": {"soon": 1}}, "schedule: 'soon'"),
        ({"schedule": {5: 0}}, "k=0 must be"),
        ({"schedule": [1]}, "schedule=[1]: give"),
    ],
)
def test_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MeProp(**arguments)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (MeProp({"tail.*": 0.5}), "k['tail.*'] matches no layer"),
        (MeProp(0.5, schedule={9: 17}), "its width, 16"),
        (MeProp(1.0, schedule={9: {"tail.*": 0.5}}), "schedule: 'tail.*' of step 9 matches no layer"),
        (MeProp({"head.*": 0.5}, schedule={9: {"body.*": 0.5}}), "which are head.0; k names these"),
        (MeProp({"body.*": 0.5, "*": 0.5}, per_example=True), "convolutions have one choice"),
    ],
)
def test_refused_when_training_begins(callback, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tmp_path, 1, callback, Watch())


def _shares(folder):
    with pytest.raises(ValueError, match="share=True: the ranks choose outputs together in each backward pass"):
        train(folder, 1, MeProp(0.5, share=True), Watch(), AsyncGossipStrategy(share_work=False))


def test_ranks_that_do_not_wait_for_each_other_share_no_choice(pools, tmp_path):
    pools[2].run(_shares, str(tmp_path))


def _finds(folder):
    finder = FindsInBetween(lambda _, module: [each.memory.clone() for each in enabled(module).values()])
    train(folder, 6, MeProp(0.5, memory=1.0), Watch(), "ddp", extra=[finder])  # epochs enough for the search
    assert len(finder.optimal_lr.results["lr"]) == 6
    before, after = finder.seen
    return all(one.equal(other) for one, other in zip(before, after, strict=True)), before


def test_a_learning_rate_finder_in_between_leaves_no_trace(pools, tmp_path):
    ranks = pools[2].run(_finds, str(tmp_path))
    assert all(same for same, _ in ranks)
    assert any(each.any() for _, before in ranks for each in before)
