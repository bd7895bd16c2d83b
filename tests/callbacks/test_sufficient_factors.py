"""The callback in a Trainer: accumulation, clipping, AMP, resuming, and what it refuses."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_compress import CompressedDDPStrategy, GossipStrategy, LocalSGDStrategy, SufficientFactors
from lightning_compress.contrib.mesimp import _check_strategy
from tests.helpers.training import Net, fit, parameters
from tests.strategies import test_resume

LINK = {"latency_s": 1e-6, "bytes_per_s": 1e7}


class Wide(Net):
    """With layers that pay."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(144, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def factors(**settings):
    return SufficientFactors(**{"layers": ["head.0", "head.2"], "link": LINK} | settings)


def _trained(strategy, steps=6, with_factors=True, make=Wide, **trainer):
    chosen = CompressedDDPStrategy(strategy) if strategy != "ddp" else "ddp"
    callbacks = [factors()] if with_factors else []
    fitted, model = fit(chosen, steps, make, callbacks=callbacks, **trainer)
    stats = fitted.strategy.comm_stats() if strategy != "ddp" else {}
    assert type(model.head[0]) is nn.Linear  # as it was
    return parameters(model).numpy(), stats


GIVEN = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
}


def _against_ddp(strategy, given):
    wanted, _ = _trained("ddp", with_factors=False, **GIVEN[given])
    got, stats = _trained(strategy, **GIVEN[given])
    return np.abs(wanted - got).max(), stats


@pytest.mark.parametrize(("strategy", "given"), [("ddp", "accumulated"), ("none", "plain"), ("none", "bf16")])
def test_a_fit_is_that_of_ddp(pools, strategy, given):
    for error, stats in pools[2].run(_against_ddp, strategy, given):
        assert error < (1e-5 if given != "bf16" else 2e-3)  # there, stock DDP rounds the gradient to bfloat16
        if stats:
            whole = 4 * (144 * 256 + 256 + 256 * 256 + 256)
            assert stats["bytes_sent"] < stats["bytes_dense"] - 0.7 * whole


class Recomputed(Wide):
    """Part of the head is under reentrant activation checkpointing."""

    def forward(self, images):
        return self.head[2:](checkpoint(self.head[:2], self.body(images), use_reentrant=True))


class TwoOptimizers(Wide):
    """Each throws away some batches of its own, on purpose."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        parts = [*self.body.parameters(), *self.head[0].parameters()], self.head[2:].parameters()
        return [torch.optim.SGD(part, 0.05, momentum=0.9) for part in parts]

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        with contextlib.ExitStack() as unsynchronised:
            if batch_idx % 3 < 2:
                unsynchronised.enter_context(self.trainer.strategy.model.no_sync())
            self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 3 < 2:
            optimizers[batch_idx % 3].zero_grad()
            return
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class ItsOwnAccumulation(Wide):
    """Accumulates two batches by hooks that override Lightning's; the first one does not synchronise."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
            return
        with self.trainer.strategy.model.no_sync():
            optimizer_closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if not batch_idx % 2:
            optimizer.zero_grad()


def _as_ddp(make):
    (wanted, _), (got, _) = (_trained("ddp", 8, with_factors, make) for with_factors in (False, True))
    return np.abs(wanted - got).max()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [Recomputed, TwoOptimizers, ItsOwnAccumulation])
def test_a_fit_of_another_kind_is_that_of_ddp(pools, make, size):
    assert max(pools[size].run(_as_ddp, make)) < 1e-5


def _resumed(folder):
    """Two epochs, and the second one again from the first one's checkpoint; with topk for the rest."""

    def epochs(where, **resume):
        callbacks = [ModelCheckpoint(where, "{epoch}", save_top_k=-1), factors()]
        return test_resume.fit(where, {"name": "topk", "density": 0.1}, callbacks=callbacks, make=Wide, **resume)[0]

    whole = epochs(folder)
    again = epochs(f"{folder}/again", resume=f"{folder}/epoch=0.ckpt")
    content = torch.load(f"{folder}/epoch=0.ckpt", weights_only=True)
    (kept,) = [each for name, each in content["callbacks"].items() if name.startswith("SufficientFactors")]
    return np.array_equal(whole, again), kept


def test_a_resumed_run_goes_on_exactly(pools, tmp_path):
    for same, kept in pools[2].run(_resumed, str(tmp_path)):
        assert kept == {"ranks": 2, "ways": {"head.2": "factors", "head.0": "factors"}, "ordered": True}
        assert same


def _refused():
    said = []
    for given, strategy in (({"layers": ["absent"]}, "ddp"), ({"layers": ["head.4"], "force": True}, "ddp")):
        try:
            fit(strategy, 1, Wide, callbacks=[factors(**given)])
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_work_stops_all_ranks(pools):
    for absent, forced in pools[2].run(_refused):
        assert "'absent' matches no module" in absent
        assert "force=True: head.4 has 16 rows on each of 2 ranks" in forced


def _alone():
    _, model = fit(CompressedDDPStrategy("none"), 1, Wide, callbacks=[factors()])
    return type(model.head[0]).__name__


def test_one_rank_trains_as_without(pools):
    assert pools[1].run(_alone) == ["Linear"]


class Sharded:
    """No strategy that wraps a model in DistributedDataParallel."""


class Trainer:
    strategy, world_size = Sharded(), 2


def test_other_strategies_are_refused():
    with pytest.raises(ValueError, match=r"needs Trainer\(strategy=CompressedDDPStrategy.* not Sharded"):
        factors().setup(Trainer, Wide(), "fit")
    factors().setup(Trainer, Wide(), "test")
    for inherits in (LocalSGDStrategy(sync_every=2), GossipStrategy()):  # from DDPStrategy, and wraps nothing
        local = SimpleNamespace(strategy=inherits, world_size=2)
        with pytest.raises(ValueError, match=r"not LocalSGDStrategy|not GossipStrategy"):
            factors().setup(local, Wide(), "fit")
        with pytest.raises(ValueError, match="MeSimp removes neurons on one device or under DDPStrategy"):
            _check_strategy(inherits)
