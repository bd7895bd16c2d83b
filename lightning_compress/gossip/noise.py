"""How much of a vector a codec's messages carry, measured before a fit; it bounds the step of gossip algorithms."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.core.random import mix
from lightning_compress.core.vector import squares
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import TOLERANCE, Topology

SAMPLE, LEAST = 1 << 20, 1 << 12
"""``carried`` is measured on about ``SAMPLE`` parameters, but at least ``LEAST`` of a tensor: codecs send a share."""
WINDOWS = (8, 16, 32, 64, 128, 256, 512)
"""Rounds of a measurement. The next, longer one follows if a parameter was not sent about once in this one."""
LITTLE = 0.002
"""Smallest share with which ranks agree. ``threshold`` carries less if its steps are too large for the model."""
HOPELESS = 4.0
"""A step above this multiple of the largest stable step is an error. Below, it is a warning: some models bear more."""


@lru_cache(maxsize=16)
def carried(codec: Codec, layout: Layout) -> float:
    """Return the share of the squared residual that a message carries, once residuals have settled; in [0, 1].

    Before each message, normal numbers are added to the residual, as training adds steps. The result is 1 for float32,
    and p for a random share p of the elements. The largest 1 % carry 0.06: the first message carries more, but later
    residuals are flatter.
    """
    layout = _sample(layout)
    generator, waiting = torch.Generator().manual_seed(0), torch.zeros(layout.numel, dtype=torch.float32)
    plan = codec.plan(layout, waiting.device)
    message = torch.zeros(plan.message_size, dtype=torch.uint8)
    share, number = 1.0, 0
    for window in WINDOWS if layout.numel else ():
        before = left = 0.0
        for _ in range(window):
            waiting += torch.randn(layout.numel, dtype=torch.float32, generator=generator)
            before += float(squares(waiting))
            plan.share(mix(0, number))
            plan.encode(waiting, message, mix(0, number, 1))
            left += float(squares(waiting))
            number += 1
        share = max(0.0, 1 - left / before)
        if window * share >= 1:  # each number was sent about once
            break
    return share


def largest_step(share: float, topology: Topology) -> float:
    """Return the largest step towards the neighbours in a round that does not make ranks drift apart.

    Let a message carry each element with probability p. While an element waits T rounds, it keeps moving by the value
    that was sent last, so in the graph's mode ``l`` it is multiplied by ``1 - step (1 - l) T``. Its mean square shrinks
    if ``step (1 - l) < 2 p / (2 - p)``. Other codecs that carry the same share diverge there, or later.
    """
    return 2 * share / ((2 - share) * max(1 - topology.least, TOLERANCE))


def fit_step(
    name: str,
    user_step: float | None,
    most: float,
    part: float,
    start: Tensor,
    neighbours: Neighbours,
    codec: Codec,
    layout: Layout,
) -> float:
    """Return the step towards the neighbours to use. Collective: every rank must call it.

    Args:
        name: of algorithm and setting, for messages.
        user_step: the user's step; None for ``part`` of the largest step, but not more than ``most``.
        most: see ``user_step``.
        part: see ``user_step``.
        start: see ``Algorithm.begin``.
        neighbours: see ``Algorithm.begin``.
        codec: of the messages.
        layout: see ``Algorithm.begin``.

    Raises:
        ValueError: the codec carries almost nothing, or the user's step is ``HOPELESS``; on all ranks.
    """
    graph = neighbours.topology
    share = -float(neighbours.greatest(start.new_tensor([-carried(codec, layout)])))  # processors round differently
    bound = largest_step(share, graph)
    how = f"with {codec}, whose messages carry {share:.2%} of what waits to be sent"
    if share < LITTLE:
        raise ValueError(
            f"{name}: ranks would not agree {how}; they must carry {LITTLE:.2%} or more. Send more elements, or use "
            "efsign, onebit or topk"
        )
    fitting = min(most, part * bound)
    if user_step is None:
        return fitting
    bounds = f"on topology {graph.name} of {graph.size} ranks {bound:.3g} is the largest value known to be stable"
    advice = f"Leave it out to use {fitting:.3g}, or take a codec that sends more"
    if user_step > HOPELESS * bound:
        raise ValueError(f"{name}={user_step:g} would diverge {how}: {bounds}. {advice}")
    if user_step > bound and neighbours.rank == 0:
        warnings.warn(f"{name}={user_step:g} may diverge {how}: {bounds}. {advice}", stacklevel=2)
    return user_step


def _sample(layout: Layout) -> Layout:
    most = max(LEAST, SAMPLE // max(len(layout.segments), 1))
    parts: list[Segment] = []
    for each in layout.segments:
        start, count = parts[-1].end if parts else 0, min(each.numel, most)
        parts.append(Segment(each.name, each.shape, start, each.start, each.start + count))
    return Layout(tuple(parts))
