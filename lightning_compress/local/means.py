"""Means of the ranks' models as they are, apart from rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.core import failures

_BLOCK = 1 << 20
"""Elements that are averaged at once, where no tensor is larger."""


def mean_of(named: Mapping[str, Tensor], ranks: Collective) -> dict[str, Tensor]:
    """Means over the ranks, in one message a dtype; a collective call.

    Args:
        named: floating-point tensors by name, equal in names, order, shapes and dtypes on all ranks; they stay.
        ranks: in which nothing else is sent at the same time.

    Returns:
        new tensors by name, float32 for those in half precision.

    Raises:
        ExchangeError: a rank is gone or silent.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in named.items():
        by_dtype.setdefault(torch.promote_types(tensor.dtype, torch.float32), []).append(name)
    means: dict[str, Tensor] = {}
    for dtype, names in by_dtype.items():
        own = [named[name].detach() for name in names]
        flat = torch.empty(sum(each.numel() for each in own), dtype=dtype, device=own[0].device)
        parts = flat.split([each.numel() for each in own])
        for name, tensor, part in zip(names, own, parts, strict=True):
            means[name] = part.view(tensor.shape).copy_(tensor)
        with failures.explained(f"averaging {names[0]} and on", ranks.rank):
            ranks.all_reduce(flat)
        flat /= ranks.size
    return means


def means_of(named: Mapping[str, Tensor], ranks: Collective) -> Iterator[tuple[str, Tensor]]:
    """As ``mean_of``, in blocks: no more memory is needed than for a block, or the largest tensor."""
    block: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if block and sum(each.numel() for each in [*block.values(), tensor]) > _BLOCK:
            yield from mean_of(block, ranks).items()
            block = {}
        block[name] = tensor
    yield from mean_of(block, ranks).items()
