"""A run with steps that were skipped ends where a run without their data ends."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from tests.conformance.training import outcome, train
from tests.helpers.training import Net, digits

BATCH, COUNT, BAD = 16, 8, 3
SCALE = 2.0**14  # large enough for no gradient to be a subnormal float16, at half of it too


class Listed(Net):
    """Trains on these batches, in this order.

    Args:
        turns: numbers of batches.
        infinite: whose gradient is infinite on rank 1.
        skipped: whose gradients are thrown away.
    """

    def __init__(self, turns, infinite=(), skipped=()):
        super().__init__()
        self.turns, self.infinite, self.skipped = list(turns), infinite, skipped
        self.images, self.labels = digits(seed=3).tensors

    def training_step(self, batch, batch_idx):
        turn = self.turns[batch_idx]
        first = BATCH * (turn * dist.get_world_size() + dist.get_rank())
        places = torch.arange(first, first + BATCH) % len(self.labels)
        loss = nn.functional.cross_entropy(self(self.images[places]), self.labels[places])
        return loss * float("inf") if turn in self.infinite and dist.get_rank() == 1 else loss

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        if self.turns[batch_idx] in self.skipped:
            closure()
        else:
            optimizer.step(closure)


def _run(compressor, model, scale=None, **options):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scale else []
    torch.manual_seed(1)
    model = Listed(**model)
    batches = {"max_epochs": 1, "limit_train_batches": len(model.turns)}
    answer = outcome(*train(compressor, model=model, plugins=plugins, **batches, **options))
    return answer | {"scale": scaler.get_scale() if scaler else None}


def _overflow(compressor):
    rest = [turn for turn in range(COUNT) if turn != BAD]
    spoilt = _run(compressor, {"turns": range(COUNT), "infinite": {BAD}}, SCALE)
    removed = _run(compressor, {"turns": rest}, SCALE)
    return spoilt, removed


METHODS = ["topk", "onebit", "powersgd", {"name": "dgc", "density": 0.05}, "rotated"]


@pytest.mark.parametrize("compressor", METHODS, ids=lambda each: each if isinstance(each, str) else each["name"])
def test_an_overflow_might_as_well_not_have_been(pools, compressor):
    ranks = pools[2].run(_overflow, compressor)
    for spoilt, removed in ranks:
        assert (spoilt["scale"], removed["scale"]) == (SCALE / 2, SCALE)
        assert (spoilt["committed"], removed["committed"]) == (COUNT - 1, COUNT - 1)
        assert (spoilt["nonfinite_steps"], removed["nonfinite_steps"]) == (1, 0)
        assert spoilt["finite"]
        assert np.isfinite(spoilt["parameters"]).all()
        assert np.array_equal(spoilt["parameters"], removed["parameters"])
    assert np.array_equal(ranks[0][0]["parameters"], ranks[1][0]["parameters"])


def _thrown_away(compressor):
    rest = [turn for turn in range(COUNT) if turn not in {1, 4, 5}]
    skips = _run(compressor, {"turns": range(COUNT), "skipped": {1, 4, 5}})
    removed = _run(compressor, {"turns": rest})
    return skips, removed


@pytest.mark.parametrize("compressor", METHODS, ids=lambda each: each if isinstance(each, str) else each["name"])
def test_a_user_who_skips_steps(pools, compressor):
    ranks = pools[2].run(_thrown_away, compressor)
    for skips, removed in ranks:
        assert (skips["committed"], removed["committed"]) == (COUNT - 3, COUNT - 3)
        assert skips["kept"] == removed["kept"]
        assert np.array_equal(skips["parameters"], removed["parameters"])
    assert np.array_equal(ranks[0][0]["parameters"], ranks[1][0]["parameters"])
