"""What travels beside training on a GPU: fragments of local steps, and questions about signals."""

import pytest
import torch
from torch import nn

from lightning_compress.collectives import TorchCollective
from lightning_compress.periodic.sync_schedule import Rounds
from tests.periodic.helpers import begun
from tests.strategies.test_interruptions import EVERY, _asks

pytestmark = pytest.mark.gpu
STEPS = 10


def _streamed(device, compressor):
    """The model after rounds whose fragments are used two steps late, and what was sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(41, 53), nn.BatchNorm1d(53), nn.Tanh(), nn.Linear(53, 7)).to(device)
    ranks, optimizer = TorchCollective(), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    settings = {"compressor": compressor, "min_numel": 1}
    local = begun(model, ranks, Rounds(4, 2, 2, 0.5), "nesterov", [optimizer], **settings)
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(100 * step + ranks.rank)
        inputs = torch.randn(8, 41, generator=generator).to(device)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        local.after_step()
    local.finish()
    sent = local.stats()["bytes_sent"]
    local.close()
    return [each.cpu() for each in model.state_dict().values()], sent


@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_local_steps_with_a_delay(ranks, compressor):
    """Ranks end on one model, that of ranks on the CPU to rounding."""
    (one, sent), (other, _) = ranks("nccl").run(_streamed, "cuda", compressor)
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    (wanted, told), _ = ranks("gloo").run(_streamed, "cpu", compressor)
    assert sent == told
    if compressor == "none":  # signs of numbers about 0 are those of their rounding
        for a, b in zip(one, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_signals_over_nccl(ranks):
    assert ranks("nccl").run(_asks, torch.device("cuda")) == [(3, EVERY + 1)] * 2
