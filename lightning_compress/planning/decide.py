"""What ``compressor="auto"`` chooses, equal on all ranks, and what a checkpoint keeps of it."""

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
    options = settings.candidates
    # half-precision gradients travel uncompressed, and a cast to as many bits saves nothing
    half = all(parameter.element_size() == 2 for _, parameter in parameters)
    options = [each for each in options if not (half and isinstance(each, BF16))]
    pricing = settings.exchange
    if not isinstance(pricing, Auto):  # one planner for all prices, so that it measures once
        pricing = Auto(node_size=getattr(pricing, "node_size", None))
    priced = [BF16() if half and isinstance(each, Dense) else each for each in options]
    seconds = [_seconds(settings, each, parameters, world, pricing) for each in priced]
    (chosen,) = agreed([settings.compressor.pick(seconds)], collective, device)
    figures = ", ".join(f"{label(each)} {1e3 * took:.3g} ms" for each, took in zip(options, seconds, strict=True))
    return settings.become(Chosen(options[int(chosen)], cluster, f"compressor='auto' expects {figures} a step"))


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
    same = consensus.same(torch.tensor([checksum], device=world.device), world.collective)
    return resumed if checksum and bool(same) else None


def _seconds(settings: RunState, codec: Codec, parameters: Parameters, world: World, pricing: Auto) -> float:
    """Return the predicted seconds of a step's exchanges with this codec."""
    exchange, rules = settings.exchange, dataclasses.replace(settings.rules, method=codec)
    way = exchange if isinstance(exchange, Exchange) else None
    if isinstance(codec, Dense) and settings.optimizing is None:
        way = AllReduce()
    sections = (composite.codec_sections(rules.sections(part)[1]) for part in parts(parameters))
    return sum(pricing.seconds(each, world, way) for each in sections)
