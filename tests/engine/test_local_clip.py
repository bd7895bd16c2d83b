"""``local_clip_norm``: each parameter's gradient is clipped on each rank, before it is compressed."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from tests.helpers.training import fit, parameters

SHAPE = (64, 48)


def _means(compressor, clip, scale):
    """The mean of known gradients, and what it has to be."""
    model = DistributedDataParallel(nn.Linear(48, 64))
    compression = attach(model, compressor, local_clip_norm=clip, scale=lambda: scale and torch.tensor(scale))
    ranks = dist.get_world_size()
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    gradients = [torch.randn(*SHAPE, generator=each) * 10 ** (-rank) for rank, each in enumerate(generators)]
    loss = (model(torch.eye(48)).T * gradients[dist.get_rank()]).sum()
    (loss * (scale or 1)).backward()
    clipped = [each * min(1.0, clip * ranks**0.5 / float(each.norm())) for each in gradients]
    compression.close()
    return model.module.weight.grad.numpy() / (scale or 1), (sum(clipped) / ranks).numpy(), clipped[-1].norm().item()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 512.0])
@pytest.mark.parametrize("compressor", ["none", {"name": "topk", "density": 1.0}])
def test_the_mean_of_clipped_gradients(pools, size, scale, compressor):
    for got, expected, last in pools[size].run(_means, compressor, 5.0, scale):
        assert np.allclose(got, expected, rtol=1e-5, atol=1e-7)
        assert last < 5.0 * size**0.5 or size == 1  # one is clipped, another is not


def _train(local, after):
    strategy = CompressedDDPStrategy("topk", local_clip_norm=local)
    _, model = fit(strategy, 10, gradient_clip_val=after)
    return parameters(model).numpy()


def test_together_with_the_trainers_clipping(pools):
    runs = {each: pools[2].run(_train, *each) for each in ((None, None), (0.1, None), (None, 0.05), (0.1, 0.05))}
    for first, second in runs.values():
        assert np.isfinite(first).all()
        assert np.array_equal(first, second)
    assert len({first.tobytes() for first, _ in runs.values()}) == 4


def _together(settings, cap, steps):
    """Means of a model of several layers, and the local gradients that they are of, after a first step for buckets."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 40, bias=False))
    model = DistributedDataParallel(layers, bucket_cap_mb=cap)
    compression = attach(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for step in range(steps):
        data = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        local = torch.autograd.grad((30 * layers(data)).square().sum(), list(layers.parameters()))
        optimizer.zero_grad()
        (30 * model(data)).square().sum().backward()
        optimizer.step()
    compression.close()
    return [each.grad.numpy() for each in layers.parameters()], [each.numpy() for each in local]


BY_BUCKET = {
    "local_clip_norm": {
        "compressor": {"name": "topk", "density": 1.0},
        "local_clip_norm": {"norm": 2.0, "by": "bucket"},
    },
    "dgc": {
        "compressor": {"name": "dgc", "momentum": 0.0},
        "local_clip_norm": {"norm": 2.0, "by": "bucket"},
        "warmup_steps": 9,
    },
    "dgc, one pass": {
        "compressor": {"name": "dgc", "density": 1.0, "momentum": 0.0},
        "local_clip_norm": {"norm": 2.0, "by": "bucket"},
        "exchange": "all_gather",
    },
}


@pytest.mark.parametrize("settings", BY_BUCKET.values(), ids=BY_BUCKET)
def test_one_bucket_is_the_whole_gradient(pools, settings):
    ranks = pools[3].run(_together, settings, 25, 2)
    clipped = []
    for _, local in ranks:
        norm = sum((each.astype(np.float64) ** 2).sum() for each in local) ** 0.5
        assert norm > 2 * 3**0.5
        clipped.append([each * (2 * 3**0.5 / norm) for each in local])
    for means, _ in ranks:
        for mean, parts in zip(means, zip(*clipped, strict=True), strict=True):
            assert np.allclose(mean, sum(parts) / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compressor", ["topk", "dgc"])
def test_whose_norm_is_refused(compressor):
    with pytest.raises(ValueError, match="'by': 'model'}: it must be one of 'parameter', 'bucket'"):
        CompressedDDPStrategy(compressor, local_clip_norm={"norm": 1.0, "by": "model"})
