"""MinibatchSize: which sizes are tried and taken, searches that leave no trace, resumed runs, and what is refused."""

import logging
import math
import random
import warnings
from contextlib import contextmanager

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_compress import CommunicationMonitor, CompressedDDPStrategy, LocalSGDStrategy, MeProp, MinibatchSize
from lightning_compress.contrib.minibatch import minibatch_size
from lightning_compress.contrib.minibatch.minibatch_size import largest_good, sizes_to_try
from lightning_compress.contrib.minibatch.probe import _model
from lightning_compress.contrib.minibatch.rates import LINEAR, multiply
from tests.conformance.training import ByStep, kept_of
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer


def test_sizes_go_by_square_roots_of_two():
    assert sizes_to_try(1, 1, 64) == [1, 2]
    assert sizes_to_try(4, 1, 64) == [2, 3, 4, 6, 8]
    assert sizes_to_try(8, 1, 64) == [4, 6, 8, 11, 16]
    assert sizes_to_try(8, 6, 12) == [6, 8, 12]
    assert sizes_to_try(7, 1, 64) == [4, 6, 8, 11]
    assert sizes_to_try(64, 1, 16) == [32]  # a resumed run with another limit
    for previous in range(1, 100):
        sizes = sizes_to_try(previous, 1, 50)
        assert sizes == sorted(set(sizes))
        assert all(previous / 2 <= size <= 2 * previous for size in sizes)


@pytest.mark.parametrize(
    ("losses", "margin", "size", "tried"),
    [
        ([1.0, 1.005, 1.01, 1.02, 0.5], 1.0, 4, 4),
        ([1.0, 0.9, 0.8], 0.0, 4, 3),
        ([1.0, math.nan, 0.5], 10.0, 1, 2),
        ([1.0, math.inf, 0.5], 10.0, 1, 2),
        ([math.nan, 1.0], 10.0, None, 1),
        ([math.inf, 1.0], 10.0, None, 1),
        ([-1.0, -0.995, -0.9], 1.0, 2, 3),
    ],
)
def test_the_last_size_that_is_good_is_taken(losses, margin, size, tried):
    sizes = [1, 2, 4, 8, 16][: len(losses)]
    found, seen = largest_good(sizes, dict(zip(sizes, losses, strict=True)).__getitem__, margin)
    assert found == size
    assert len(seen) == tried


