"""A bare DistributedDataParallel model: state, flags, unused parameters, dtypes."""

import gc
import inspect
import math
import re
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from tests.turns import by_turns


class TwoHeads(nn.Module):
    """One of the heads may go unused."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)

    def forward(self, x, head):
        return getattr(self, head)(self.body(x))


def _model(dtype=torch.float32, **ddp):
    torch.manual_seed(0)
    return DistributedDataParallel(TwoHeads().to(dtype), **ddp)


def _data(step):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _residuals(compression):
    return {
        segment.name: group.residual.committed[segment.offset : segment.end].clone()
        for group in compression.groups
        for segment in group.layout.segments
        if group.residual
    }


def _unused():
    """Residual of the unused head before and after a step that does not use it."""
    model = _model(find_unused_parameters=True)
    compression = attach(model, "onebit")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = []
    for step, head in enumerate(["left", "right", "left"]):
        optimizer.zero_grad()
        model(_data(step), head).square().mean().backward()
        optimizer.step()
        kept.append(_residuals(compression))
    return [{name: value.numpy() for name, value in each.items()} for each in kept]


def test_an_unused_parameter_keeps_its_residual(pools):
    for first, second, third in pools[2].run(_unused):
        assert np.array_equal(first["left.weight"], second["left.weight"])
        assert not np.array_equal(second["left.weight"], third["left.weight"])
        assert not first["right.weight"].any()
        assert second["right.weight"].any()


def _loss(model, step, dtype=torch.float32):
    """Uses both heads."""
    data = _data(step).to(dtype)
    return model(data, "left").square().mean() + model.module.right(data).square().mean()


def _nonfinite(bucket_cap_mb):
    """One rank has a NaN in one bucket of the second step; no residual of any bucket may move."""
    model = _model(bucket_cap_mb=bucket_cap_mb)
    compression = attach(model, "onebit")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        poison = model.module.left.bias.register_hook(lambda gradient: gradient * math.nan)
        if step != 1 or dist.get_rank() != 1:
            poison.remove()
        _loss(model, step).backward()
        poison.remove()
        poisoned = bool(model.module.left.bias.grad.isnan().any())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        if poisoned:
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), before)
        seen.append((poisoned, {name: value.numpy() for name, value in _residuals(compression).items()}))
    return seen, compression.stats()["nonfinite_steps"]


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.01])
def test_nan_on_one_rank_reaches_all_and_moves_no_residual(pools, bucket_cap_mb):
    for seen, count in pools[2].run(_nonfinite, bucket_cap_mb):
        assert [poisoned for poisoned, _ in seen] == [False, True, False]
        (_, before), (_, during), (_, after) = seen
        assert all(np.array_equal(before[name], during[name]) for name in before)
        assert all(np.isfinite(value).all() for value in after.values())
        assert any(not np.array_equal(before[name], after[name]) for name in before)
        assert count == 1


def _dtype(dtype, compressor):
    model = _model(dtype)
    compression = attach(model, compressor)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, step, dtype).backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])
    return flat.numpy(), compression.stats()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("compressor", ["topk", "onebit", "fp16"])
def test_buckets_of_every_dtype(pools, dtype, compressor):
    (first, stats), (second, _) = pools[2].run(_dtype, dtype, compressor)
    assert np.isfinite(first).all()
    assert np.array_equal(first, second)
    assert stats["bytes_dense"] == stats["total_bytes_dense"] / 3


def _scaled(scales):
    """Train under a loss scale that changes."""
    model = _model()
    scale = torch.tensor(1.0)
    compression = attach(model, "onebit", scale=lambda: scale)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, value in enumerate(scales):
        scale.fill_(value)
        optimizer.zero_grad()
        loss = _loss(model, step)
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        optimizer.step()
    compression.close()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()


def test_residuals_do_not_depend_on_the_loss_scale(pools):
    plain = pools[2].run(_scaled, [1.0, 1.0, 1.0, 1.0])
    scaled = pools[2].run(_scaled, [256.0, 512.0, 512.0, 4.0])
    assert np.array_equal(plain[0], scaled[0])


def _in_float16():
    """Gradients that float16 holds, and a residual that makes more of them."""
    model = DistributedDataParallel(nn.Linear(64, 48, bias=False, dtype=torch.float16))
    compression = attach(model, {"name": "topk", "density": 0.5}, on_nonfinite="raise")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    weight = torch.full((48, 64), 40000.0, dtype=torch.float16)
    weight[:36] = 60000.0
    largest = []
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.eye(64, dtype=torch.float16)) * weight.t()).sum().backward()
        optimizer.step()
        largest.append(float(model.module.weight.grad.max()))
    compression.close()
    return largest


def test_a_residual_makes_no_infinity_of_float16(pools):
    for largest in pools[2].run(_in_float16):
        assert largest == [60000.0, 65504.0, 65504.0]


def test_the_documented_source_of_a_scale_goes_with_any_scaler():
    documented = re.search(r"``(lambda: .*?)``", inspect.getdoc(attach)).group(1)
    for enabled, expected in ((True, 65536.0), (False, None)):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(torch.ones(()))
        assert eval(documented, {"scaler": scaler})() == expected


def _warmup():
    model = _model()
    compression = attach(model, "topk", warmup_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sent = []
    for step in range(4):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        sent.append(compression.stats()["ratio"])
    return sent


def test_warmup_steps_are_dense(pools):
    ratios = pools[2].run(_warmup)[0]
    assert all(0.9 < ratio <= 1.0 for ratio in ratios[:2])
    assert all(ratio > 10 for ratio in ratios[2:])


def _twice():
    """Two backwards before one step: both gradients count."""
    model = _model()
    compression = attach(model, "topk", rules=[], min_numel=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total = torch.zeros(64, 64)
    for step in range(2):
        loss = _loss(model, step)
        local = torch.autograd.grad(loss, model.module.left.weight, retain_graph=True)[0]
        dist.all_reduce(local)
        total += local
        loss.backward()
    total -= dist.get_world_size() * model.module.left.weight.grad
    optimizer.step()
    kept = _residuals(compression)["left.weight"].view(64, 64)
    dist.all_reduce(kept)
    return float((total - kept).abs().max() / total.abs().max())


def test_a_second_backward_before_the_step_goes_on_from_the_first(pools):
    assert max(pools[2].run(_twice)) < 1e-5


class Halves(nn.Module):
    """Two parts with optimizers of their own; DDP's buckets, of a cap of their size, are one for each."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.left(x).square().mean() + self.right(x).square().mean()


