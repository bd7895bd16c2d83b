"""What happens when a gradient is not finite, or a rank trains another model than the others."""

import logging
import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.collectives import run_threads
from lightning_compress.engine.drift import DriftGuard
from lightning_compress.engine.group import Group
from lightning_compress.engine.optimizers import Trained
from lightning_compress.periodic import Gossip, LocalSGD
from lightning_compress.settings.run_state import RunState
from tests.engine.test_modes import TwoOptimizers, residuals
from tests.helpers.training import Net, digits, parameters, quiet_trainer

BATCH, BAD = 16, 3


class Spoilt(Net):
    """One batch of rank 1 makes NaN."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == BAD and dist.get_rank() == 1 else loss


class SpoiltTwice(TwoOptimizers):
    """The same, with two optimizers after one backward."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        loss = loss * float("nan") if batch_idx == BAD and dist.get_rank() == 1 else loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


class Honest(SpoiltTwice):
    """Without."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, BAD + 1)


class Evaluated(Net):
    """With a validation, after which Lightning leaves the wrapper of the model in evaluation mode."""

    def validation_step(self, batch, batch_idx):
        self(batch[0])


def train(make, dataset, steps, callbacks=(), **settings):
    """The whole of a run on this rank."""
    torch.manual_seed(1)
    model = make()
    strategy = CompressedDDPStrategy("topk", bucket_cap_mb=0.02, **settings)
    options = {"max_epochs": 1, "limit_train_batches": steps, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, callbacks=list(callbacks), **options)
    in_order = DistributedSampler(dataset, shuffle=False)
    evaluated = DataLoader(Subset(dataset, range(BATCH)), BATCH) if make is Evaluated else None
    trainer.fit(model, DataLoader(dataset, BATCH, sampler=in_order, drop_last=True), evaluated)
    return parameters(model).numpy(), strategy


def without_bad(dataset):
    """The data without what the ranks' bad batch is made of; samples go to the ranks by turns."""
    turn = BATCH * dist.get_world_size()
    return Subset(dataset, [each for each in range(len(dataset)) if each // turn != BAD])


def _skip(makes):
    spoilt, honest = makes
    skipped, strategy = train(spoilt, digits(), 8, on_nonfinite="skip")
    removed, _ = train(honest, without_bad(digits()), 7)
    return np.array_equal(skipped, removed), bool(np.isfinite(skipped).all()), strategy.comm_stats()


@pytest.mark.parametrize("makes", [(Spoilt, Net), (SpoiltTwice, Honest)])
@pytest.mark.parametrize("size", [2, 3])
def test_a_skipped_step_might_as_well_not_have_been(pools, makes, size):
    for same, finite, stats in pools[size].run(_skip, makes):
        assert finite
        assert same
        assert stats["nonfinite_steps"] == 1
        assert stats["steps"] == 7


def _raise():
    try:
        train(Spoilt, digits(), 8, on_nonfinite="raise")
    except FloatingPointError as error:
        return str(error)
    return ""


def test_an_error_names_step_rank_and_parameters(pools):
    first, second = pools[2].run(_raise)
    assert first.startswith(f"step {BAD}: gradients are not finite on another rank")
    assert second.startswith(f"step {BAD}: gradients are not finite on rank 1, of ")
    assert "body" in second or "head" in second


def _bare(closure):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    compression = attach(model, "onebit", on_nonfinite="skip")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []

    def backward():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64, generator=generator)).square().mean()
        (loss * float("inf") if step == 2 and dist.get_rank() == 1 else loss).backward()
        return loss

    for step in range(5):  # noqa: B007  # backward looks at it
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        seen.append((parameters(model).numpy(), residuals(compression)))
    compression.close()
    return seen, compression.step, compression.stats()["nonfinite_steps"]


