"""Operations on sparse vectors with ascending indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.exchanges.sparse.coding import SparseVector


def united(parts: Sequence[SparseVector]) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the union of the indices, and the position of each list's indices in it. None means all, in order."""
    numel = parts[0].numel
    if any(part.indices is None for part in parts):
        return None, [part.indices for part in parts]
    marks = torch.zeros(numel, dtype=torch.bool, device=parts[0].values.device)
    for part in parts:
        marks[part.indices] = True
    indices = marks.nonzero().flatten()
    if len(indices) == numel:
        return None, [part.indices for part in parts]
    return indices, [torch.searchsorted(indices, part.indices) for part in parts if part.indices is not None]


def added(values: Sequence[Tensor], positions: Sequence[Tensor | None], count: int) -> Tensor:
    """Return ``[count]`` sums of the values at their positions, added in the order of the lists."""
    total = values[0].new_zeros(count)
    for each, where in zip(values, positions, strict=True):
        if where is None:
            total.add_(each)
        else:
            total.index_add_(0, where, each)
    return total


def joined(parts: Sequence[SparseVector]) -> SparseVector:
    """Return the lists of consecutive stretches as one list."""
    values, numel = torch.cat([part.values for part in parts]), sum(part.numel for part in parts)
    if all(part.indices is None for part in parts):
        return SparseVector(numel, None, values)
    indices, start = [], 0
    for part in parts:
        indices.append(part.listed + start)
        start += part.numel
    return SparseVector(numel, torch.cat(indices), values)


def spread(numbers: SparseVector, out: Tensor) -> None:
    """Write all numbers of the stretch, including zeros."""
    if numbers.indices is None:
        out.copy_(numbers.values)
    else:
        out.zero_()
        out[numbers.indices] = numbers.values
