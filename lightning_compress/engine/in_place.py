"""Averages of gradients where they are, in steps in which there is nothing but that to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_compress.collectives import Collective


def average_in_place(gradients: Sequence[Tensor], collective: Collective) -> Tensor:
    """What DistributedDataParallel does: divide, then add up, in the gradients' own dtype and memory.

    Args:
        gradients: one-dimensional, contiguous, of one dtype; each becomes its mean over the ranks. Those of a bucket
            stand side by side in memory, and travel from there.
        collective: the ranks.

    Returns:
        float32 scalar: 0.0, or NaN where a mean is not finite; the same on all ranks.
    """
    flat = _side_by_side(gradients)
    whole = torch.cat(list(gradients)) if flat is None else flat
    collective.all_reduce(whole.div_(collective.size))
    if flat is None:
        torch._foreach_copy_(list(gradients), list(whole.split([each.numel() for each in gradients])))
    lowest, highest = torch.aminmax(whole)
    return (lowest.float() * 0.0 + highest.float() * 0.0).float()


def extremes(gradients: Sequence[Tensor]) -> Tensor:
    """The least and the largest number of each, or of all; NaN where there is one."""
    if not gradients[0].is_cpu and (flat := _side_by_side(gradients)) is not None:  # a launch costs more than a pass
        gradients = [flat]
    return torch.cat([torch.stack(torch.aminmax(each)) for each in gradients])


def _side_by_side(gradients: Sequence[Tensor]) -> Tensor | None:
    """One tensor of them all, if they follow one another in memory, in whatever order."""
    parts = sorted(gradients, key=lambda each: each.data_ptr())
    first = parts[0]
    together = all(one.data_ptr() + one.nbytes == two.data_ptr() for one, two in pairwise(parts))
    shared = all(each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for each in parts)
    if not together or not shared:
        return None
    return first.as_strided((sum(each.numel() for each in parts),), (1,))