class Messy(Net):
    """Keeps and draws things as modules do: dropout, metrics, counters, a rebound buffer, logs and hooks."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Dropout(0.2), *self.head)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.register_buffer("average", torch.zeros(()))
        self.count, self.seen, self.trace = 0, [], {"last": torch.zeros(())}
        self.held = self.seen

    def training_step(self, batch, batch_idx):
        images, labels = batch
        scores = self(images + 0.1 * random.random() + 0.1 * np.random.rand())
        loss = nn.functional.cross_entropy(scores, labels)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.trace["last"].copy_(loss.detach())
        self.count += 1
        self.seen.append(self.count)
        self.new = self.count
        self.accuracy(scores, labels)
        self.log("train/accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("train/loss", loss + 0.01 * self.count, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_):
        self.count += 1

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.05, momentum=0.9)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Rows(Callback):
    """The first pixel of each image that callbacks see, and how often each hook is called."""

    def __init__(self):
        self.pixels, self.stepped = [], 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.pixels += batch[0][:, 0, 3, 3].tolist()

    def on_before_optimizer_step(self, *_):
        self.stepped += 1


@contextmanager
def idle_search(size=1):
    """Searches that try all sizes and keep the present one."""
    plain = minibatch_size.largest_good
    minibatch_size.largest_good = lambda sizes, loss_of, _: (size, [loss_of(each) for each in sizes])
    try:
        yield
    finally:
        minibatch_size.largest_good = plain


def fit(folder, callbacks=(), strategy="auto", make=Messy, batches=None, path=None, **options):
    """Fit in this rank; the trainer and the model."""
    pl.seed_everything(5, verbose=False)
    model, settings = make(), {"max_epochs": 4, "limit_train_batches": 10, "log_every_n_steps": 3, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.distributed.is_initialized():
            trainer = quiet_trainer(strategy, callbacks=list(callbacks), default_root_dir=folder, **settings)
        else:
            quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
            settings = {"logger": False, **quiet, **settings}
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=1,
                strategy=strategy,
                callbacks=list(callbacks),
                default_root_dir=folder,
                **settings,
            )
        trainer.fit(model, loader(digits()) if batches is None else batches, ckpt_path=path)
    return trainer, model


def everything(trainer, model):
    """What a search could leave something in, by name, as numbers and texts."""
    optimizer = trainer.optimizers[0]
    momentum = [value.flatten() for state in optimizer.state.values() for value in state.values()]  # dgc leaves none
    found = {
        "model": torch.cat([each.flatten().float() for each in model.state_dict().values()]).numpy(),
        "momentum": torch.cat([torch.zeros(0), *momentum]).detach().numpy(),
        "random": torch.get_rng_state().numpy(),
        "numpy": np.random.get_state()[1],
        "python": np.array(random.getstate()[1]),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "schedule": repr(sorted(trainer.lr_scheduler_configs[0].scheduler.state_dict().items())),
        "steps": trainer.global_step,
        "metrics": {name: float(each) for name, each in trainer.callback_metrics.items() if not name.endswith("_ms")},
        "kept": (model.count, model.seen, float(model.average), float(model.trace["last"]), model.seen is model.held),
        "accumulate": trainer.accumulate_grad_batches,
    }
    if isinstance(trainer.strategy, CompressedDDPStrategy):
        stats = trainer.strategy.comm_stats()
        found["residuals"] = kept_of(trainer)
        found["traffic"] = {name: stats[name] for name in stats if not name.endswith(("_ms", "summary"))}
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, other[name]), name
        else:
            assert value == other[name], name


def _no_trace(compressor, folder, delay):
    """Everything after a run without and one with searches, and what these cost."""
    found = []
    callback = MinibatchSize(2, 1, probe=8)
    for number, own in enumerate(([], [callback])):
        late = {"delay": 1, "schedule": "none"} if delay else {}
        strategy = CompressedDDPStrategy(compressor, bucket_cap_mb=0.02, **late) if compressor else "ddp"
        logger = CSVLogger(f"{folder}/{number}", name="", version="")
        with idle_search():
            watching = [*own, rows := Rows(), CommunicationMonitor()]
            trainer, model = fit(folder, watching, strategy, logger=logger, max_epochs=3, limit_train_batches=8)
        found.append(everything(trainer, model) | {"rows": rows.pixels, "stepped": rows.stepped})
    return *found, callback.history


METHODS = [
    ("onebit", 0),
    *(
        pytest.param(compressor, delay, marks=pytest.mark.thorough)
        for compressor, delay in [
            (None, 0),
            ("none", 0),
            ("bf16", 0),
            ("rotated", 0),
            ({"name": "topk", "density": 0.05}, 0),
            ("powersgd", 0),
            ({"name": "dgc", "density": 0.05}, 0),
            ({"name": "qsgd", "bits": 2}, 0),
            ("ef21", 0),
            ("none", 1),
            ("onebit", 1),
        ]
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("compressor", "delay"), METHODS, ids=str)
def test_a_search_leaves_no_trace_on_two_ranks(pools, tmp_path, compressor, delay):
    answers = pools[2].run(_no_trace, compressor, str(tmp_path), delay)
    for without, searched, history in answers:
        assert_same(without, searched)
        assert [found["epoch"] for found in history] == [1, 2]
        assert all(found["losses"].keys() == {1, 2} for found in history)
        assert all(found["samples"] == 2 * 2 * 8 * 16 for found in history)  # sizes, ranks, batches, rows
        assert all(("bytes" in found) == (compressor is not None) for found in history)
    (*_, one), (*_, other) = answers
    assert [found["losses"] for found in one] == [found["losses"] for found in other]
    rows = [path.read_text().splitlines() for path in sorted(tmp_path.glob("*/metrics.csv"))]
    columns = [lines[0].split(",") for lines in rows]
    assert set(columns[1]) - set(columns[0]) == {
        f"minibatch/{name}"
        for name in ("accumulate_grad_batches", "search_samples", "search_seconds")
        + (("search_bytes",) if compressor else ())
    }


class Augmented(torch.utils.data.Dataset):
    """Digits, moved by random numbers of all three kinds."""

    def __init__(self):
        self.inner = digits()

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        image, label = self.inner[index]
        return image + 0.1 * (torch.rand(()) + random.random() + np.random.rand()), label


def _shuffled(workers):
    generator = torch.Generator().manual_seed(7)
    dataset = Augmented()
    sampler = RandomSampler(dataset, generator=generator)
    return DataLoader(dataset, 16, sampler=sampler, num_workers=workers, generator=generator), generator


@pytest.mark.parametrize("workers", [0, 1])
def test_a_search_leaves_the_order_and_the_augmentation_of_rows(tmp_path, workers):
    found = []
    for own in ([], [MinibatchSize(2, (1, 3), probe=8)]):
        batches, generator = _shuffled(workers)
        with idle_search():
            trainer, model = fit(tmp_path, [*own, rows := Rows()], batches=batches)
        drawn = generator.get_state().numpy()
        found.append(everything(trainer, model) | {"rows": rows.pixels, "generator": drawn})
    assert_same(*found)


def test_a_search_leaves_the_loss_scale(tmp_path):
    found = []
    for own in ([], [MinibatchSize(2, 1, probe=10)]):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)  # overflows at first, then grows
        with idle_search():
            trainer, model = fit(tmp_path, own, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        found.append(everything(trainer, model) | {"scale": repr(scaler.state_dict())})
    assert_same(*found)


class Part(nn.Module):
    """Attributes of all kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("rebound", torch.zeros(3))
        self.loose, self.other, self.names, self.thing = torch.ones(3), None, {"a"}, object()
        self.alias = self.names


