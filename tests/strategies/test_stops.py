"""A rank that leaves the training loop alone: all ranks stop with it, or all raise an error that names it."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_compress import AsyncGossipStrategy, GossipStrategy, LocalSGDStrategy
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer

ASYNC = {
    "adpsgd": {},
    "adpsgd, moniqua": {"compressor": "moniqua"},
    "ssp": {"algorithm": "ssp"},
}
METHODS = {
    **{f"{name}, share": (AsyncGossipStrategy, {**given, "share_work": True}) for name, given in ASYNC.items()},
    **{f"{name}, alone": (AsyncGossipStrategy, {**given, "share_work": False}) for name, given in ASYNC.items()},
    "dpsgd": (GossipStrategy, {}),
    "sgp, delayed": (GossipStrategy, {"algorithm": {"name": "sgp", "delay": 1}, "topology": "one_peer_exponential"}),
    "local_sgd": (LocalSGDStrategy, {"sync_every": 4, "outer": "average"}),
    "streaming": (LocalSGDStrategy, {"sync_every": 4, "fragments": 2, "delay": 1}),
}
HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
]
LAST = 1
"""The rank that stops."""


class Validated(Net):
    """With a validation over all ranks."""

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("loss", nn.functional.cross_entropy(self(images), labels), sync_dist=True)


class Stops(Callback):
    """One rank stops in a hook: in the second epoch, or before the first one."""

    def __init__(self, hook):
        self.batches = 0

        def stop(trainer, *_):
            due = trainer.current_epoch >= 1 or hook in HOOKS[:2]
            if due and not trainer.sanity_checking and dist.get_rank() == LAST:
                trainer.should_stop = True

        ours = getattr(self, hook)
        setattr(self, hook, lambda *given: [stop(*given), ours(*given)][1])

    def on_train_batch_end(self, *_):
        self.batches += 1


def fit(method, make=Validated, callbacks=(), data=None, validates=True, **options):
    """Four epochs of 8 batches for each rank."""
    torch.manual_seed(1)
    strategy, given = METHODS[method]
    model = make()
    trainer = quiet_trainer(
        strategy(**given), **{"callbacks": list(callbacks), "max_epochs": 4, "num_sanity_val_steps": 0, **options}
    )
    train = loader(digits(0, 8 * 16 * dist.get_world_size())) if data is None else data
    trainer.fit(model, train, loader(digits(5, 96)) if validates else None)
    return trainer, parameters(model).numpy().tobytes()


def _stops(method, hook, validates):
    stops = Stops(hook)
    _, model = fit(method, callbacks=[stops], validates=validates)
    return model, stops.batches


def _stopped(found, meets=True):
    """All have one model, and none has begun a third epoch, unless the ranks did not meet in the first two."""
    assert len({model for model, _ in found}) == 1
    assert sum(batches for _, batches in found) <= (2 if meets else 4) * 8 * len(found)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_stop_with_one(pools, size, method):
    _stopped(pools[size].run(_stops, method, "on_train_batch_end", True))


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("method", ["adpsgd, share", "ssp, alone", "dpsgd", "streaming"])
def test_wherever_it_is_told_to(pools, method, hook, validates):
    if validates or hook != "on_validation_end":
        _stopped(pools[2].run(_stops, method, hook, validates), validates or METHODS[method][0] != AsyncGossipStrategy)


def _early():
    stops = {method: EarlyStopping("loss", patience=1, min_delta=100.0) for method in METHODS}
    return [fit(method, callbacks=[stop])[0].current_epoch for method, stop in stops.items()]


def test_early_stopping_is_not_put_off(pools):
    assert pools[2].run(_early) == [[2] * len(METHODS)] * 2


class Skips(Validated):
    """Some ranks leave the first epoch in its fourth batch."""

    ranks = ()

    def on_train_batch_start(self, batch, batch_idx):
        self.entered = getattr(self, "entered", 0) + 1
        return -1 if batch_idx == 3 and self.current_epoch == 0 and dist.get_rank() in self.ranks else None


class SkipsAlone(Skips):
    ranks = (LAST,)


class SkipsTogether(Skips):
    ranks = range(8)


def _skips(method, make, options):
    try:
        return fit(method, make, **options)[1]
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_skips_the_rest_of_its_epoch_alone_is_named_by_all(pools, size, method, epochs):
    for said in pools[size].run(_skips, method, SkipsAlone, {"max_epochs": epochs}):
        assert f"rank {LAST} " in said
        assert "return -1 from on_train_batch_start on all ranks or on none" in said


@pytest.mark.parametrize("method", METHODS)
def test_ranks_skip_the_rest_of_an_epoch_together(pools, method):
    first, second = pools[2].run(_skips, method, SkipsTogether, {})
    assert isinstance(first, bytes)
    assert first == second


def test_ranks_that_share_batches_and_do_not_meet_may_skip_alone(pools):
    first, second = pools[2].run(_skips, "adpsgd, share", SkipsAlone, {"validates": False})
    assert isinstance(first, bytes)
    assert first == second


class Short(IterableDataset):
    """Says 8 batches, and has fewer on one rank."""

    def __len__(self):
        return 8

    def __iter__(self):
        images, labels = digits().tensors
        for batch in range(8 - 3 * (dist.get_rank() == LAST)):
            yield images[batch * 16 : batch * 16 + 16], labels[batch * 16 : batch * 16 + 16]


@pytest.mark.parametrize("method", ["adpsgd, alone", "dpsgd", "local_sgd", "streaming"])
def test_a_stream_that_is_shorter_than_it_says_is_named_by_all(pools, method):
    options = {"data": DataLoader(Short(), batch_size=None), "max_epochs": 1}
    for said in pools[2].run(_skips, method, Validated, options):
        assert f"rank {LAST} " in said
