"""What ``compressor="auto"`` chooses, equal on all ranks, and what a checkpoint keeps of it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_compress.codecs import BF16, Codec, Dense
from lightning_compress.collectives import Collective, World, consensus
from lightning_compress.exchanges import AllReduce, Exchange, composite
from lightning_compress.exchanges.hierarchical import measured_by, replanned
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.nodes import Cluster
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.link import agreed
from lightning_compress.planning.summary import Parameters, label, parts
from lightning_compress.settings.automatic import Automatic, Chosen
from lightning_compress.settings.parsing import build_compressor, written
from lightning_compress.settings.run_state import RunState


def decide(settings: RunState, parameters: Parameters, world: World, kept: object = None) -> RunState:
    """Return settings with ``compressor="auto"`` replaced by its choice; other settings are returned unchanged.

    Collective.

    Args:
        settings: bound to the model.
        parameters: the trained parameters.
        world: the ranks.
        kept: an earlier run's choice, as ``keep`` returned it. It is used again on the same cluster.
    """
    if not isinstance(settings.compressor, Automatic):
        return settings
    collective, device, _ = world
    cluster = Cluster.of(collective, device)
    if (earlier := _earlier(settings, kept, cluster, world)) is not None:
        return earlier
    if collective.size == 1:
        return settings.become(Chosen(Dense(), cluster))
    options = _everywhere(settings.candidates, world)
    # half-precision gradients travel uncompressed, and a cast to as many bits saves nothing
    half = all(parameter.element_size() == 2 for _, parameter in parameters)
    options = [each for each in options if not (half and isinstance(each, BF16))]
    pricing = settings.exchange
    if not isinstance(pricing, Auto):  # one planner for all prices, so that it measures once
        pricing = Auto(node_size=getattr(pricing, "node_size", None))
    if pricing.link is None and device.type == "cpu" and on_one_machine(collective, device):
        return settings.become(Chosen(Dense(), cluster, reason="all ranks are on this machine"))
    priced = [BF16() if half and isinstance(each, Dense) else each for each in options]
    vectors = [list(_vectors(settings, each, parameters)) for each in priced]
    for sections in itertools.chain(*vectors):
        pricing.measure(sections, world)
    steady = pricing.rounded()  # equal runs on equal links decide alike
    seconds = [
        sum(steady.offer(sections, world, _way(settings, codec)).seconds for sections in each)
        for codec, each in zip(priced, vectors, strict=True)
    ]
    (chosen,) = agreed([settings.compressor.pick(seconds, options)], collective, device)
    named = ["float32" if isinstance(each, Dense) else label(each) for each in options]
    figures = ", ".join(f"{name} {1e3 * took:.3g} ms" for name, took in zip(named, seconds, strict=True))
    codec = options[int(chosen)]
    keeps = f"to keep this choice, write compressor={written(codec)}"
    return settings.become(Chosen(codec, cluster, f"auto predicts for an average: {figures}; {keeps}"))


def _everywhere(codecs: list[Codec], world: World) -> list[Codec]:
    """Return the codecs that run on all ranks. Collective."""
    missing = torch.tensor([not each.runs_on(world.device) for each in codecs], dtype=torch.int64, device=world.device)
    world.collective.all_reduce(missing, "max")
    return [each for each, absent in zip(codecs, missing.tolist(), strict=True) if not absent]


def on_one_machine(collective: Collective, device: torch.device) -> bool:
    """Return whether all ranks have one host name and one network, so that no message leaves the machine. Collective.

    Containers on one host may have networks of their own, over which messages travel as between hosts.
    """
    network = Path("/proc/self/ns/net")
    name = f"{socket.gethostname()} {os.readlink(network) if network.is_symlink() else ''}"
    place = torch.tensor([zlib.crc32(name.encode())], dtype=torch.int64, device=device)
    return bool(consensus.same(place, collective))


def keep(settings: RunState) -> dict[str, Any] | None:
    """Return the choice of ``compressor="auto"`` for a checkpoint, as primitives; None for other compressors."""
    if settings.chosen is None:
        return None
    return settings.chosen.as_primitives() | {"measured": measured_by(settings.exchange)}


def _earlier(settings: RunState, kept: object, cluster: Cluster, world: World) -> RunState | None:
    """Return an earlier run's choice if it was made on this cluster and all ranks have it."""
    resumed, checksum = None, 0
    try:
        if isinstance(kept, Mapping):
            codec, measured = build_compressor(kept["compressor"]), kept["measured"]
            chosen = Chosen(codec, cluster, "as before") if isinstance(codec, Codec) else None
            if chosen is not None and chosen.was_here(kept) and codec in settings.candidates:
                exchange = replanned(settings.exchange, lambda planner: planner.with_measurements(measured))
                resumed = dataclasses.replace(settings, exchange=exchange).become(chosen)
                checksum = 1 + zlib.crc32(repr(kept).encode())
    except (ValueError, TypeError, LookupError, AttributeError):  # a checkpoint may hold anything
        resumed, checksum = None, 0
    same = consensus.same(torch.tensor([checksum], dtype=torch.int64, device=world.device), world.collective)
    return resumed if checksum and bool(same) else None


def _vectors(settings: RunState, codec: Codec, parameters: Parameters) -> Iterator[list[Section]]:
    """Yield the sections of the vectors that a step exchanges with this codec."""
    rules = dataclasses.replace(settings.rules, method=codec)
    for part in parts(parameters):
        yield composite.codec_sections(rules.sections(part)[1])


def _way(settings: RunState, codec: Codec) -> Exchange | None:
    """Return the exchange that the user named, or None."""
    if isinstance(codec, Dense) and settings.optimizing is None:
        return AllReduce()
    return settings.exchange if isinstance(settings.exchange, Exchange) else None
