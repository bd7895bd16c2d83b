"""meSimp in a real training: neurons go, on all ranks the same, and training goes on."""

import warnings
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_compress import CompressedDDPStrategy, MeSimp
from lightning_compress.contrib.pruning import shrink
from tests.helpers.training import digits, loader


class Wide(pl.LightningModule):
    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.optimizer, self.losses = optimizer, []
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 10)
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 1e-3)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def train(folder, callback, strategy="auto", epochs=5, path=None, model=None, **settings):
    pl.seed_everything(3, verbose=False)
    model = model or Wide()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size() if dist.is_initialized() else 1,
            strategy=strategy,
            max_epochs=epochs,
            limit_train_batches=6,
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
            **settings,
        )
        trainer.fit(model, loader(digits()), ckpt_path=path)
    return trainer, model


def sizes(model):
    return [model.net[number].out_features for number in (1, 3, 6)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_neurons_go_and_training_goes_on(tmp_path, optimizer):
    callback = MeSimp({"net.1": 8, "net.3": 0.2}, cycle=2, prune=0.15)
    trainer, model = train(tmp_path, callback, model=Wide(optimizer))
    first, second = callback.history
    assert sizes(model) == [second["net.1"], second["net.3"], 10]
    assert second["net.1"] <= first["net.1"] < 48
    assert second["net.3"] <= first["net.3"] < 32
    assert model.net[3].in_features == second["net.1"]
    assert model.net[6].in_features == second["net.3"]
    assert sum(model.losses[-6:]) < sum(model.losses[:6])
    assert type(model.net[1]) is nn.Linear
    x = torch.randn(4, 1, 8, 8)
    exported = torch.export.export(model.net.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), model.net(x))
    path = trainer.checkpoint_callback.best_model_path
    content = torch.load(path, weights_only=True)
    small = shrink(Wide(optimizer), content["state_dict"])
    small.load_state_dict(content["state_dict"])
    assert sizes(small) == sizes(model)
    again = MeSimp({"net.1": 8, "net.3": 0.2}, cycle=2, prune=0.15)
    _, longer = train(tmp_path, again, epochs=7, path=path, model=small)
    assert again.history[:2] == [first, second]
    assert len(again.history) == 3
    assert sizes(longer)[0] <= second["net.1"]


class Counted(MeSimp):
    """Notes the counters when training begins, and when neurons go."""

    def __init__(self, **settings):
        super().__init__({"net.1": 8, "net.3": 0.2}, prune=0.15, **settings)
        self.begun, self.pruned = {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.begun = self.begun or {name: (each.hits.tolist(), each.seen) for name, each in self.layers.items()}

    def _prune(self, trainer, pl_module):
        self.pruned.append((trainer.global_step, {each.seen for each in self.layers.values()}))
        super()._prune(trainer, pl_module)


def test_a_run_that_goes_on_counts_on(tmp_path):
    first, second = Counted(cycle=3), Counted(cycle=3)
    trainer, _ = train(tmp_path, first, epochs=2)
    path = trainer.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=True)["callbacks"]["Counted"]["counts"]
    assert {seen for _, seen in saved.values()} == {12}
    train(tmp_path, second, epochs=4, path=path)
    assert second.begun == saved
    assert (first.pruned, second.pruned) == ([], [(18, {18})])


@pytest.mark.parametrize("k", [20, {"net.1": 20, "net.3": 20}], ids=str)
def test_goes_on_where_all_layers_are_narrower_than_k(tmp_path, k):
    first, second = (MeSimp(k, cycle=1, prune=0.9) for _ in range(2))
    trainer, model = train(tmp_path, first, epochs=2)
    assert max(sizes(model)[:2]) < 20
    path = trainer.checkpoint_callback.best_model_path
    small = shrink(Wide(), torch.load(path, weights_only=True)["state_dict"])
    train(tmp_path, second, epochs=4, path=path, model=small)
    assert second.history == first.history * 2


class StopsAt(pl.Callback):
    """As early stopping does."""

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 12


@pytest.mark.parametrize(
    ("settings", "stops", "pruned"),
    [({"max_steps": 12}, False, []), ({"max_steps": 13}, False, [(12, {12})]), ({}, True, [])],
    ids=["its end", "a step before", "stopped"],
)
def test_nothing_goes_where_the_training_ends(tmp_path, settings, stops, pruned):
    callback, model = Counted(cycle=2), Wide()
    model.configure_callbacks = lambda: [StopsAt()] if stops else []
    train(tmp_path, callback, epochs=3, model=model, **settings)
    assert callback.pruned == pruned
    assert (sizes(model) == [48, 32, 10]) is not bool(pruned)


