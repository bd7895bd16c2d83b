"""One rank alone calls what all ranks have to call: the errors name the call, and who is in it."""

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, LocalSGDStrategy, attach
from lightning_compress.fabric import CompressedDDPStrategy as FabricStrategy
from tests.helpers.lives import live
from tests.helpers.training import Net, digits, loader, quiet_trainer


class SavesOnRank0(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if trainer.is_global_zero and number == 1:
            trainer.save_checkpoint(self.path)


def _save(strategy, path):
    made = {"ddp": lambda: CompressedDDPStrategy("topk", "all_gather"), "local": lambda: LocalSGDStrategy(sync_every=4)}
    trainer = quiet_trainer(made[strategy](), max_epochs=1, limit_train_batches=8, callbacks=[SavesOnRank0(path)])
    trainer.fit(Net(), loader(digits()))


def _validate(strategy, path):
    module = Net()
    module.validation_step = lambda batch, number: None
    trainer = quiet_trainer(CompressedDDPStrategy("topk", "all_gather"), max_epochs=1, limit_train_batches=2)
    trainer.fit(module, loader(digits()))
    if dist.get_rank() == 0:
        trainer.validate(module, loader(digits()))


def _attached(call, path):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compression = attach(model, "topk", "all_gather", optimizer=optimizer)
    for step in range(4):
        if step == 2 and dist.get_rank() == 0 and call == "load":
            compression.load_state_dict(compression.state_dict())
        if step == 2 and dist.get_rank() == 0 and call == "retune":
            compression.retune(density=0.5)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    if call == "close" and dist.get_rank() == 0:
        compression.close()


def _fabric(call, path):
    fabric = Fabric(accelerator="cpu", strategy=FabricStrategy("topk", "all_gather"), devices=dist.get_world_size())
    fabric.launch()
    model = nn.Linear(64, 64)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            fabric.save(path, {"model": model, "optimizer": optimizer})
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(8, 64)).square().mean())
        optimizer.step()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("function", "how", "call"),
    [
        (_save, "ddp", "trainer.save_checkpoint()"),
        (_attached, "retune", "compression.retune()"),
        (_attached, "close", "compression.close()"),
        (_validate, "ddp", "trainer.validate()"),
        pytest.param(_save, "local", "averaged_model(), which saving and validating need", marks=pytest.mark.thorough),
        pytest.param(_attached, "load", "compression.load_state_dict()", marks=pytest.mark.thorough),
        pytest.param(_fabric, "save", "fabric.save()", marks=pytest.mark.thorough),
    ],
)
def test_the_errors_name_the_call(size, function, how, call, tmp_path):
    codes, texts = live(size, tmp_path / "ranks", function, how, str(tmp_path / "saved.ckpt"), seconds=8)
    others = ", ".join(map(str, range(1, size)))
    raised = [text for code, text in zip(codes, texts, strict=True) if code == 1]  # Gloo aborts some: a mismatch
    assert codes[0]
    assert raised
    for text in raised:
        assert f"rank 0 waits in {call}, and rank {others} does not. Call it on every rank" in text
