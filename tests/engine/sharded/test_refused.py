"""What cannot work raises on every rank, with what was given and what to write instead."""

import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.engine.sharded import units
from tests.helpers import sharded


def _net(mesh, outer=True, **more):
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    fully_shard(net[0], mesh=mesh, **more)
    return fully_shard(net, mesh=mesh, **more) if outer else net


def _native(mesh, replicas):
    attach(_net(mesh), "qsgd", replicas=replicas)


def _replicated(mesh, replicas):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    net = nn.Linear(32, 32)
    replicate(net, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("all",)))
    attach(net, "qsgd", replicas=replicas)


def _two_meshes(mesh, replicas):
    net = nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=sharded.shards(mesh)), nn.Linear(8, 8))
    fully_shard(net[1], mesh=replicas)
    attach(net, "qsgd", replicas=replicas)


def _divided(mesh, replicas):
    net = _net(sharded.shards(mesh))
    net.set_gradient_divide_factor(4.0)
    attach(net, "qsgd", replicas=replicas)


def _given(compressor="qsgd", outer=True, policy=None, **settings):
    def case(mesh, replicas):
        more = {} if policy is None else policy
        attach(_net(sharded.shards(mesh), outer, **more), compressor, **{"replicas": replicas, **settings})

    return case


def _own_forward(mesh, replicas):
    inner = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    inner.forward = lambda inputs: inner["b"](inner["a"](inputs))  # of the instance, as torch.compile's modules have it
    fully_shard(inner["a"], mesh=sharded.shards(mesh))
    attach(nn.Sequential(inner), "qsgd", replicas=replicas)


def _early(mesh, replicas):
    net = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(net.parameters())
    attach(fully_shard(net, mesh=sharded.shards(mesh)), "qsgd", optimizer=optimizer, replicas=replicas)


def _twice(mesh, replicas):
    net = _net(sharded.shards(mesh))
    attach(net, "qsgd", replicas=replicas)
    attach(net, "qsgd", replicas=replicas)


def _replaced(mesh, replicas):
    net = _net(sharded.shards(mesh))
    net[2].weight = nn.Parameter(net[2].weight.detach().clone())
    attach(net, "qsgd", replicas=replicas)


def _other_rate(mesh, replicas):
    net = _net(sharded.shards(mesh))
    optimizer = torch.optim.SGD(net.parameters(), 0.1 + (torch.distributed.get_rank() == 3))
    attach(net, "qsgd", optimizer=optimizer, replicas=replicas)


def _late(mesh, replicas):
    net = _net(sharded.shards(mesh))
    net(torch.ones(2, 32))
    attach(net, "qsgd", replicas=replicas)


def _whole(mesh, replicas):
    attach(DistributedDataParallel(nn.Linear(8, 8)), "qsgd", replicas=replicas)


def _clipped(mesh, replicas):
    attach(_net(sharded.shards(mesh)), "qsgd", replicas=replicas, local_clip_norm=1.0)


HALF = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
CASES = {
    "a mesh of two dimensions": (_native, r"got the mesh \{'replicate\d+': 2, 'shard\d+': 2\}.*mesh=mesh\['shard'\]"),
    "replicate": (_replicated, r"replicate\(\) was applied to the model.*use DistributedDataParallel"),
    "several meshes": (_two_meshes, r"several meshes \(1 over ranks.*the same one, mesh=mesh\['shard'\]"),
    "a factor": (_divided, r"set_gradient_divide_factor\(4.0\) of the model.*scale the loss"),
    "no replicas": (_given(replicas=None), r"replicas=None must be the mesh.*replicas=mesh\['replicate'\]"),
    "parameters outside": (
        _given(outer=False),
        r"2.weight, 2.bias, so.*write fully_shard\(model\[2\], mesh=mesh\['shard'\]\)",
    ),
    "parameters of a forward": (_own_forward, r"0.b.bias, so.*write fully_shard\(model\[0\], mesh"),
    "half precision": (_given(policy=HALF), r"in torch.float16.*reduce_dtype=torch.float32"),
    "offloading": (_given(policy={"offload_policy": CPUOffloadPolicy(pin_memory=False)}), "CPUOffloadPolicy"),
    "onebit_adam": (_given("onebit_adam", warmup_steps=2), r"OneBitAdam.*part of the optimizer's work"),
    "a delay": (_given(delay=1), "delay=1 does not work with sharded models.*use delay=0"),
    "a local norm": (_clipped, r"local_clip_norm=.*clip_grad_norm_"),
    "a scaler": (_given(scale=lambda: None), "scale= is for a GradScaler.*bfloat16"),
    "an optimizer before": (_early, "AdamW steps none of the model's 2 trained.*build the optimizer after it"),
    "one rank's learning rate": (_other_rate, r"values of lr of rank 3 differ from those of rank 0"),
    "twice": (_twice, "has a compression: close it"),
    "after a forward": (_late, "of the model is gathered, or was.*: call attach before the first forward"),
    "a replaced parameter": (
        _replaced,
        "of the model is.* or was replaced after fully_shard.*tie or replace parameters",
    ),
    "not sharded": (_whole, "is for models of fully_shard"),
}


def _messages(names):
    found = []
    for name in names:
        mesh = sharded.mesh_of()
        try:
            CASES[name][0](mesh, sharded.replicas(mesh))
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("it ran")
    return found


def test_what_cannot_work_is_refused_on_every_rank(pools):
    for messages in pools[4].run(_messages, list(CASES)):
        for (name, (_, pattern)), message in zip(CASES.items(), messages, strict=True):
            assert re.search(pattern, message), (name, message)


def _unused_below():
    """The error of each rank where PyTorch does not reduce parameters without a gradient."""
    mesh = sharded.mesh_of()
    model = sharded.build(sharded.shards(mesh), spare=True)
    with mock.patch.object(units.Unit, "reduce_unused"):
        compression = attach(model, "qsgd", replicas=sharded.replicas(mesh))
    try:
        sharded.loss_of(model, 0).backward()
    except RuntimeError as error:
        return str(error)
    finally:
        compression.close()


def test_a_missing_gradient_is_refused_where_pytorch_does_not_fill_it(pools):
    for message in pools[4].run(_unused_below):
        assert re.search(r"FSDP reduced [\d,]+ gradients of the model, which trains [\d,]+:.*or torch 2\.13", message)


class _Elsewhere:
    """A module of a version whose FSDP keeps its state elsewhere."""

    def _get_fsdp_state(self):
        return type("State", (), {"_fsdp_param_group": object()})()


def test_another_version_is_named():
    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__.split('+')[0]}.*works with torch 2\.7 to"):
        units._groups(_Elsewhere())