def _one_half_fails():
    """A NaN in the gradient of one optimizer's parameters, in the last of three steps: which residuals moved?"""
    torch.manual_seed(0)
    model = DistributedDataParallel(Halves(), bucket_cap_mb=0.01)
    compression = attach(model, "onebit")
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.module.left, model.module.right)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step == 2:
            model.module.left.weight.register_hook(lambda gradient: gradient * math.nan)
        before = _residuals(compression)
        model(_data(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    after = _residuals(compression)
    return len(compression.groups), {name: bool((before[name] != after[name]).any()) for name in after}


def test_an_optimizer_that_really_stepped_keeps_its_residual(pools):
    for groups, moved in pools[2].run(_one_half_fails):
        assert groups == 2
        assert moved == {"left.weight": False, "right.weight": True}


def _draws():
    """What two backward passes of one step over the same data make, of a method that rounds at random."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    compression = attach(model, {"name": "qsgd", "bits": 2}, exchange="all_gather")
    made = []
    for _ in range(2):
        model(_data(0)).square().mean().backward()
        made.append(model.module.weight.grad.clone())
        model.module.weight.grad.fill_(1e-30)  # the passes add up, and what is averaged is the same
    compression.close()
    return made[0].equal(made[1])


def test_backward_passes_of_one_step_draw_other_random_numbers(pools):
    assert pools[2].run(_draws) == [False, False]


class Tasks(nn.Module):
    """A body and two heads, of sizes that are no multiple of any block, and an embedding of which few rows are used."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(61, 67)
        self.body = nn.Linear(67, 71)
        self.used, self.unused = nn.Linear(71, 73), nn.Linear(71, 73)

    def forward(self, rows, how):
        hidden = torch.tanh(self.body(self.words(rows)))
        loss = self.used(hidden).square().mean()
        if how == "zero":
            loss = loss + 0.0 * self.unused(hidden).sum()
        if how == "one rank" and dist.get_rank() == 1:
            loss = loss + (self.unused(hidden) - 1).square().mean()
        return loss


def _tasks(compressor, exchange, how, steps):
    """How far the unused head and rows moved, the head's residual, and its loss at last."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Tasks(), find_unused_parameters=how != "zero")
    compression = attach(model, compressor, exchange)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    start = [model.module.unused.weight.detach().clone(), model.module.words.weight.detach().clone()]
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randint(0, 9, (16,), generator=generator), how).backward()
        optimizer.step()
    head = (model.module.unused.weight.detach() - start[0]).abs().max()
    rows = (model.module.words.weight.detach() - start[1])[9:].abs().max()
    residual = _residuals(compression).get("unused.weight", torch.zeros(1)).norm()
    compression.close()
    return float(head), float(rows), float(residual)


@pytest.mark.parametrize("how", ["zero", "never"])
@pytest.mark.parametrize(("compressor", "size"), by_turns(["onebit", "efsign", "rotated", "fft"], (3, 4), 1))
def test_what_no_rank_uses_does_not_move(pools, compressor, size, how):
    for head, rows, residual in pools[size].run(_tasks, compressor, "auto", how, 12):
        assert (head, rows, residual) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("compressor", "exchange"),
    [("efsign", "two_shot"), ("onebit", "two_shot"), ({"name": "topk", "density": 0.2}, "binomial")],
)
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_residuals_of_owners_stay_small_where_one_rank_alone_has_a_gradient(pools, compressor, exchange, size):
    early = pools[size].run(_tasks, compressor, exchange, "one rank", 10)
    late = pools[size].run(_tasks, compressor, exchange, "one rank", 80)
    one, other = (sum(residual for *_, residual in ranks) for ranks in (early, late))
    assert early[0][0] > 0
    assert other < 3 * one  # where it grew with the steps


def _means(compressor, exchange, alike):
    """Averaged gradients of three steps, on data that all ranks share or do not, and what this rank's were."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(129, 257, bias=False))
    compression = attach(model, compressor, exchange)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    made, given = [], []
    for step in range(3):
        optimizer.zero_grad()
        data = torch.randn(
            8, 129, generator=torch.Generator().manual_seed(step if alike else 10 * step + dist.get_rank())
        )
        model(data).square().mean().backward()
        optimizer.step()
        made.append(model.module.weight.grad.clone())
        given.append(torch.autograd.grad(model.module(data).square().mean(), model.module.weight)[0])
    compression.close()
    return made, given


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("scope", ["parameter", "group"])
def test_exact_sparse_exchanges_apply_the_same_elements(pools, size, scope):
    compressor = {"name": "topk", "density": 0.05, "scope": scope}
    gathered = pools[size].run(_means, compressor, "all_gather", False)[0][0]
    for exchange in ("split_gather", "recursive_doubling"):
        for one, other in zip(gathered, pools[size].run(_means, compressor, exchange, False)[0][0], strict=True):
            assert torch.equal(one != 0, other != 0)
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("compressor", ["terngrad", {"name": "qsgd", "bits": 2}, "rotated"])
def test_noise_of_sums_is_that_of_a_gather(pools, size, compressor):
    def variance(exchange):
        made, given = pools[size].run(_means, compressor, exchange, True)[0]
        return sum(
            float((one - other).square().sum() / other.square().sum()) for one, other in zip(made, given, strict=True)
        )

    assert variance("two_shot") < 2.2 * variance("all_gather")


class Nothing(nn.Module):
    """A bucket of its own for a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.body, self.none = nn.Linear(64, 64), nn.Parameter(torch.empty(0, 7, dtype=torch.float64))

    def forward(self, x):
        return self.body(x).square().mean() + self.none.sum().float()


def _nothing(compressor):
    torch.manual_seed(0)
    model = DistributedDataParallel(Nothing())
    compression = attach(model, compressor)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(_data(step)).backward()
        optimizer.step()
    return compression.step, len(compression.groups)


@pytest.mark.parametrize("compressor", ["topk", "rotated", "powersgd", "dgc"])
def test_a_bucket_without_elements(pools, compressor):
    assert pools[2].run(_nothing, compressor) == [(2, 2), (2, 2)]


def _scaler_skips_one_half():
    """An overflow in the gradient of one of two optimizers, which a GradScaler then skips: which residuals moved?"""
    torch.manual_seed(0)
    model, scaler = DistributedDataParallel(Halves(), bucket_cap_mb=0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    compression = attach(model, "onebit", scale=lambda: getattr(scaler, "_scale", None))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.module.left, model.module.right)]
    moved = []
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step == 2:
            hook = model.module.left.weight.register_hook(lambda gradient: gradient * math.inf)
        before = _residuals(compression)
        scaler.scale(model(_data(step))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if step == 2:
            hook.remove()
        after = _residuals(compression)
        moved.append({name: bool((before[name] != after[name]).any()) for name in before})
    return moved[2:], all(bool(each.isfinite().all()) for each in after.values())


def test_a_scaler_that_skips_one_of_two_optimizers_rolls_back_its_parameters_alone(pools):
    for moved, finite in pools[2].run(_scaler_skips_one_half):
        assert finite
        assert moved == [{"left.weight": False, "right.weight": True}, {"left.weight": True, "right.weight": True}]


def is_freed(compressor):
    """A step of a model that is then forgotten, with a compression that nobody closed."""
    model = _model()
    held = [weakref.ref(model), weakref.ref(attach(model, compressor=compressor))]
    model(_data(0), "left").sum().backward()
    del model
    gc.collect()
    return [each() is None for each in held]


@pytest.mark.parametrize("compressor", ["topk", "none"])
def test_a_model_that_nobody_holds_is_freed(pools, compressor):
    assert pools[2].run(is_freed, compressor) == [[True, True]] * 2