@pytest.mark.parametrize("closure", [False, True])
def test_a_bare_model_skips_too(pools, closure):
    ranks = pools[2].run(_bare, closure)
    for seen, steps, count in ranks:
        assert (steps, count) == (4, 1)
        moved = [not np.array_equal(before, after) for (before, _), (after, _) in pairwise(seen)]
        assert moved == [True, False, True, True]
        assert all(np.array_equal(seen[1][1][name], seen[2][1][name]) for name in seen[1][1])
    assert np.array_equal(ranks[0][0][-1][0], ranks[1][0][-1][0])


class Drifts(Callback):
    """One rank's parameter, or what comes out of its averaging, changes in its last bit."""

    def __init__(self, what):
        self.what = what

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if self.what == "parameter" and trainer.global_step == 3 and last_rank():
            with torch.no_grad():
                bump(module.head[2].weight)


def last_rank():
    return dist.get_rank() == dist.get_world_size() - 1


def bump(matrix):
    matrix[3, 5] = torch.nextafter(matrix[3, 5], torch.tensor(float("inf")))


def _drift(what, **settings):
    reduce = Group.reduce

    def faulty(group, gradients, step, *more):
        flag = reduce(group, gradients, step, *more)
        if what == "gradient" and step == 3 and last_rank() and "head.2.weight" in group.bucket_names:
            bump(gradients[group.bucket_names.index("head.2.weight")].view(10, 64))
        return flag

    Group.reduce = faulty
    try:
        train(Evaluated, digits(), 6, [Drifts(what)], check_drift_every=2, **settings)
    except RuntimeError as error:
        return str(error)
    finally:
        Group.reduce = reduce
    return ""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("what", "gradients"),
    [("parameter", "but their averaged gradients do not"), ("gradient", "and so do their averaged gradients")],
)
def test_drift_is_an_error_on_all_ranks(pools, size, what, gradients):
    for said in pools[size].run(_drift, what):
        assert "after step 4, " in said
        assert f"{gradients};" in said
        assert "head.2.weight" in said
        assert f"of rank {size - 1} differ from rank 0's" in said


@pytest.mark.parametrize("places", [(0, 1), (3, 70_000), (70_000, 140_000)], ids=str)
def test_elements_in_another_order_are_drift(places):
    """Of a parameter that is summed up in several pieces."""

    def rank(ranks):
        weight = torch.arange(150_000.0)
        if ranks.rank == 1:
            weight[[*places]] = weight[[*reversed(places)]]
        guard = DriftGuard([Trained("weight", weight)], [], ranks, RunState.of("topk", check_drift_every=1))
        with pytest.raises(RuntimeError, match="weight of rank 1 differ from rank 0's"):
            guard.compare(1)

    run_threads(2, rank)


def _resync():
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("lightning_compress").addHandler(handler)
    weights, strategy = train(Net, digits(), 6, [Drifts("parameter")], check_drift_every=2, on_drift="resync")
    logging.getLogger("lightning_compress").removeHandler(handler)
    momenta = [state["momentum_buffer"].numpy() for state in strategy.optimizers[0].state.values()]
    return weights, momenta, heard


@pytest.mark.parametrize("size", [2, 3])
def test_resync_copies_rank_0(pools, size):
    ranks = pools[size].run(_resync)
    assert all(np.array_equal(ranks[0][0], weights) for weights, _, _ in ranks)
    assert all(np.array_equal(a, b) for _, momenta, _ in ranks for a, b in zip(ranks[0][1], momenta, strict=True))
    assert ["after step 4" in said for said in ranks[0][2]].count(True) == 1
    assert ranks[0][1]
    assert not ranks[1][2]


