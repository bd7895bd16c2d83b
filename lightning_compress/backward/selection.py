"""Which outputs of a layer take part in its backward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Amount = int | float
"""How many outputs are kept: a whole number of them, or a fraction in (0, 1]."""
BLOCK = (1 << 15) - 1
"""Elements that are summed at a time on a CPU: what torch gives to one thread. Where threads of other programs are in
the way, each operation on several threads may wait milliseconds for the last of them."""


def check_amount(amount: object, where: str) -> Amount:
    """A count or a fraction, or an error.

    Args:
        amount: what the user gave. ``1`` is one output, ``1.0`` is all of them.
        where: what it is called, such as ``k``.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(amount, int) and not isinstance(amount, bool) and amount > 0:
        return amount
    if isinstance(amount, float) and 0 < amount <= 1:
        return amount
    raise ValueError(
        f"{where}={amount!r} must be a whole number of outputs, 1 or more, or a fraction above 0.0 and at most 1.0"
    )


def count_of(amount: Amount, width: int, where: str) -> int:
    """How many of ``width`` outputs ``amount`` is; a fraction is rounded, to 1 at least.

    Raises:
        ValueError: it is none, or more than there are.
    """
    count = amount if isinstance(amount, int) else max(1, math.floor(amount * width + 0.5))
    if not 1 <= count <= width:
        raise ValueError(f"{where}: k={amount!r} must be from 1 to its width, {width}; or give a fraction such as 0.05")
    return count


def over_rows(gradient: Tensor) -> list[int]:
    """All dimensions but that of the outputs, which is the second."""
    return [0, *range(2, gradient.ndim)]


def scores(gradient: Tensor) -> Tensor:
    """The first of ``sums``."""
    return sums(gradient, signed=False)[0]


def sums(gradient: Tensor, signed: bool) -> tuple[Tensor, Tensor | None]:
    """How much each output matters to a minibatch, the sum of absolute values over its rows; and the plain sum.

    Args:
        gradient: ``[rows, width]``, or ``[batch, width, ...]`` of images.
        signed: whether the plain sum is wanted.

    Returns:
        ``[width]`` each, in float32 for 16-bit gradients; None for the second unless it is wanted.
    """
    over = over_rows(gradient)
    wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
    if gradient.device.type != "cpu" or torch.compiler.is_compiling() or gradient.numel() <= BLOCK:
        plain = gradient.sum(over, dtype=wide) if signed else None
        return gradient.abs().sum(over, dtype=wide), plain
    rows = max(1, BLOCK * len(gradient) // gradient.numel())
    absolute = torch.empty_like(gradient[:rows])  # stays in the cache: a new tensor of full size costs more than sums
    score = gradient.new_zeros(gradient.shape[1], dtype=wide)
    total = torch.zeros_like(score) if signed else None
    for part in gradient.split(rows):
        score += torch.abs(part, out=absolute[: len(part)]).sum(over, dtype=wide)
        if total is not None:
            total += part.sum(over, dtype=wide)
    return score, total


def top(score: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest, ascending; of equal ones the first, and what is not a number before all others.

    Args:
        score: ``[width]``, or ``[several, width]``, of each of which ``k`` are chosen.
        k: from 1 to the width.

    Returns:
        int64, ``[k]`` or ``[several, k]``.
    """
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values


def kept_of_each(gradient: Tensor, k: int) -> Tensor:
    """The gradient with only the ``k`` largest magnitudes of each row left; of equal ones the first.

    Args:
        gradient: ``[rows, width]``.
        k: from 1 to the width.
    """
    index = top(gradient.abs(), k)
    return torch.zeros_like(gradient).scatter_(1, index, gradient.gather(1, index))


def touched(kept: Tensor) -> Tensor:
    """Columns in which any row has something, ascending."""
    return (kept != 0).any(0).nonzero().flatten()