def test_a_model_is_put_back():
    part = Part()
    buffer, thing = part.rebound, part.thing
    part.linear.weight.grad = torch.full((3, 3), 2.0)
    weight = part.linear.weight.detach().clone()
    with _model(part):
        part.rebound = torch.ones(3)
        buffer.add_(1)
        part.loose.mul_(3)
        part.other, part.thing, part.late = object(), None, 1
        part.names.add("b")
        part.eval()
        with torch.no_grad():
            part.linear.weight.zero_()
        part.linear.weight.grad = None
        part.linear.bias.grad = torch.ones(3)
    assert part.rebound is buffer
    assert not buffer.any()
    assert part.loose.tolist() == [1, 1, 1]
    assert part.other is None
    assert part.thing is thing
    assert not hasattr(part, "late")
    assert part.names == {"a"}
    assert part.names is part.alias
    assert part.training
    assert part.linear.training
    assert torch.equal(part.linear.weight, weight)
    assert torch.equal(part.linear.weight.grad, torch.full((3, 3), 2.0))
    assert part.linear.bias.grad is None


class Plain(ByStep):
    """With a schedule by epoch."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.01, momentum=0.9)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 2, 0.5)]


def _run(folder, epochs=3, path=None, more=()):
    """Parameters, residuals, what was found, and the rest of a run that takes larger sizes as soon as it may."""
    callback = MinibatchSize(4, 1, margin=1000.0, probe=1.0)
    options = {"limit_train_batches": 16, "max_epochs": epochs, "path": path, "enable_checkpointing": bool(more)}
    logger = CSVLogger(folder, name="", version="")
    trainer, model = fit(folder, [callback, *more], CompressedDDPStrategy("onebit"), Plain, logger=logger, **options)
    found = [{name: each for name, each in one.items() if name != "seconds"} for one in callback.history]
    rates = trainer.optimizers[0].param_groups[0]["lr"], trainer.lr_scheduler_configs[0].scheduler.base_lrs
    rest = {"steps": trainer.global_step, "rates": rates, "accumulate": trainer.accumulate_grad_batches}
    return parameters(model).numpy(), kept_of(trainer), found, rest


@pytest.fixture(scope="module")
def whole(pools, tmp_path_factory):
    """Three epochs of two ranks, and the folder of the log."""
    folder = tmp_path_factory.mktemp("whole")
    return pools[2].run(_run, str(folder)), folder


def test_sizes_grow_together_on_all_ranks_and_rates_with_them(whole):
    (one, other), folder = whole
    assert np.array_equal(one[0], other[0])
    _, _, history, rest = one
    assert [list(found["losses"]) for found in history] == [[1, 2], [1, 2, 3, 4]]
    assert [found["size"] for found in history] == [2, 4]
    assert rest["steps"] == 16 + 8 + 4
    rate, base = rest["rates"]
    assert rate == pytest.approx(0.01 * 4 * 0.5)  # the schedule has halved it
    assert base == [pytest.approx(0.04)]
    assert rest["accumulate"] == 1  # the Trainer has its own again
    said = (folder / "metrics.csv").read_text().splitlines()
    place = said[0].split(",").index("minibatch/accumulate_grad_batches")
    assert [float(row.split(",")[place]) for row in said[1:] if row.split(",")[place]] == [2, 4]


class Diverges(Net):
    """Its loss is NaN in the second epoch."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (math.nan if self.current_epoch == 1 else 1.0)


