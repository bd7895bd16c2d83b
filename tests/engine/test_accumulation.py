"""Several backward passes that synchronise before one step: as if all but the last had been under ``no_sync``."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.contrib.reducers.signsgd import SignSGD
from lightning_compress.corrections import DGC, OneBitAdam
from lightning_compress.engine.accumulation import Passes
from lightning_compress.engine.optimizers import Trained
from lightning_compress.exchanges import TwoShot
from tests.helpers.training import Net, fit, parameters
from tests.turns import by_turns

NO_MEANS = {
    "dgc": ({"compressor": DGC(density=0.05)}, 0.3),
    "dgc_nesterov": ({"compressor": DGC(density=0.05, nesterov=True), "local_clip_norm": 1.0}, 0.3),
    "onebit_adam": ({"compressor": OneBitAdam(), "warmup_steps": 3}, 0.01),
    "signsgd": ({"compressor": SignSGD()}, 0.01),
    "adagrad": ({"compressor": "onebit", "exchange": TwoShot(adagrad=1e-8)}, 0.01),
    "clipped": ({"compressor": "topk", "local_clip_norm": 0.1}, 0.3),
}
"""Methods whose output may not be taken for a gradient, and learning rates at which they train."""


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(33, 47)
        self.left, self.right = nn.Linear(47, 41), nn.Linear(47, 41)

    def forward(self, x, y, heads=("left", "right")):
        hidden = torch.tanh(self.body(x))
        return sum((getattr(self, head)(hidden) - y).square().mean() for head in heads)


class Uneven(TwoHeads):
    """Of one of whose heads a method that takes the largest elements of all takes none in most steps."""

    def forward(self, x, y, heads=("left", "right")):
        hidden = torch.tanh(self.body(x))
        weights = {"left": 1.0, "right": 0.1}
        return sum(weights[head] * (getattr(self, head)(hidden) - y).square().mean() for head in heads)


def _batch(step, part):
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
    x = torch.randn(16, 33, generator=generator)
    return x, x @ torch.randn(33, 41, generator=torch.Generator().manual_seed(7)) / 6


def _train(given, rate, count, synced, ddp, between=None, steps=8, make=TwoHeads):
    """Parameters and losses of a run whose steps have several backward passes, in all of them synchronised or not."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make(), **ddp)
    compression = attach(model, min_numel=1, **given) if given else None
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for step in range(steps):
        for part in range(count):
            quiet = not synced and part + 1 < count
            heads = ["left"] if part == 0 and ddp.get("find_unused_parameters") else ["left", "right"]
            with model.no_sync() if quiet else nullcontext():
                (model(*_batch(step, part), heads) / count).backward()
            if between:
                between(step, part, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(model.module(*_batch(0, 0))))
    if compression:
        compression.close()
    return torch.cat([each.detach().flatten() for each in model.parameters()]), losses


def _both(given, rate, count, ddp, steps=8, make=TwoHeads):
    one, losses = _train(given, rate, count, False, ddp, steps=steps, make=make)
    other, _ = _train(given, rate, count, True, ddp, steps=steps, make=make)
    ranks = [torch.empty_like(other) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, other)
    return float((one - other).abs().max()), all(each.equal(other) for each in ranks), losses


@pytest.mark.parametrize(("name", "size"), by_turns(NO_MEANS, (2, 3, 4), 1))
def test_all_passes_of_a_step_count_as_one(pools, name, size):
    given, rate = NO_MEANS[name]
    for difference, agree, losses in pools[size].run(_both, given, rate, 3, {}):
        assert agree
        assert difference < 1e-6
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "given",
    [
        {"compressor": DGC(density=0.01), "exchange": "ok_topk"},
        {"compressor": {"name": "topk", "density": 0.002, "scope": "group"}, "local_clip_norm": 0.1},
    ],
    ids=["ok_topk", "group"],
)
def test_zeros_that_the_method_makes_drop_no_gradients(pools, given):
    for difference, agree, _ in pools[2].run(_both, given, 0.3, 3, {}, 20, Uneven):
        assert agree
        assert difference < 1e-6


