"""What ``compressor="auto"`` becomes, on all ranks alike, and what a checkpoint keeps of that."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from lightning_compress.codecs import BF16, Codec, Dense
from lightning_compress.collectives import World, consensus
from lightning_compress.exchanges import AllReduce, Exchange, composite
from lightning_compress.exchanges.hierarchical import measured_by, replanned
from lightning_compress.exchanges.nodes import Cluster
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.link import agreed
from lightning_compress.planning.summary import Parameters, label, parts
from lightning_compress.settings.automatic import Automatic, Chosen
from lightning_compress.settings.parsing import build_compressor
from lightning_compress.settings.run_state import RunState


def decide(settings: RunState, parameters: Parameters, world: World, kept: object = None) -> RunState:
    """Let ``compressor="auto"`` become what it chooses; other settings stay as they are. A collective call.

    Args:
        settings: bound to the model.
        parameters: that are trained.
        world: the ranks.
        kept: what an earlier run chose, of ``keep``, which goes on if it was on this cluster.
    """
    if not isinstance(settings.compressor, Automatic):
        return settings
    collective, device, _ = world
    cluster = Cluster.of(collective, device)
    if (earlier := _earlier(settings, kept, cluster, world)) is not None:
        return earlier
    if collective.size == 1:
        return settings.become(Chosen(Dense(), cluster))
    options = settings.candidates
    # half precision is sent as it is, and a cast to as many bits would save nothing
    half = all(parameter.element_size() == 2 for _, parameter in parameters)
    options = [each for each in options if not (half and isinstance(each, BF16))]
    pricing = settings.exchange
    if not isinstance(pricing, Auto):  # one for all, which measures once
        pricing = Auto(node_size=getattr(pricing, "node_size", None))
    priced = [BF16() if half and isinstance(each, Dense) else each for each in options]
    seconds = [_seconds(settings, each, parameters, world, pricing) for each in priced]
    (own,) = agreed([settings.compressor.pick(seconds)], collective, device)
    figures = ", ".join(f"{label(each)} {1e3 * took:.3g} ms" for each, took in zip(options, seconds, strict=True))
    return settings.become(Chosen(options[int(own)], cluster, f"compressor='auto' expects {figures} a step"))


def keep(settings: RunState) -> dict[str, Any] | None:
    """What ``compressor="auto"`` became, for a checkpoint."""
    if settings.chosen is None:
        return None
    return settings.chosen.as_primitives() | {"measured": measured_by(settings.exchange)}


def _earlier(settings: RunState, kept: object, cluster: Cluster, world: World) -> RunState | None:
    """What was chosen by an earlier run, if it was on this cluster and all ranks know it."""
    found, number = None, 0
    try:
        if isinstance(kept, Mapping):
            codec, measured = build_compressor(kept["compressor"]), kept["measured"]
            chosen = Chosen(codec, cluster, "as before") if isinstance(codec, Codec) else None
            if chosen is not None and chosen.was_here(kept) and codec in settings.candidates:
                exchange = replanned(settings.exchange, lambda planner: planner.with_measurements(measured))
                found = dataclasses.replace(settings, exchange=exchange).become(chosen)
                number = 1 + zlib.crc32(repr(kept).encode())
    except (ValueError, TypeError, LookupError, AttributeError):  # a checkpoint may hold anything
        found, number = None, 0
    same = consensus.same(torch.tensor([number], device=world.device), world.collective)
    return found if number and bool(same) else None


def _seconds(settings: RunState, codec: Codec, parameters: Parameters, world: World, pricing: Auto) -> float:
    """What a step's exchanges are predicted to take with this codec."""
    exchange, rules = settings.exchange, dataclasses.replace(settings.rules, method=codec)
    way = exchange if isinstance(exchange, Exchange) else None
    if isinstance(codec, Dense) and settings.optimizing is None:
        way = AllReduce()
    sections = (composite.encoded(rules.sections(part)[1]) for part in parts(parameters))
    return sum(pricing.seconds(each, world, way) for each in sections)
