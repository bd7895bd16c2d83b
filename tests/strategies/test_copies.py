"""What stock DDP lets a user do with a wrapped model works with ours: copying it, pickling it, saving it whole."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import (
    CompressedDDPStrategy,
    GossipStrategy,
    LocalSGDStrategy,
    MeProp,
    SufficientFactors,
    attach,
)
from tests.helpers.training import Net, digits, loader, quiet_trainer


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded]


class Copies(Callback):
    """Copies the model and its wrapper in the middle of a fit; a copy is trained apart from it."""

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if number != 1:
            return
        before = [each.detach().clone() for each in module.parameters()]
        for way in WAYS:
            for model in (module, trainer.strategy.model):
                copied = way(model)
                copied = getattr(copied, "module", copied)
                copied.zero_grad()
                copied(batch[0]).square().mean().backward()
                assert all(each.grad.abs().sum() > 0 for each in copied.parameters())
        assert all(map(torch.equal, before, module.parameters()))


STRATEGIES = {
    "topk": lambda: (CompressedDDPStrategy("topk"), []),
    "delay": lambda: (CompressedDDPStrategy("qsgd", delay=1), []),
    "local": lambda: (LocalSGDStrategy(sync_every=2), []),
    "gossip": lambda: (GossipStrategy(compressor="moniqua"), []),
    "meprop": lambda: (CompressedDDPStrategy("qsgd"), [MeProp(k=5)]),
    "factors": lambda: (CompressedDDPStrategy("topk"), [SufficientFactors("head.0", force=True)]),
}


def _copied(name):
    strategy, callbacks = STRATEGIES[name]()
    trainer = quiet_trainer(strategy, max_epochs=1, limit_train_batches=3, callbacks=[*callbacks, Copies()])
    trainer.fit(Net(), loader(digits(count=96)))
    return trainer.global_step


@pytest.mark.parametrize("name", STRATEGIES)
def test_models_are_copied_in_a_fit(pools, name):
    assert pools[2].run(_copied, name) == [3, 3]


def _averages():
    """A copy of a wrapped model that ``attach`` compresses averages as stock DistributedDataParallel does."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    compression = attach(ddp, "topk", "all_gather")
    for way in WAYS:
        copied = way(ddp)
        copied(torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
        yield copied.module.weight.grad
    ddp(torch.randn(8, 64)).square().mean().backward()
    assert (ddp.module.weight.grad != 0).float().mean() < 0.1
    compression.close()


def _averaged():
    return torch.stack(list(_averages())).numpy()


@pytest.mark.parametrize("size", [2, 3])
def test_a_copy_of_the_wrapper_is_stock_ddp(pools, size):
    first, *others = pools[size].run(_averaged)
    assert (first == first[0]).all()
    assert (first != 0).mean() > 0.99  # topk would leave 1 %
    assert all((first == each).all() for each in others)
