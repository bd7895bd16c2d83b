"""Checks of a sharded model before training: what cannot work raises on every rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_compress.core import errors
from lightning_compress.engine import checks
from lightning_compress.engine.sharded.hook import ReplicaHook
from lightning_compress.engine.sharded.units import Unit
from lightning_compress.reducers import Reducer
from lightning_compress.settings.run_state import RunState


class Cures(NamedTuple):
    """What to write instead of what cannot work.

    Args:
        model: the name of the model where it is sharded.
        shards: the mesh to shard over.
        beside: where, or with what else, to shard.
        whole: how to train a model that is not sharded.
    """

    model: str
    shards: str
    beside: str
    whole: str

    @property
    def mesh(self) -> str:
        """How to shard."""
        return f"{self.line('module')} {self.beside}"

    def line(self, module: str) -> str:
        """Return the line that shards a module."""
        return f"fully_shard({module}, mesh={self.shards})"


ATTACH = Cures(
    "model",
    "mesh['shard']",
    "and attach(model, ..., replicas=mesh['replicate']), with mesh = init_device_mesh(device, (replicas, shards), "
    "mesh_dim_names=('replicate', 'shard'))",
    "DistributedDataParallel and attach(ddp, ...)",
)
"""Of ``attach``."""


def check_methods(settings: RunState) -> None:
    """Raise ValueError for settings that need a whole gradient or a whole state of the optimizer on every rank.

    Raises:
        ValueError: there is one.
    """
    if (clipping := settings.options.local_clip_norm) is not None:
        raise ValueError(
            f"local_clip_norm={clipping} needs the norm of a rank's whole gradient, and a rank of a sharded model has "
            "a shard: leave it out, and clip the mean with torch.nn.utils.clip_grad_norm_"
        )
    if settings.options.delay:
        raise ValueError("delay=1 does not work with sharded models, as FSDP waits for each average: use delay=0")
    correction = settings.correction
    follows = next((each for each in settings.methods if isinstance(each, Reducer) and each.follows_optimizer), None)
    if follows or settings.optimizing or (correction and correction.counts_steps):
        raise ValueError(
            f"{follows or settings.steps_by} does a part of the optimizer's work, whose state FSDP shards: use "
            "compressor='rotated' or 'qsgd', which leave all of it to the optimizer"
        )


def check_units(model: nn.Module, units: Sequence[Unit], cures: Cures = ATTACH) -> None:
    """Raise ValueError if the gradients of the model do not reach a hook as means over the shards.

    Args:
        model: sharded.
        units: of it.
        cures: for the messages.

    Raises:
        ValueError: they do not.
    """
    if not units:
        raise ValueError(f"fully_shard was applied to no module that has trained parameters: use {cures.mesh}")
    for unit in units:
        _check_unit(unit, cures)
    over = {tuple(unit.mesh.mesh.flatten().tolist()): unit.name for unit in reversed(units)}
    if len(over) > 1:
        found = ", ".join(f"{name} over ranks {list(ranks)}" for ranks, name in over.items())
        raise ValueError(
            f"fully_shard got several meshes ({found}): give all calls the same one, mesh={cures.shards} (without "
            "mesh=, it shards over all ranks)"
        )
    within = {id(shard.parameter()) for unit in units for shard in unit.trained}
    if outside := [name for name, each in checks.trained_parameters(model) if id(each) not in within]:
        raise ValueError(
            f"no sharded module holds the trained parameters {errors.listed(outside)}, so nothing would average "
            f"their gradients: write {_lines(model, outside, cures)}"
        )
    if not any(shard.numel for unit in units for shard in unit.trained):
        raise ValueError("a rank holds no element of any parameter, as there are more shards than rows: use fewer")
    if getattr(model, checks.AVERAGED_ELSEWHERE, ()):
        raise ValueError("SufficientFactors needs DistributedDataParallel: leave it out for a sharded model")


def _lines(model: nn.Module, names: Sequence[str], cures: Cures) -> str:
    """Return the lines that shard what holds these parameters."""
    found = list(dict.fromkeys(_holder(model, name) for name in names))
    if "" in found:
        return (
            f"{cures.line(cures.model)} after the modules in it, and call {cures.model}(...) for "
            "the loss, because FSDP gathers parameters in forward"
        )
    holders = [re.sub(r"\.(\d+)\b", r"[\1]", f"{cures.model}.{path}") for path in found]
    if len(holders) == 1:
        return f"{cures.line(holders[0])} after the modules in it"
    listed = ", ".join([*holders[:3], *(["..."] if len(holders) > 3 else [])])
    return f"`for module in ({listed}): {cures.line('module')}` after the modules in them"


def _holder(model: nn.Module, name: str) -> str:
    """Return the path of the outermost module in the model with a forward that holds a parameter; "": only itself.

    The model may be a LightningModule, whose own forward may never be called.
    """
    parts, module = name.split(".")[:-1], model
    for place, part in enumerate(parts):
        module = getattr(module, part)
        if type(module).forward is not nn.Module.forward or "forward" in vars(module):  # as torch.compile's
            return ".".join(parts[: place + 1])
    return ""


def _check_unit(unit: Unit, cures: Cures) -> None:
    mesh, sizes = unit.mesh, tuple(unit.mesh.mesh.shape)
    if not unit.shards:
        raise ValueError(
            f"replicate() was applied to {unit.name}, so that PyTorch averages its gradients over {sizes} ranks "
            f"uncompressed: use {cures.whole}"
        )
    if unit.replicates or len(sizes) > 1:
        named = dict(zip(mesh.mesh_dim_names or "?", sizes, strict=False))
        raise ValueError(
            f"fully_shard of {unit.name} got the mesh {named} of {len(sizes)} dimensions, and PyTorch would average "
            f"over the first without compression. Give it one dimension, the shards: write {cures.mesh}"
        )
    if parallel := [each.name for each in unit.trained if _dimensions(each.parameter()) > 1]:
        raise ValueError(f"{parallel[0]} is sharded over more than one dimension of a mesh (tensor parallel): use one")
    if (factor := unit.divides_by) is not None or unit.only_sums:
        setter = (
            "set_force_sum_reduction_for_comms(True)" if factor is None else f"set_gradient_divide_factor({factor})"
        )
        raise ValueError(
            f"{setter} of {unit.name} makes FSDP's result another than the mean over the shards, which compression "
            "averages over the replicas: leave it out, and scale the loss"
        )
    if (dtype := unit.trained[0].dtype) not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"FSDP reduces gradients of {unit.name} in {dtype}, and divides by a part of the ranks before and the rest "
            "after compression: use MixedPrecisionPolicy(reduce_dtype=torch.float32) or torch.bfloat16"
        )
    if unit.offloads:
        raise ValueError(f"CPUOffloadPolicy of {unit.name} moves gradients while they are averaged: leave it out")
    if isinstance(unit.hooked, ReplicaHook):
        raise ValueError(f"{unit.name} has a compression: close it before you attach another one")


def _dimensions(parameter: object) -> int:
    return int(getattr(parameter, "device_mesh").ndim)  # noqa: B009  # a DTensor's


def check_replicas(replicas: object, units: Sequence[Unit], ranks: int, cures: Cures = ATTACH) -> None:
    """Raise ValueError if ``replicas`` is not the other dimension of a mesh of all ranks.

    Args:
        replicas: as given.
        units: of the model.
        ranks: in the world.
        cures: for the messages.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(replicas, DeviceMesh) or replicas.ndim != 1:
        raise ValueError(f"replicas={replicas} must be the mesh of the replicas, of one dimension: use {cures.mesh}")
    over, across = units[0].mesh.mesh.tolist(), replicas.mesh.tolist()
    if len(over) == ranks and len(across) > 1:
        raise ValueError(
            f"fully_shard of {units[0].name} shards over all {ranks} ranks, as it does without mesh=, and leaves no "
            f"replicas. For {len(across)} replicas of {ranks // len(across)} shards, write {cures.mesh}"
        )
    if len(across) * len(over) != ranks or len({*across} & {*over}) != 1:
        raise ValueError(
            f"fully_shard of {units[0].name} got the mesh of ranks {over}, and the replicas' mesh is of {across}. "
            f"Their sizes' product must be {ranks}, all ranks, and only this rank may be in both: write {cures.mesh}"
        )


def check_optimizers(optimizers: Sequence[Optimizer], units: Sequence[Unit]) -> None:
    """Raise ValueError for an optimizer of parameters that ``fully_shard`` has replaced.

    Raises:
        ValueError: there is one.
    """
    ours = {id(shard.parameter()) for unit in units for shard in unit.trained}
    for each in optimizers:
        if ours.isdisjoint(id(parameter) for group in each.param_groups for parameter in group["params"]):
            raise ValueError(
                f"{type(each).__name__} steps none of the model's {len(ours)} trained parameters: fully_shard replaces "
                "them, so build the optimizer after it"
            )
