"""Compression inside everything else that Lightning and DDP do: precision, several optimizers, layouts, resumes."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from tests.helpers.training import Net, fit, parameters


def residuals(compression):
    """Committed residuals by name."""
    return {
        segment.name: group.residual.committed[segment.offset : segment.end].numpy().copy()
        for group in compression.groups
        for segment in group.layout.segments
    }


class Overflow(Callback):
    """On one rank, the gradient of one step is infinite; remembers residuals after every step."""

    def __init__(self, at):
        self.at, self.seen, self.skipped = at, [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.before = parameters(module)
        if batch_idx == self.at and dist.get_rank() == 1:
            weight = module.head[0].weight
            self.handle = weight.register_hook(lambda gradient: gradient * float("inf"))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.at and dist.get_rank() == 1:
            self.handle.remove()
        self.skipped.append(bool(parameters(module).equal(self.before)))
        self.seen.append(residuals(trainer.strategy.compression))


def _overflow(compressor, bucket_cap_mb):
    watch = Overflow(at=3)
    strategy = CompressedDDPStrategy(compressor, error_feedback=True, bucket_cap_mb=bucket_cap_mb)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    _, model = fit(strategy, 7, callbacks=[watch], precision=None, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    return watch.seen, watch.skipped, scaler.get_scale(), parameters(model).numpy(), strategy.comm_stats()


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.02])
@pytest.mark.parametrize("compressor", ["topk", "onebit"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_no_residual_moves(pools, compressor, bucket_cap_mb):
    ranks = pools[2].run(_overflow, compressor, bucket_cap_mb)
    assert np.array_equal(ranks[0][3], ranks[1][3])
    assert np.isfinite(ranks[0][3]).all()
    for seen, skipped, scale, _, stats in ranks:
        assert skipped == [False, False, False, True, False, False, False]
        assert scale == 2.0**9
        assert stats["nonfinite_steps"] == 1
        assert all(np.array_equal(seen[2][name], seen[3][name]) for name in seen[2])
        assert any(not np.array_equal(seen[3][name], seen[4][name]) for name in seen[3])
        assert all(np.isfinite(value).all() for value in seen[6].values())


def _scaler_without_lightning(poisoned):
    """Gradients averaged, residuals kept and gradients computed, summed over steps that were not skipped."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    compression = attach(model, "onebit", scale=lambda: scaler._scale)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    total, size = torch.zeros(64, 64, dtype=torch.float64), dist.get_world_size()
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        data = torch.randn(8, 64, generator=generator)
        if step == poisoned and dist.get_rank() == 0:
            data[0, 0] = float("inf")
        optimizer.zero_grad()
        local = torch.autograd.grad(model.module(data).square().mean(), model.module.weight)[0]
        scaler.scale(model(data).square().mean()).backward()
        scaler.unscale_(optimizer)
        dist.all_reduce(local)
        if step != poisoned:
            total += local.double() - size * model.module.weight.grad.double()
        scaler.step(optimizer)
        scaler.update()
    kept = torch.from_numpy(residuals(compression)["weight"]).double().view(64, 64)
    dist.all_reduce(kept)
    return float((total - kept).abs().max() / kept.abs().max())


@pytest.mark.parametrize("poisoned", [None, 2])
def test_a_bare_model_survives_a_skipped_step(pools, poisoned):
    assert max(pools[2].run(_scaler_without_lightning, poisoned)) < 1e-5