def test_a_loss_that_is_not_finite_keeps_the_size_and_warns():
    callback = MinibatchSize(4, [1], probe=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=2,
            limit_train_batches=16,
            callbacks=[callback],
            logger=False,
            **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
        )
        trainer.fit(Diverges(), loader(digits()))
    assert any("loss on the probe is not finite (1: nan)" in str(each.message) for each in caught)
    assert callback.size == 1
    assert [*callback.history[0]["losses"]] == [1]


def test_a_search_says_what_it_cost(tmp_path, caplog):
    callback = MinibatchSize(2, [1], margin=1000.0, probe=8)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(tmp_path, [callback], make=Net, max_epochs=2)
    (line,) = [each for each in caplog.messages if each.startswith("MinibatchSize")]
    assert "from epoch 1 on, accumulate_grad_batches=2; loss by size 1: " in line
    assert "the search took 256 samples and " in line


def _resumed(folder, every):
    """See ``_run``; it stopped after the second epoch, and goes on from the checkpoint of a step."""
    saving = ModelCheckpoint(f"{folder}/saved", every_n_train_steps=every, save_top_k=-1, filename="{step}")
    _run(f"{folder}/half", 2, more=[saving])
    return _run(f"{folder}/half", path=f"{folder}/saved/step={every}.ckpt")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [20, 24], ids=["within an epoch", "between epochs"])
def test_a_resumed_run_is_the_uninterrupted_one(pools, whole, tmp_path, every):
    for uninterrupted, resumed in zip(whole[0], pools[2].run(_resumed, str(tmp_path), every), strict=True):
        assert uninterrupted[2:] == resumed[2:]
        assert np.array_equal(uninterrupted[0], resumed[0])
        assert np.array_equal(uninterrupted[1], resumed[1])


def _stepped(make, factor):
    """Rates over 12 epochs, multiplied after the fourth."""
    optimizer = SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))], 0.5)
    optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.2})
    schedule, rates = make(optimizer), []
    config = type("Config", (), {"scheduler": schedule, "interval": "epoch"})()
    for epoch in range(12):
        if epoch == 4:
            multiply([optimizer], [config], factor)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
    return torch.tensor(rates)


def _chained(optimizer):
    parts = lr_scheduler.ConstantLR(optimizer, 0.5, 5), lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def _sequential(optimizer):
    parts = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(optimizer, 6, 0.01)
    return lr_scheduler.SequentialLR(optimizer, list(parts), [6])


SCHEDULES = {
    lr_scheduler.ChainedScheduler: _chained,
    lr_scheduler.ConstantLR: lambda of: lr_scheduler.ConstantLR(of, 0.5, 7),
    lr_scheduler.CosineAnnealingLR: lambda of: lr_scheduler.CosineAnnealingLR(of, 8, 0.05),
    lr_scheduler.CosineAnnealingWarmRestarts: lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 3, 2, 0.05),
    lr_scheduler.ExponentialLR: lambda of: lr_scheduler.ExponentialLR(of, 0.8),
    lr_scheduler.LambdaLR: lambda of: lr_scheduler.LambdaLR(of, lambda epoch: 1 / (1 + epoch)),
    lr_scheduler.LinearLR: lambda of: lr_scheduler.LinearLR(of, 0.1, total_iters=9),
    lr_scheduler.MultiplicativeLR: lambda of: lr_scheduler.MultiplicativeLR(of, lambda epoch: 1 - epoch / 20),
    lr_scheduler.MultiStepLR: lambda of: lr_scheduler.MultiStepLR(of, [2, 6, 8], 0.3),
    lr_scheduler.PolynomialLR: lambda of: lr_scheduler.PolynomialLR(of, 10, 2.0),
    lr_scheduler.ReduceLROnPlateau: lambda of: lr_scheduler.ReduceLROnPlateau(of, patience=1, factor=0.3, min_lr=0.05),
    lr_scheduler.SequentialLR: _sequential,
    lr_scheduler.StepLR: lambda of: lr_scheduler.StepLR(of, 3, 0.5),
}