def _no_drift(compressor):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    compression = attach(model, compressor, check_drift_every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        spoil = float("nan") if step == 3 else 1.0  # which is the same NaN on all ranks
        (model(torch.randn(8, 64)).square().mean() * spoil).backward()
        optimizer.step()
    compression.close()
    return compression.step


def _attached(make, others=None, fails=False, changes=False):
    """Train six steps with an optimizer of ``make``, on the last rank of ``others``; return what was said."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    optimizer = (others if others and last_rank() else make)(model.parameters())
    try:
        compression = attach(model, "qsgd", "all_gather", optimizer=optimizer)
        for step in range(6):
            if changes and step == 5 and last_rank():
                optimizer.param_groups[0]["lr"] *= 2
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        if not fails:
            return compression.close() or ""
        try:
            raise KeyError("the script's own")
        except KeyError:
            return compression.close() or "closed"
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("make", "others", "said"),
    [
        (partial(SGD, lr=0.1), partial(SGD, lr=0.01), "values of lr of rank {} .* has ... .0.01. .*has ... .0.1. "),
        (partial(SGD, lr=0.1), partial(SGD, lr=0.1, weight_decay=1e-4), "values of weight_decay of rank {} "),
        (partial(Adam, betas=(0.9, 0.99)), Adam, "values of betas of rank {} .*0.999.*, 0.99. "),
        (partial(SGD, lr=0.1), partial(Adam, lr=0.1), "optimizers of rank {} .*Adam.*SGD"),
        (partial(Adam, lr=torch.tensor(0.1)), partial(Adam, lr=torch.tensor(0.2)), "values of lr of rank {} "),
    ],
)
def test_other_hyperparameters_are_refused_on_all_ranks(pools, size, make, others, said):
    for each in pools[size].run(_attached, make, others):
        assert re.search(said.format(size - 1), each), each
        assert each.startswith("ValueError")
        assert "same settings" in each


@pytest.mark.parametrize("size", [2, 3])
def test_what_differs_at_the_end_is_drift(pools, size):
    make = partial(SGD, lr=0.1)
    for said in pools[size].run(_attached, make, None, False, True):
        assert f"RuntimeError: drift: after step 6, 0.weight, 0.bias, 1.weight and 1 more of rank {size - 1} " in said
        assert "averaged gradients" not in said  # those of step 6 were not compared
    assert pools[size].run(_attached, make) == [""] * size
    assert pools[size].run(_attached, make, None, True, True) == ["closed"] * size  # an error ends ranks alone


def _ended(delay):
    try:
        train(Evaluated, digits(), 5, [ChangesLast()], delay=delay)
    except RuntimeError as error:
        return str(error)
    return ""


class ChangesLast(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if last_rank() and number == 4:
            with torch.no_grad():
                next(module.parameters()).add_(1e-3)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_fit_that_ends_apart_raises(pools, delay):
    for said in pools[2].run(_ended, delay):
        assert "drift: after step 5, " in said
        assert "of rank 1 differ from rank 0's; possible" in said


@pytest.mark.parametrize("synchroniser", [LocalSGD, Gossip])
def test_other_hyperparameters_are_refused_where_models_are_averaged(synchroniser):
    def rank(ranks):
        model = nn.Linear(8, 8)
        with pytest.raises(ValueError, match="values of lr of rank 2 differ from those of rank 0"):
            synchroniser().start(model, [SGD(model.parameters(), 0.1 / (1 + ranks.rank // 2))], ranks=ranks)

    run_threads(3, rank)


@pytest.mark.parametrize("compressor", ["bf16", "topk", "powersgd", "fft", "rotated"])
def test_no_false_alarm(pools, compressor):
    assert pools[3].run(_no_drift, compressor) == [4, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' must be one of 'pass', 'skip', 'raise'"),
        ({"on_drift": "warn"}, "on_drift='warn' must be one of 'error', 'resync'"),
        ({"check_drift_every": -1}, "check_drift_every=-1 must be a number of steps, or 0 for never"),
        ({"check_drift_every": True}, "check_drift_every=True must be"),
        ({"deterministic": 1}, "deterministic=1 must be true or false"),
        (
            {"compressor": "topk", "error_feedback": {"dtype": "float16"}},
            "dtype='float16' must be",
        ),
        ({"local_clip_norm": 0}, "local_clip_norm=0 must be a finite number above 0"),
        ({"local_clip_norm": float("nan")}, "local_clip_norm=nan must be"),
    ],
)
def test_bad_settings(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        CompressedDDPStrategy(**arguments)
