"""Averages of gradients in their own memory, for steps in which nothing else has to be done."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.core.vector import adjacent


def average_in_place(gradients: Sequence[Tensor], collective: Collective) -> Tensor:
    """Average gradients as DistributedDataParallel does: divide, then sum, in their own dtype and memory.

    Args:
        gradients: one-dimensional, contiguous, of one dtype; each becomes its mean over the ranks. If they are
            neighbours in memory, as in a bucket, they are sent from there without a copy.
        collective: the ranks.

    Returns:
        float32 scalar: 0.0, or NaN if a mean is not finite; the same on all ranks.
    """
    flat = adjacent(gradients)
    whole = flat.whole() if flat else torch.cat(list(gradients))
    collective.all_reduce(whole.div_(collective.size))
    if flat is None:
        torch._foreach_copy_(list(gradients), list(whole.split([each.numel() for each in gradients])))
    lowest, highest = torch.aminmax(whole)
    return (lowest.float() * 0.0 + highest.float() * 0.0).float()


def extremes(gradients: Sequence[Tensor]) -> Tensor:
    """Return the minimum and maximum of each gradient, or of all together; NaN if one is NaN."""
    if not gradients[0].is_cpu and (flat := adjacent(gradients)):  # a launch costs more than a pass
        gradients = [flat.whole()]
    return torch.cat([torch.stack(torch.aminmax(each)) for each in gradients])
