"""A call of one rank finds the others wherever they are."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_compress.contrib.asynchronous.async_gossip import AsyncGossip


def _called(algorithm):
    """Rank 1 comes to a call without having gone on after a meeting."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gossip = AsyncGossip(algorithm)
    gossip.start(model, [optimizer])

    def step():
        gossip.resume()
        optimizer.zero_grad()
        model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
        gossip.before_step(optimizer)
        optimizer.step()
        gossip.after_step()

    step()
    gossip.averaged_model()
    if dist.get_rank() != 1:
        step()
    if dist.get_rank() == 0:
        gossip.call()
    while not gossip.called:
        gossip.look_for_calls()
        time.sleep(0.01)
    gossip.join()
    step()
    gossip.finish()
    gossip.close()
    return gossip.attempts, gossip.furthest(), model.weight.detach().numpy().tobytes()


@pytest.mark.parametrize("algorithm", ["adpsgd", "ssp"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_has_not_gone_on_since_a_meeting_comes_too(pools, size, algorithm):
    found = pools[size].run(_called, algorithm)
    assert [attempts for attempts, *_ in found] == [3, 2, 3][:size]
    assert {furthest for _, furthest, _ in found} == {3}
    assert len({weight for *_, weight in found}) == 1