def test_per_example_and_by_pairs(tmp_path):
    class Free(Wide):
        def __init__(self):
            super().__init__()
            parts = self.net
            self.net = nn.Flatten()
            self.first, self.second = parts[1], nn.Linear(48, 10)

        def training_step(self, batch, batch_idx):
            hidden = self.first(self.net(batch[0])).relu()
            return nn.functional.cross_entropy(self.second(hidden), batch[1])

    with pytest.raises(ValueError, match="must know which layer takes the outputs of first"):
        train(tmp_path, MeSimp(6, cycle=1), model=Free())
    callback = MeSimp(6, cycle=1, prune=0.05, pairs={"first": "second"}, per_example=True)
    _, model = train(tmp_path, callback, model=Free(), epochs=2)
    assert model.second.in_features == model.first.out_features == callback.history[0]["first"] < 48
    assert len(callback.history) == 1  # not after the last epoch


def on_two_ranks(folder, kind):
    strategies = {
        "ddp": lambda: "ddp",
        "rows": lambda: CompressedDDPStrategy("rows", min_numel=1),
        "topk": lambda: CompressedDDPStrategy({"name": "topk", "density": 0.1}, min_numel=1),
    }
    callback = MeSimp({"net.1": 8, "net.3": 6}, cycle=1, prune=0.15)
    trainer, model = train(folder, callback, strategies[kind](), epochs=3)
    check = torch.cat([each.detach().flatten() for each in model.parameters()])
    steps = trainer.strategy.compression.step if kind != "ddp" else trainer.global_step
    return callback.history, sizes(model), check, model.losses, steps


@pytest.mark.parametrize("kind", ["ddp", "rows", pytest.param("topk", marks=pytest.mark.thorough)])
def test_two_ranks_remove_the_same(pools, tmp_path, kind):
    (history, size, first, losses, steps), (other, same, second, *_) = pools[2].run(on_two_ranks, tmp_path, kind)
    assert history == other
    assert size == same
    assert history[0]["net.1"] < 48
    assert torch.equal(first, second)  # averaged after the removal, too
    assert sum(losses[-6:]) < sum(losses[:6])
    assert steps == 18


def goes_on_in_a_cycle(folder):
    """The run at once, and one that goes on after two of three epochs; the counters between."""

    def steady():
        pl.seed_everything(3, verbose=False)
        model = Wide()
        model.net[4] = nn.Identity()  # draws nothing
        return model

    callbacks = [MeSimp({"net.1": 8, "net.3": 6}, cycle=3, prune=0.2) for _ in range(3)]
    _, whole = train(f"{folder}/whole", callbacks[0], "ddp", epochs=4, model=steady())
    trainer, _ = train(f"{folder}/half", callbacks[1], "ddp", epochs=2, model=steady())
    path = trainer.strategy.broadcast(trainer.checkpoint_callback.best_model_path)
    counts = torch.load(path, weights_only=True)["callbacks"]["MeSimp"]["counts"]
    _, again = train(f"{folder}/half", callbacks[2], "ddp", epochs=4, path=path, model=steady())
    same = [torch.equal(*each) for each in zip(whole.parameters(), again.parameters(), strict=True)]
    return same, counts, [callbacks[1].layers["net.1"].hits.tolist(), callbacks[2].layers["net.1"].seen]


def test_a_run_that_goes_on_removes_what_all_ranks_counted(pools, tmp_path):
    (same, counts, (own, seen)), (also, _, (others, _)) = pools[2].run(goes_on_in_a_cycle, str(tmp_path))
    assert all(same + also)
    hits, total = counts["net.1"]
    assert (hits, total) == ([sum(each) for each in zip(own, others, strict=True)], 24)
    assert own != others
    assert seen == 6  # of the last epoch alone


@pytest.mark.parametrize("make", [DDPStrategy, partial(CompressedDDPStrategy, "topk")], ids=["ddp", "compressed"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_main_process_that_keeps_the_whole_model_is_refused(make, method):
    trainer = SimpleNamespace(strategy=make(start_method=method))
    with pytest.raises(ValueError, match=f"start_method='{method}'.*start_method='popen'"):
        MeSimp().on_fit_start(trainer, Wide())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cycle": 0}, "integer number of epochs"),
        ({"cycle": True}, "integer number of epochs"),
        ({"prune": 0}, "between 0 and 1"),
        ({"prune": 1.0}, "between 0 and 1"),
        ({"k": 0}, "whole number of outputs"),
    ],
)
def test_bad_settings(options, words):
    with pytest.raises(ValueError, match=words):
        MeSimp(**options)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_pruned_is_refused_when_training_begins(tmp_path):
    with pytest.raises(ValueError, match="keeps all of its 48 outputs"):
        train(tmp_path, MeSimp({"net.1": 1.0}))
    model = Wide()
    model.configure_optimizers = lambda: torch.optim.Adafactor(model.parameters())
    with pytest.raises(ValueError, match="Adafactor"):
        train(tmp_path, MeSimp(8), model=model)
    assert type(model.net[1]) is nn.Linear


def with_dgc(folder):
    with pytest.raises(ValueError, match="velocities and moments"):
        train(folder, MeSimp(8), CompressedDDPStrategy("dgc"))


def test_what_an_optimizer_keeps_elsewhere_is_refused(pools, tmp_path):
    pools[2].run(with_dgc, tmp_path)
