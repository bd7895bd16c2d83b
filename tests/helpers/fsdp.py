"""A character GPT in a LightningModule that shards it, as far as its strategy has a mesh."""

import hashlib
import warnings

import lightning.pytorch as pl
import torch
import torch._dynamo.convert_frame  # as the first fully_shard of each rank would
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lightning_compress import CompressedFSDPStrategy, SyncFSDPAccumulation
from tests.helpers.sharded import GPT, text
from tests.helpers.training import quiet_trainer

SMALL = {"width": 32, "blocks": 1}


class Letters(Dataset):
    """Pieces of 17 letters."""

    def __len__(self):
        return 4096

    def __getitem__(self, place):
        piece = text()[17 * place : 17 * place + 17]
        return piece[:-1], piece[1:]


class Lit(pl.LightningModule):
    """The GPT; its blocks and itself are sharded over the mesh that ``mesh`` returns, once."""

    def __init__(self, shape=None, shard=True):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.shard, self.done = GPT(**(shape or SMALL)), shard, False

    def mesh(self):
        return self.device_mesh["data_parallel"]

    def configure_model(self):
        if self.done or not self.shard or self.device_mesh is None:
            return
        self.done = True
        mesh = self.mesh()
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def forward(self, letters):
        return self.net(letters)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    validation_step = test_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


class Native(Lit):
    """Sharded over two dimensions, for PyTorch's own average over the replicas."""

    def mesh(self):
        sizes = 2, dist.get_world_size() // 2
        return init_device_mesh("cpu", sizes, mesh_dim_names=("native_replicate", "native_shard"))


def fresh():
    """Forget plans of DTensors: those of an earlier job's mesh, which is equal, have groups that are gone."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def sharded(compressor="qsgd", exchange="auto", **settings):
    """Ours, of 2 replicas."""
    return CompressedFSDPStrategy(compressor, exchange, **{"replicate_size": 2, **settings})


def stock(accumulate=None):
    """Lightning's own strategy, of all ranks; with the mixin if a way to accumulate is given."""

    class Accumulating(SyncFSDPAccumulation, ModelParallelStrategy):
        pass

    made = (Accumulating if accumulate else ModelParallelStrategy)(dist.get_world_size(), 1)
    if accumulate:
        made.accumulate = accumulate
    return made


def fit(strategy, steps=3, make=Lit, data=None, ckpt_path=None, quiet=True, **options):
    """Train on this rank; returns the trainer and the model."""
    model = make()
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        trainer = quiet_trainer(strategy, **{"max_steps": steps, "max_epochs": 100, "limit_val_batches": 0, **options})
        trainer.fit(model, data or DataLoader(Letters(), 4), ckpt_path=ckpt_path)
    return trainer, model


def fingerprint(model):
    """A hash of all parameters; collective."""
    whole = [getattr(each.detach(), "full_tensor", each.detach)().float().flatten() for each in model.parameters()]
    return hashlib.sha256(torch.cat(whole).numpy().tobytes()).hexdigest()[:12]
