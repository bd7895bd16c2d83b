"""What the strategy over FSDP2 refuses: on every rank, when the fit begins, with what to write instead."""

import re
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from lightning_compress import CompressedFSDPStrategy, MeProp, SufficientFactors
from tests.helpers.fsdp import Lit, fit, fresh, sharded
from tests.helpers.table import table

LIGHTNING = "lightning_compress.CompressedFSDPStrategy"


class Plain(pl.LightningModule):
    """Two layers, sharded as ``shards(self, mesh)`` does."""

    def __init__(self, shards):
        super().__init__()
        self.first, self.second, self.shards = nn.Linear(17, 64), nn.Linear(64, 32), shards

    def configure_model(self):
        self.shards(self, self.device_mesh)

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch[0].float()[:, :1].expand(-1, 17))).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Old(nn.Linear):
    """Stands for a module of FSDP1, which needs a GPU."""


Old.__name__ = "FullyShardedDataParallel"


def _shards(function):
    return {"make": lambda: Plain(function)}


def _two_meshes(model, mesh):
    fully_shard(model.first, mesh=mesh["data_parallel"])
    fully_shard(model.second, mesh=mesh["replicate"])


def _replicated(model, mesh):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(model, mesh=mesh["replicate"])


def _outside(model, mesh):
    fully_shard(model.first, mesh=mesh["data_parallel"])


def _listed_outside(model, mesh):
    model.more = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
    _outside(model, mesh)


def _own_outside(model, mesh):
    model.scale = nn.Parameter(torch.ones(1))
    _outside(model, mesh)


def _old(model, mesh):
    model.first = Old(17, 64)
    fully_shard(model, mesh=mesh["data_parallel"])


def _offloaded(model, mesh):
    fully_shard(model, mesh=mesh["data_parallel"], offload_policy=CPUOffloadPolicy(pin_memory=False))


def _divided(model, mesh):
    fully_shard(model, mesh=mesh["data_parallel"])
    model.set_gradient_divide_factor(4.0)


def _tensor_parallel(model, mesh):
    fully_shard(model, mesh=mesh["data_parallel", "tensor_parallel"])


def _plain(*given, **settings):
    return {"strategy": lambda: sharded(*given, **settings)}


