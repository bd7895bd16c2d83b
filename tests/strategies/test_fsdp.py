"""The strategy over FSDP2: replicas that average without compression are PyTorch's own HSDP, bit for bit."""

import os
import signal
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_compress import CommunicationMonitor, CompressedFSDPStrategy
from lightning_compress.strategies.rendezvous import EVERY
from tests.helpers.fsdp import Letters, Lit, Native, fingerprint, fit, fresh, sharded, stock
from tests.helpers.lives import live
from tests.helpers.training import quiet_trainer

ROTATED = {"name": "rotated", "bits": 4}
QUICK = {
    "bfloat16, clip by norm": {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    "bfloat16 as a whole, clip by value": {
        "precision": "bf16-true",
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "sharded accumulation": {"accumulate_grad_batches": 4},
    "manual": {},
}
MORE = {
    "float32": {},
    "clip by norm": {"gradient_clip_val": 0.1},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bfloat16": {"precision": "bf16-mixed"},
    "bfloat16 as a whole": {"precision": "bf16-true"},
    "unsharded accumulation": {"accumulate_grad_batches": 4},
    "accumulation of bfloat16": {"accumulate_grad_batches": 2, "precision": "bf16-true"},
}
"""More combinations, for the thorough tests."""


class Manual(Lit):
    """Two optimizers, one for the blocks and one for the rest, that step one after the other."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        inner = {id(each): each for each in self.net.blocks.parameters()}
        outer = [each for each in self.parameters() if id(each) not in inner]
        return torch.optim.AdamW(inner.values(), 3e-3), torch.optim.SGD(outer, 0.1, momentum=0.9)


class NativeManual(Native, Manual):
    """The same over two dimensions."""


def _pairs(cases):
    """Hashes of PyTorch's HSDP and ours, by case; and what the steps that ours counted are."""
    fresh()
    found = []
    for name, options in cases.items():
        way = name.split()[0] if "accumulation" in name else None
        way = "sharded" if way == "accumulation" else way
        makes = (NativeManual, Manual) if name == "manual" else (Native, Lit)
        _, theirs = fit(stock(way), make=makes[0], **options)
        trainer, ours = fit(sharded("none", **({"accumulate": way} if way else {})), make=makes[1], **options)
        found.append((fingerprint(theirs.net), fingerprint(ours.net), trainer.strategy.comm_stats()["steps"]))
    return found


@pytest.mark.parametrize("cases", [QUICK, pytest.param(MORE, marks=pytest.mark.thorough)], ids=["few", "more"])
def test_none_is_native_hsdp(pools, cases):
    ranks = pools[4].run(_pairs, cases)
    for place, name in enumerate(cases):
        assert len({mark for found in ranks for mark in found[place][:2]}) == 1, (name, [each[place] for each in ranks])
        assert {found[place][2] for found in ranks} == {4.0 if name == "manual" else 3.0}, name


def _of_width_one():
    fresh()
    _, theirs = fit(DDPStrategy())
    trainer, ours = fit(CompressedFSDPStrategy("none", replicate_size=2))
    return fingerprint(theirs.net), fingerprint(ours.net), trainer.strategy.device_mesh.mesh.shape


def test_replicas_of_one_shard_are_stock_ddp(pools):
    for theirs, ours, shape in pools[2].run(_of_width_one):
        assert theirs == ours
        assert tuple(shape) == (2, 1, 1)


class Apart(Lit):
    """Each rank begins with another model, and with another buffer."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for each in self.parameters():
                each.add_(0.01 * dist.get_rank())
        self.register_buffer("number", torch.tensor(float(dist.get_rank())))


class Look(Callback):
    """What a fit begins with."""

    def on_train_start(self, trainer, module):
        self.began = fingerprint(module.net), float(module.number)
        self.sampler = trainer.strategy.distributed_sampler_kwargs


def _began(folder):
    """Of a fit with a method: what it begins with, says, sends and logs; then again, after an evaluation."""
    fresh()
    look, logger = Look(), CSVLogger(folder, version=dist.get_rank())
    strategy, watching = sharded(ROTATED, on_nonfinite="skip", check_drift_every=2), CommunicationMonitor()
    trainer, model = fit(
        strategy, make=Apart, callbacks=[look, watching], logger=logger, log_every_n_steps=1, limit_val_batches=1
    )
    stats, said = strategy.comm_stats(), strategy.report()
    trainer.validate(model, trainer.train_dataloader, verbose=False)
    again, _ = fit(sharded(ROTATED), 2, make=lambda: model)
    logged = Path(logger.log_dir, "metrics.csv").read_text() if dist.get_rank() == 0 else ""
    return look.began, look.sampler, stats, dict(said), logged, fingerprint(model.net), again.global_step


def test_a_fit_and_another_after_an_evaluation(pools, tmp_path):
    ranks = pools[4].run(_began, str(tmp_path))
    assert [began[1] for began, *_ in ranks] == [0.0, 1.0, 0.0, 1.0]  # of the first replica
    assert len({began[0] for began, *_ in ranks}) == 1
    assert [sampler for _, sampler, *_ in ranks] == [{"num_replicas": 4, "rank": rank} for rank in range(4)]
    assert len({mark for *_, mark, _ in ranks}) == 1
    for _, _, stats, said, _, _, steps in ranks:
        assert stats["summary"].startswith("rotated (bits 4) by all_gather, 5.")
        assert stats["ratio"] > 5
        assert "x as much" in said["sent"]
        assert "hidden" not in said["average"]
        assert "ms (median)" in said["step"]
        assert steps == 2
    assert "comm/bytes_sent" in ranks[0][4]


def _evaluated():
    """Hashes of a fit with each strategy, and of one after an evaluation that leaves parameters gathered."""
    fresh()
    found = []
    for first in (False, True):
        for strategy in (partial(stock, "sharded"), partial(sharded, "none")):
            model = Lit()
            if first:
                trainer = quiet_trainer(strategy(), limit_val_batches=1)
                trainer.validate(model, DataLoader(Letters(), 4), verbose=False)
            fit(strategy(), 2, make=lambda model=model: model)
            found.append(fingerprint(model.net))
    return found


def test_an_evaluation_before_changes_nothing(pools):
    for stocks, ours, *later in pools[4].run(_evaluated):
        assert later == [stocks, ours]


class Terminated(Callback):
    """SIGTERM comes to one rank after a step."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer, module, exception):
        self.stopped = trainer.global_step


def _terminated():
    fresh()
    with pytest.raises(SIGTERMException):
        fit(sharded("onebit"), 16, callbacks=[arrives := Terminated()])
    return arrives.stopped


def test_sigterm_ends_all_ranks_at_one_step(pools):
    stopped = set(pools[4].run(_terminated))
    assert len(stopped) == 1
    assert 2 < stopped.pop() <= 2 + EVERY + 2


class Ends(Callback):
    """One rank raises, or dies, before a step."""

    def __init__(self, how):
        self.how = how

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2 and dist.get_rank() == 2:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("no more")


def _ends(how):
    fit(sharded("onebit"), 6, callbacks=[Ends(how)])


@pytest.mark.parametrize("how", ["raises", pytest.param("killed", marks=pytest.mark.thorough)])
def test_a_rank_that_ends_ends_all(tmp_path, how):
    codes, said = live(4, tmp_path / "ranks", _ends, how, seconds=20)
    assert codes == [1, 1, 1 if how == "raises" else -signal.SIGKILL, 1], said
    assert how == "killed" or "ArithmeticError: no more" in said[2]
    assert all("ExchangeError: rank" in each and "a rank died" in each for each in (said[0], said[1], said[3])), said


def _other_package(name):
    """A fit of ``pytorch_lightning``."""
    import pytorch_lightning

    import lightning_compress.pytorch_lightning as ours

    fresh()

    class Learner(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.lit = Lit()

        def configure_model(self):
            self.lit._device_mesh = self.device_mesh
            self.lit.configure_model()

        def training_step(self, batch, batch_idx):
            return self.lit.training_step(batch, batch_idx)

        def configure_optimizers(self):
            return self.lit.configure_optimizers()

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = ours.CompressedFSDPStrategy(name, replicate_size=2)
    trainer = pytorch_lightning.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=2, **off)
    learner = Learner()
    trainer.fit(learner, DataLoader(Letters(), 4))
    return fingerprint(learner.lit.net), strategy.comm_stats()["ratio"]


def test_pytorch_lightning(pools):
    ranks = pools[4].run(_other_package, "onebit")
    assert len(set(ranks)) == 1
    assert ranks[0][1] > 10


def _resumed(folder):
    """Steps of a compression that counts none of those with which PyTorch fills an optimizer's state."""
    fresh()
    trainer, _ = fit(sharded("onebit"), 2)
    trainer.save_checkpoint(f"{folder}/two")
    counted, (theirs, _) = trainer.strategy.compression.step, fit(stock(), 4, ckpt_path=f"{folder}/two")
    again, _ = fit(sharded("onebit"), 4, ckpt_path=f"{folder}/two")
    return counted, theirs.global_step, again.strategy.compression.step


@pytest.mark.thorough
def test_a_checkpoint_is_model_parallels_own(pools, tmp_path):
    assert pools[4].run(_resumed, str(tmp_path)) == [(2, 4, 4)] * 4


def test_is_offered_by_name():
    registry = pl.strategies.StrategyRegistry
    assert isinstance(registry.get("compressed_fsdp"), CompressedFSDPStrategy)
    assert registry.get("compressed_fsdp_onebit")._settings.method.name == "onebit"
