"""Compress the average over the replicas of a sharded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_compress.collectives import Collective, TorchCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import side_stream
from lightning_compress.engine.sharded import checks
from lightning_compress.engine.sharded.hook import register
from lightning_compress.engine.sharded.units import roots_of, units_of
from lightning_compress.planning.decide import decide
from lightning_compress.planning.summary import run_summary
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState


def check(
    model: nn.Module,
    settings: RunState,
    replicas: object,
    optimizers: Sequence[Optimizer],
    ranks: Collective,
    cures: checks.Cures = checks.ATTACH,
) -> None:
    """Raise ValueError if a sharded model cannot be compressed; see ``checks``.

    Args:
        model: sharded.
        settings: the user's.
        replicas: see ``compress``.
        optimizers: of the model.
        ranks: all of them.
        cures: what the messages advise.

    Raises:
        ValueError: it cannot.
    """
    checks.check_methods(settings)
    units = units_of(model)
    checks.check_units(model, units, cures)
    checks.check_replicas(replicas, units, ranks.size, cures)
    checks.check_optimizers(optimizers, units)


def compress(model: nn.Module, settings: RunState, replicas: DeviceMesh | None, ranks: Collective) -> Compression:
    """Let a sharded model that was checked average compressed gradients over its replicas. Collective.

    Args:
        model: sharded.
        settings: the user's.
        replicas: the ranks that hold the same shards as this one.
        ranks: all of them.
    """
    assert replicas is not None  # it was checked
    units = units_of(model)
    shards = {id(shard.parameter()): shard for unit in units for shard in unit.trained}
    trained = [shards[id(each)] for each in model.parameters() if id(each) in shards]
    device, column = trained[0].held().device, TorchCollective(replicas.get_group())
    world = World(column, device, Meter(device))
    planned = [each.planned() for each in trained if each.numel]
    settings = settings.bound(kinds_of(model), {each.name: each.shape for each in trained})
    settings = _same(decide(settings, planned, world), ranks, device)
    unused = any(unit.allows_unused for unit in units)

    compression = Compression(trained, settings, column, unused=unused, accumulates=False, everyone=ranks)

    def summarise() -> None:
        compression.run_summary = run_summary(compression.next_settings, planned, world, unit="replica")

    summarise()
    compression.at_load(summarise)
    if column.size > 1 or settings.works_alone:
        register(compression, units, roots_of(model), side_stream(device) if device.type == "cuda" else None)
    return compression


def _same(settings: RunState, ranks: Collective, device: torch.device) -> RunState:
    """Return settings with the choice of ``compressor="auto"`` that sends least of what ranks chose. Collective."""
    if settings.chosen is None:
        return settings
    options = settings.candidates
    place = torch.tensor([options.index(settings.chosen.codec)], dtype=torch.int64, device=device)
    ranks.all_reduce(place, "max")
    return settings.become(dataclasses.replace(settings.chosen, codec=options[int(place)]))
