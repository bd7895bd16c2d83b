"""Sums and means over the ranks of many tensors in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.collectives.collective import Collective
from lightning_compress.core import errors


def sums_of(parts: Sequence[Tensor], ranks: Collective, dtype: torch.dtype) -> list[Tensor]:
    """Sum tensors over the ranks, in one message; a collective call.

    Args:
        parts: at least one, on one device, equal in number and shapes on all ranks; not changed.
        ranks: a collective without other messages at the same time.
        dtype: of the sums.

    Returns:
        new tensors of this dtype, in the shapes of the parts.
    """
    sizes = [each.numel() for each in parts]
    flat = torch.empty(sum(sizes), dtype=dtype, device=parts[0].device)
    views = [view.view(part.shape).copy_(part) for view, part in zip(flat.split(sizes), parts, strict=True)]
    ranks.all_reduce(flat)
    return views


def mean_of(named: Mapping[str, Tensor], ranks: Collective, doing: str = "averaging models") -> dict[str, Tensor]:
    """Average tensors over the ranks, in one message per dtype; a collective call.

    Args:
        named: floating-point tensors by name, equal in names, order, shapes and dtypes on all ranks; not changed.
        ranks: a collective without other messages at the same time.
        doing: what it is for, in the message if a rank is gone.

    Returns:
        new tensors by name, in float32 for tensors in half precision.

    Raises:
        ExchangeError: a rank is gone or silent.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in named.items():
        by_dtype.setdefault(torch.promote_types(tensor.dtype, torch.float32), []).append(name)
    means: dict[str, Tensor] = {}
    for dtype, names in by_dtype.items():
        with errors.explained(doing, ranks.rank):
            sums = sums_of([named[name].detach() for name in names], ranks, dtype)
        means |= {name: each.div_(ranks.size) for name, each in zip(names, sums, strict=True)}
    return means
