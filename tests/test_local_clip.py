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