OWNER = {"name": "two_shot", "adagrad": 1e-8}
MESH = r"mesh=self\.device_mesh\['data_parallel'\]"
CURE = rf"fully_shard\(module, {MESH}\) in the LightningModule's configure_model"
CASES = {
    "sizes": (_plain(replicate_size=3), "replicate_size=3 times data_parallel_size=1 is not the number of ranks, 4"),
    "both sizes": (
        _plain(data_parallel_size=4),
        "data_parallel_size=4 is not .* give one of the two sizes, a divisor of 4",
    ),
    "nothing sharded": (_shards(lambda *_: None), f"no module that has trained parameters: use {CURE}"),
    "no mesh": (
        _shards(lambda model, _: fully_shard(model)),
        f"of the model shards over all 4 ranks, as it does without mesh=.*For 2 replicas of 2 shards, write {CURE}",
    ),
    "two dimensions": (
        _shards(lambda model, mesh: fully_shard(model, mesh=mesh["replicate", "data_parallel"])),
        rf"got the mesh \{{'replicate': 2, 'data_parallel': 2\}} of 2 dimensions.*write {CURE}",
    ),
    "three dimensions": (
        _shards(lambda model, mesh: fully_shard(model, mesh=mesh)),
        rf"DeviceMesh\(\(replicate=2, data_parallel=2, tensor_parallel=1\).*give it one dimension.*by {CURE}",
    ),
    "tensor parallel": (_shards(_tensor_parallel), rf"got the mesh .*'tensor_parallel': 1.*{CURE}"),
    "replicate": (_shards(_replicated), r"replicate\(\) was applied to .*use CompressedDDPStrategy"),
    "several meshes": (
        _shards(_two_meshes),
        rf"several meshes \(second over ranks \[[02, 13]+\], first over ranks \[[01, 23]+\]\): .*the same one, {MESH}",
    ),
    "the other mesh": (
        _shards(lambda model, mesh: fully_shard(model, mesh=mesh["replicate"])),
        rf"mesh of ranks \[[02, 13]+\], and the replicas' mesh is of \[.*product must be 4.*: write {CURE}",
    ),
    "outside": (
        _shards(_outside),
        rf"no sharded module holds .* second.weight, second.bias, .*write fully_shard\(self.second, {MESH}\) after",
    ),
    "several outside": (
        _shards(_listed_outside),
        r"second.weight, second.bias, more.0.weight and 3 more, so nothing.*: write `for module in \(self.second, "
        rf"self.more\[0\], self.more\[1\]\): fully_shard\(module, {MESH}\)` after the modules in them",
    ),
    "the module's own": (_shards(_own_outside), rf"fully_shard\(self, {MESH}\) .*and call self\(\.\.\.\) for the loss"),
    "FSDP1": (_shards(_old), rf"of FSDP1 .*use FSDP2, .*{CURE}"),
    "offloading": (_shards(_offloaded), "CPUOffloadPolicy of the model moves gradients.*leave it out"),
    "a factor": (_shards(_divided), r"set_gradient_divide_factor\(4.0\) of the model.*scale the loss"),
    "16-mixed": (
        {"plugins": lambda: [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
        "precision='16-mixed' scales the loss.*use precision='bf16-mixed'",
    ),
    "local_clip_norm": (_plain(local_clip_norm=1.0), "local_clip_norm=.*needs the norm of a rank's whole gradient"),
    "delay": (_plain(delay=1), "delay=1 does not work with sharded models.*use delay=0"),
    "onebit_adam": (_plain("onebit_adam", warmup_steps=2), "a part of the optimizer's work, whose state FSDP shards"),
    "adam_mask": (_plain("adam_mask"), "a part of the optimizer's work, whose state FSDP shards"),
    "AdaGrad": (_plain("qsgd", OWNER), "a part of the optimizer's work, whose state FSDP shards"),
    "MeProp": (
        {"callbacks": lambda: [MeProp()]},
        "MeProp works with whole gradients.*CompressedDDPStrategy",
    ),
    "factors": ({"callbacks": lambda: [SufficientFactors()]}, r"SufficientFactors needs Trainer\(strategy=Compressed"),
}


def _messages(names):
    fresh()
    found = []
    for name in names:
        given = {key: each() if key != "make" else each for key, each in CASES[name][0].items()}
        try:
            fit(given.pop("strategy", None) or sharded(), 1, **given)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("it ran")
    return found


def test_what_cannot_work_is_refused_on_every_rank(pools):
    for messages in pools[4].run(_messages, list(CASES), timeout=60):
        for (name, (_, pattern)), message in zip(CASES.items(), messages, strict=True):
            assert re.search(pattern, message), (name, message)


def _older():
    fresh()
    with mock.patch.object(FSDPModule, "set_all_reduce_hook", property(lambda _: (None).no)):
        try:
            fit(sharded(), 1)
        except RuntimeError as error:
            return str(error)


def test_another_torch_is_refused(pools):
    for said in pools[4].run(_older):
        assert "compression of sharded models works with torch 2.7 to" in said


@table(
    "given, said",
    [
        ({"find_unused_parameters": True}, "find_unused_parameters=True is an argument of DDPStrategy or Distributed"),
        ({"bucket_cap_mb": 5}, "bucket_cap_mb=5 is an argument of DDPStrategy"),
        ({"start_method": "spawn"}, "start_method='spawn' is an argument of DDPStrategy"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not work.*larger data_parallel_size"),
        ({"replicate_size": 0}, "replicate_size=0 must be a number of ranks from 1, or 'auto'"),
        ({"data_parallel_size": "two"}, "data_parallel_size='two' must be a number of ranks"),
        ({"accumulate": "whole"}, "accumulate='whole' must be one of 'sharded', 'unsharded'"),
        ({"replicas": 2}, "has no argument 'replicas'"),
        ({"bits": 4, "compressor": "qsgd"}, "write compressor={'name': 'qsgd', 'bits': 4}"),
    ],
)
def test_arguments_are_refused_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        CompressedFSDPStrategy(**given)


@table("given", [["--trainer.strategy=compressed_fsdp_topk"], [f"--trainer.strategy={LIGHTNING}"]])
@pytest.mark.filterwarnings("ignore")
def test_lightning_cli(given):
    more = [f"--trainer.strategy.{each}" for each in ("replicate_size=2", "min_numel=7", "timeout=null")]
    args = [*given, *(more if len(given[0]) > 40 else ()), "--trainer.accelerator=cpu", "--trainer.logger=false"]
    strategy = LightningCLI(Lit, args=args, run=False).trainer.strategy
    assert isinstance(strategy, CompressedFSDPStrategy)
    if more[0] in args:
        assert (strategy._sizes, strategy._settings.rules.min_numel) == ((2, "auto"), 7)
