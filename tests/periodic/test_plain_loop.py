"""Local steps and gossip in a loop of one's own, without Lightning, on ranks that are threads."""

import copy

import pytest
import torch
from torch import nn

from lightning_compress.collectives import run_threads
from lightning_compress.periodic import Gossip, LocalSGD

MODEL = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def train(ranks, synchroniser, steps=12):
    """What a user writes; a rank's data have a mean of their own."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    synchroniser.start(model, [optimizer], ranks)
    data = torch.Generator().manual_seed(1 + ranks.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(16, 8, generator=data) + ranks.rank) - ranks.rank).square().mean().backward()
        synchroniser.before_step(optimizer)
        optimizer.step()
        synchroniser.after_step()
    synchroniser.finish()
    synchroniser.close()
    return [each.detach() for each in model.state_dict().values()], synchroniser.stats()


KINDS = {
    "local steps": lambda: LocalSGD(sync_every=4),
    "streaming": lambda: LocalSGD(4, "nesterov", {"name": "rotated", "bits": 8}, fragments=2, delay=2),
    "after averaged steps": lambda: LocalSGD(4, averaged_steps=3, compressor="onebit", evaluate="mean"),
    "gossip": lambda: Gossip(meet_every=4),
    "choco": lambda: Gossip("choco", average_states=True),
    "d2 by Moniqua": lambda: Gossip("d2", compressor="moniqua", sync_every=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_end_on_one_model(size, kind):
    found = run_threads(size, lambda ranks: train(ranks, KINDS[kind]()))
    for model, stats in found:
        assert all(own.equal(other) for own, other in zip(model, found[0][0], strict=True))
        assert all(each.isfinite().all() for each in model)
        assert (stats["total_bytes_sent"] > 0) == (size > 1)