@pytest.mark.parametrize("kind", LINEAR)
def test_multiplied_schedules_give_multiplied_rates(kind):
    plain, multiplied = (_stepped(SCHEDULES[kind], factor) for factor in (1.0, 3.0))
    assert torch.equal(plain[:4], multiplied[:4])
    torch.testing.assert_close(3 * plain[4:], multiplied[4:])
    assert not torch.equal(plain[0], plain[-1])


class Adam(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Steps(Net):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": lr_scheduler.StepLR(optimizer, 1), "interval": "step"},
        }


class Cycles(Net):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [lr_scheduler.CyclicLR(optimizer, 0.1, 0.2)]


class Manual(Net):
    automatic_optimization = False


class Stream(IterableDataset):
    def __iter__(self):
        return iter(digits())


REFUSED = [
    ({"make": Adam}, "holds for torch.optim.SGD and not for AdamW. Use SGD"),
    ({"make": Steps}, "StepLR counts steps. Return it with interval 'epoch'"),
    ({"make": Cycles}, "cannot multiply the learning rates of CyclicLR"),
    ({"make": Manual}, "manual optimization does not follow"),
    ({"max_steps": 10}, "max_steps=10 would end the training after an unknown number of samples"),
    ({"accumulate_grad_batches": 4}, "largest=4.: must be above the size to begin with"),
    (
        {"more": [GradientAccumulationScheduler({0: 2})]},
        "GradientAccumulationScheduler, which sets accumulate_grad_batches",
    ),
    ({"more": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging, which sets learning rates"),
    ({"more": [MeProp(0.5)]}, "MeProp, which counts steps and keeps memories"),
    ({"limit_train_batches": 30}, "the probe has 15 of the epoch's 30 batches, but must have 4 steps of largest, 16"),
    ({"batches": DataLoader(Stream(), 16)}, "which it cannot from DataLoader over Stream"),
    ({"batches": {"a": loader(digits()), "b": loader(digits())}}, "which it cannot from dict"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[each[1] for each in REFUSED])
def test_what_cannot_work_is_refused(tmp_path, given, said):
    options = {"make": Net, "limit_train_batches": 40, **given}
    callbacks = [*options.pop("more", ()), MinibatchSize(4)]
    with pytest.raises(ValueError, match=said):
        fit(tmp_path, callbacks, **options)


def _refused(kind, settings, folder):
    try:
        fit(folder, [MinibatchSize(4)], kind(**settings), Net, limit_train_batches=20)
    except ValueError as error:
        return str(error)
    return ""


STEPWISE = {"compressor": "topk", "schedule": {"density": {0: 0.5, 9: 0.01}}}
STRATEGIES = [
    (LocalSGDStrategy, {"sync_every": 2}, "one device, not LocalSGDStrategy"),
    (CompressedDDPStrategy, {"compressor": "topk", "static_graph": True}, "static_graph=True cannot"),
    (CompressedDDPStrategy, STEPWISE, "the schedule of density counts steps"),
    (CompressedDDPStrategy, {"compressor": "topk"}, "has 10 of the epoch's 20 batches"),
]


@pytest.mark.parametrize(("kind", "settings", "said"), STRATEGIES, ids=[each[2] for each in STRATEGIES])
def test_what_cannot_work_is_refused_on_all_ranks(pools, tmp_path, kind, settings, said):
    for answer in pools[2].run(_refused, kind, settings, str(tmp_path)):
        assert said in answer


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"largest": 1}, "largest=1 must be a whole number of batches, 2 or more"),
        ({"largest": 2.0}, "largest=2.0 must be"),
        ({"epochs": 0}, "epochs=0 must be a whole number from 1 on, or a list of such. Epoch 0 has no search"),
        ({"epochs": [0, 1]}, r"epochs=\[0, 1\] must be"),
        ({"epochs": []}, r"epochs=\[\] must be"),
        ({"margin": -1.0}, "margin=-1.0 must be a percentage"),
        ({"margin": math.nan}, "margin=nan must be"),
        ({"probe": 0}, "probe=0 must be a number of batches, or a share"),
        ({"probe": 1.5}, "probe=1.5 must be"),
        ({"probe": True}, "probe=True must be"),
    ],
)
def test_settings_are_checked(given, said):
    with pytest.raises(ValueError, match=said):
        MinibatchSize(**{"largest": 4, **given})


def test_a_debug_run_is_not_refused(tmp_path):
    trainer, _ = fit(tmp_path, [MinibatchSize(64, 1)], make=Net, fast_dev_run=2)
    assert trainer.global_step == 2