@pytest.mark.parametrize("ddp", [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}], ids=["view", "buckets"])
@pytest.mark.parametrize("name", ["dgc", "onebit_adam"])
def test_whatever_the_buckets_are(pools, name, ddp):
    given, rate = NO_MEANS[name]
    for difference, agree, _ in pools[2].run(_both, given, rate, 2, ddp):
        assert agree
        assert difference < 1e-6


def _unused(given, rate):
    """The first pass of each step leaves a head out, which stock no_sync cannot: the gradients are added by hand."""
    parameters, losses = _train(given, rate, 2, True, {"find_unused_parameters": True})
    return parameters.isfinite().all(), losses


@pytest.mark.parametrize("name", NO_MEANS)
def test_a_pass_may_leave_parameters_out(pools, name):
    for finite, losses in pools[2].run(_unused, *NO_MEANS[name]):
        assert finite
        assert losses[-1] < losses[0]


def test_a_parameter_without_elements_takes_part():
    passes = Passes([Trained("none", nn.Parameter(torch.zeros(0, 7)))])
    for _ in range(2):
        for _ in range(2):
            kept, left_out, adds_up = passes.arrive(["none"], averages=False)
            assert adds_up
            passes.add_up(["none"], [torch.zeros(0, 7)], kept, left_out)
            passes.made(["none"], [torch.zeros(0, 7)], left_out)
        assert passes.end({"none"}) == {"none"}
    passes.close()


def _dropped(given, rate, to_none):
    """The first backward of each step is thrown away."""

    def between(step, part, optimizer):
        if part == 0:
            optimizer.zero_grad(set_to_none=to_none)

    kept, _ = _train(given, rate, 2, True, {}, between)
    return kept


def _second_alone(given, rate):
    """Steps of the second batch only."""
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHeads())
    compression = attach(model, min_numel=1, **given)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for step in range(8):
        (model(*_batch(step, 1)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    compression.close()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", ["dgc", "onebit_adam", "adagrad"])
def test_gradients_that_were_dropped_do_not_count(pools, name, to_none):
    given, rate = NO_MEANS[name]
    dropped = pools[2].run(_dropped, given, rate, to_none)
    alone = pools[2].run(_second_alone, given, rate)
    for one, other in zip(dropped, alone, strict=True):
        assert float((one - other).abs().max()) < 1e-6


class Manual(Net):
    """Lightning's documented way: ``manual_backward`` for each batch, a step for every fourth."""

    def __init__(self, quiet):
        super().__init__()
        self.automatic_optimization = False
        self.quiet = quiet
        self.losses = []

    def training_step(self, batch, batch_idx):
        last = (batch_idx + 1) % 4 == 0
        loss = super().training_step(batch, batch_idx)
        with self.trainer.strategy.model.no_sync() if self.quiet and not last else nullcontext():
            self.manual_backward(loss / 4)
        if last:
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def _manual(quiet):
    strategy = CompressedDDPStrategy({"name": "dgc", "density": 0.05}, min_numel=1)
    _, model = fit(strategy, 14, partial(Manual, quiet), limit_train_batches=28)
    return parameters(model), model.losses


def test_manual_optimization_in_lightning(pools):
    synced, quiet = (pools[2].run(_manual, each) for each in (False, True))
    for (one, losses), (other, _) in zip(synced, quiet, strict=True):
        assert float((one - other).abs().max()) < 1e-5
        assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


def _step_without_zero_grad():
    """Gradients that the user keeps from one step to the next are added to, as without compression."""
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHeads())
    attach(model, DGC(density=1.0, momentum=0.0), local_clip_norm=1e6, min_numel=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(2):
        model(*_batch(0, 0)).backward()
        optimizer.step()
    expected = torch.autograd.grad(model.module(*_batch(0, 0)), model.module.body.weight)[0] / dist.get_world_size()
    dist.all_reduce(expected)
    return float((model.module.body.weight.grad - 2 * expected).abs().max())


def test_what_the_user_keeps_is_kept(pools):
    assert max(pools[2].run(_step_without_zero_grad)) < 1e-5