def _saturated():
    """fp16 under a scale so large that the scaled gradient saturates the message."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    attach(model, "fp16", scale=lambda: torch.tensor(2.0**20))
    (model(torch.ones(1, 64)).sum() * 2.0**20).backward()
    overflown = not model.module.weight.grad.isfinite().any()
    model.zero_grad()
    small = DistributedDataParallel(nn.Linear(64, 64))
    attach(small, "fp16", scale=lambda: torch.tensor(2.0**10))
    (small(torch.full((1, 64), 1e-8)).sum() * 2.0**10).backward()
    return overflown, float(small.module.weight.grad.abs().min())


def test_fp16_keeps_the_loss_scale(pools):
    for overflown, least in pools[2].run(_saturated):
        assert overflown
        assert least == pytest.approx(1e-8 * 2**10, rel=0.01)


class TwoOptimizers(Net):
    """One loss, one backward, two optimizers; or a generator and a discriminator."""

    def __init__(self, adversarial=False):
        super().__init__()
        self.automatic_optimization = False
        self.adversarial = adversarial
        self.kept = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.body.parameters(), 0.05), torch.optim.SGD(self.head.parameters(), 0.05)

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if self.adversarial:
            body.zero_grad()
            head.zero_grad()
            self.manual_backward(loss)
            body.step()  # and the head's gradient is thrown away
            self.kept.append(residuals(self.trainer.strategy.compression)["head.0.weight"])
            return
        body.zero_grad()
        head.zero_grad()
        self.manual_backward(loss)
        body.step()
        head.step()


def _two_optimizers(adversarial):
    strategy = CompressedDDPStrategy("onebit", error_feedback=True)
    watch = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *args):
            watch.append({name: float(np.abs(value).sum()) for name, value in residuals(strategy.compression).items()})

    _, model = fit(strategy, 4 if adversarial else 8, lambda: TwoOptimizers(adversarial), callbacks=[Look()])
    return watch, strategy.compression.step, strategy.comm_stats(), parameters(model).numpy()


def test_two_optimizers_after_one_backward_are_one_step(pools):
    ranks = pools[2].run(_two_optimizers, False)
    watch, steps, stats, first = ranks[0]
    assert np.array_equal(first, ranks[1][3])
    assert steps == len(watch) == 4
    assert stats["ratio"] > 5
    assert all(row["head.0.weight"] > 0 and row["body.3.weight"] > 0 for row in watch)


def test_a_gradient_that_is_thrown_away_leaves_no_residual(pools):
    watch, _, _, _ = pools[2].run(_two_optimizers, True)[0]
    assert all(row["head.0.weight"] == 0 for row in watch)
    assert all(row["body.3.weight"] > 0 for row in watch)


def _optimizer_in_an_optimizer(on_drift="error", drifts=False):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 48, bias=False)))
    compression = attach(model, "topk", warmup_steps=2, check_drift_every=1, on_drift=on_drift)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)
    for step in range(4):
        if step == 2 and drifts and dist.get_rank():
            with torch.no_grad():
                model.module[0].weight[3, 3] += 1
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return compression.step


def test_an_optimizer_inside_another_steps_once(pools):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pools[2].run(_optimizer_in_an_optimizer) == [4, 4]
        assert pools[2].run(_optimizer_in_an_optimizer, "resync", True) == [4, 4]  # each rank has a state of its own


class ChannelsLast(Net):
    def __init__(self):
        super().__init__()
        self.to(memory_format=torch.channels_last)


def _mode(lossless, make, arguments):
    everything = {"name": "topk", "density": 1.0}
    strategy = CompressedDDPStrategy(everything, **arguments) if lossless else DDPStrategy(**arguments)
    _, model = fit(strategy, 6, make)
    return parameters(model).numpy()


@pytest.mark.parametrize("make", [Net, ChannelsLast])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True, "static_graph": True},
    ],
    ids=str,
)
def test_lossless_settings_are_stock_ddp_in_every_mode(pools, make, arguments):
    stock = pools[2].run(_mode, False, make, arguments)[0]
    ours = pools[2].run(_mode, True, make, arguments)[0]
    assert np.abs(stock - ours).max() < 1e-5


def _resume(folder):
    """Train, save, and resume from the checkpoint in a second fit of the same strategy object."""
    strategy = CompressedDDPStrategy("onebit")
    trainer, model = fit(strategy, 3)
    first = strategy.compression
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit_loop.epoch_loop.max_steps = 6
        from tests.helpers.training import digits, loader

        trainer.fit(model, loader(digits()), ckpt_path=f"{folder}/saved.ckpt")
    said = [str(each.message) for each in caught if "begins again from zero" in str(each.message)]
    return said, strategy.compression is not first, strategy.compression.step, parameters(model).numpy()


def test_a_second_fit_goes_on(pools, tmp_path):
    ranks = pools[2].run(_resume, str(tmp_path))
    for said, renewed, steps, _ in ranks:
        assert not said
        assert renewed
        assert steps == 6
    assert np.array_equal(ranks[0][3], ranks[1][3])
