"""One rank of two hosts that hold a replica each: a model's steps under native HSDP, and compressed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.harness.models import MODELS, batch
from benchmarks.harness.rank import spanned
from lightning_compress import Compression, attach

SHARDS = 2
"""Ranks of a host."""
OURS: dict[str, object] = {
    "none": "none",
    "bf16": "bf16",
    "rotated": "rotated",
    "qsgd": "qsgd",
    "onebit": "onebit",
    "powersgd": "powersgd",
}
METHODS = ("HSDP", "HSDP each batch", "fp16 mean", *OURS)
"""The second averages over replicas after each micro-batch, as Lightning's strategy does."""


def half_mean(replicas: DeviceMesh) -> Callable[[torch.Tensor], None]:
    """A hook for FSDP that averages over replicas in float16: what a user can write without this package."""
    group, count = replicas.get_group(), replicas.size()

    def average(gradients: torch.Tensor) -> None:
        half = gradients.div(count).half()
        dist.all_reduce(half, group=group)
        gradients.copy_(half)

    return average


def sharded(name: str, mesh: DeviceMesh) -> FSDPModule:
    """A model of the lab whose layers are sharded each on its own."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    layers: Iterable[nn.Module] = getattr(model, "layers", model.children())
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Way:
    """One way to train.

    Args:
        method: of ``METHODS``.
        name: of the model.
        mesh: of hosts and their ranks.
    """

    def __init__(self, method: str, name: str, mesh: DeviceMesh) -> None:
        native = method.startswith("HSDP")
        self._deferred = method != "HSDP each batch"
        self.model = sharded(name, mesh if native else mesh["shard"])
        self._optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.compression: Compression | None = None
        if method in OURS:
            optimizer, replicas = self._optimizer, mesh["replicate"]
            self.compression = attach(self.model, OURS[method], optimizer=optimizer, replicas=replicas)  # type: ignore[arg-type]
        elif not native:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_all_reduce_hook(half_mean(mesh["replicate"]))

    def step(self, inputs: torch.Tensor, accumulate: int) -> None:
        """Train a step of so many micro-batches."""
        for number in range(accumulate):
            # the float16 hook cannot tell a micro-batch from the last, and averages each
            self.model.set_requires_all_reduce(number == accumulate - 1 or not self._deferred)
            self.model(inputs).square().mean().div(accumulate).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def find(told: dict[str, Any]) -> dict[str, Any]:
    """Medians by method: milliseconds of a step; bytes that the host sent, and that formulas say of its ranks."""
    mesh = init_device_mesh("cpu", (told["ranks"] // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    inputs, accumulate = batch(told["model"], dist.get_rank()), told["accumulate"]
    found: dict[str, Any] = {"ms": {}, "wire_bytes": {}, "formula_bytes": {}}
    for method in told["methods"]:
        way = Way(method, told["model"], mesh)
        step = partial(way.step, inputs, accumulate)
        for _ in range(told["warm"]):
            step()
        times, wire, formula = [], [], []
        for _ in range(told["steps"]):
            before = way.compression.meter.bytes_sent if way.compression else 0.0
            with spanned() as span:
                step()
            times.append(span.seconds)
            wire.append(span.sent)
            formula.append(way.compression.meter.bytes_sent - before if way.compression else 0.0)
        found["ms"][method] = 1e3 * statistics.median(times)
        found["wire_bytes"][method] = statistics.median(wire)
        if way.compression:
            found["formula_bytes"][method] = SHARDS * statistics.median(formula)
            way.compression.close()
        del way, step
        gc.collect()
    return found
