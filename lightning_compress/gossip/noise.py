"""What codecs leave of a vector, measured before a fit: algorithms of gossip bear so much of it, and no more."""

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
"""Parameters to measure ``carried`` on: about as many of all, and not fewer of a tensor, since codecs send a share."""
WINDOWS = (8, 16, 32, 64, 128, 256, 512)
"""Rounds that are measured together; the next window follows where messages carry less than one window's share."""
LITTLE = 0.002
"""Share of what waits below which ranks would not agree: an absolute threshold that does not suit the model, say."""
HOPELESS = 4.0
"""Times the largest stable step is refused; less is a warning, since models whose steps are sparse bear more."""


@lru_cache(maxsize=16)
def carried(codec: Codec, layout: Layout) -> float:
    """Return the share of what waits that a message carries, in squares, once residuals have settled.

    Normal numbers are added to a residual before each message, as training adds steps. 1 for float32, p for a random
    share p of the elements. The largest 1 % carry 0.06: the first message carries more, later residuals are flat.
    """
    layout = _sample(layout)
    generator, waiting = torch.Generator().manual_seed(0), torch.zeros(layout.numel)
    plan = codec.plan(layout, waiting.device)
    message = torch.zeros(plan.message_size, dtype=torch.uint8)
    share, number = 1.0, 0
    for window in WINDOWS if layout.numel else ():
        before = left = 0.0
        for _ in range(window):
            waiting += torch.randn(layout.numel, generator=generator)
            before += float(squares(waiting))
            plan.share(mix(0, number))
            plan.encode(waiting, message, mix(0, number, 1))
            left += float(squares(waiting))
            number += 1
        share = max(0.0, 1 - left / before)
        if window * share >= 1:  # by now a number was sent about once
            break
    return share


def largest_step(share: float, topology: Topology) -> float:
    """Return how far ranks may move towards their neighbours in a round before their distance grows.

    Let a message carry each element with probability p. An element that waits T rounds moves on, all the while, by what
    was known of it last: it becomes ``1 - step (1 - l) T`` times itself in the graph's mode ``l``. Its mean square
    shrinks while ``step (1 - l) < 2 p / (2 - p)``. Other codecs that carry the same share break there, or later.
    """
    return 2 * share / ((2 - share) * max(1 - topology.least, TOLERANCE))


def fit_step(
    name: str,
    given: float | None,
    most: float,
    part: float,
    start: Tensor,
    neighbours: Neighbours,
    codec: Codec,
    layout: Layout,
) -> float:
    """Return the step towards neighbours to use; a collective call.

    Args:
        name: of algorithm and setting, for messages.
        given: what the user set, or None for ``part`` of the largest step, and ``most`` at most.
        most: see there.
        part: see there.
        start: see ``Algorithm.begin``.
        neighbours: likewise.
        codec: likewise.
        layout: likewise.

    Raises:
        ValueError: the codec carries almost nothing, or the step that was given is ``HOPELESS``; on all ranks.
    """
    graph = neighbours.topology
    told = start.new_tensor([-carried(codec, layout)])
    share = -float(neighbours.greatest(told))  # processors round differently
    bound = largest_step(share, graph)
    found = f"with {codec}, whose messages carry {share:.2%} of what waits to be sent"
    if share < LITTLE:
        raise ValueError(
            f"{name}: ranks would not agree {found}; they must carry {LITTLE:.2%} or more. Take more elements, or "
            "efsign, onebit or topk"
        )
    fitting = min(most, part * bound)
    if given is None:
        return fitting
    bounds = f"on topology {graph.name} of {graph.size} ranks {bound:.3g} is the most that is sure to be stable"
    advice = f"Leave it out for {fitting:.3g}, or take a codec that sends more"
    if given > HOPELESS * bound:
        raise ValueError(f"{name}={given:g} would diverge {found}: {bounds}. {advice}")
    if given > bound and neighbours.rank == 0:
        warnings.warn(f"{name}={given:g} may diverge {found}: {bounds}. {advice}", stacklevel=2)
    return given


def _sample(layout: Layout) -> Layout:
    most = max(LEAST, SAMPLE // max(len(layout.segments), 1))
    parts: list[Segment] = []
    for each in layout.segments:
        start, count = parts[-1].end if parts else 0, min(each.numel, most)
        parts.append(Segment(each.name, each.shape, start, each.start, each.start + count))
    return Layout(tuple(parts))
