"""Rows in a message, and out of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.backward.sufficient_factors.linear import Rows

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""In which rows may travel, by their number."""


def dtype_of(rows: Rows, rounded: bool) -> torch.dtype | None:
    """What holds all of them, halved if ``rounded``; None: there are none."""
    dtype: torch.dtype | None = None
    for each in (tensor for pair in rows for tensor in pair):
        dtype = each.dtype if dtype is None else torch.promote_types(dtype, each.dtype)
    return torch.bfloat16 if rounded and dtype in (torch.float32, torch.float64) else dtype


def count(rows: Rows) -> int:
    """How many there are."""
    return sum(len(inputs) for inputs, _ in rows)


def pack(rows: Rows, capacity: int, inner: int, outer: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A message ``[capacity * (inner + outer)]``: inputs, then output gradients, each padded with zeros."""
    message = torch.empty(capacity * (inner + outer), dtype=dtype, device=device)
    for place, (part, width) in enumerate(
        zip(message.split([capacity * inner, capacity * outer]), (inner, outer), strict=True)
    ):
        filled = 0
        for pair in rows:
            part[filled : filled + pair[place].numel()].view(-1, width).copy_(pair[place])
            filled += pair[place].numel()
        part[filled:].zero_()
    return message


def unpack(messages: Tensor, counts: Sequence[int], inner: int, outer: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[sum of counts, inner]`` and output gradients ``[sum of counts, outer]``, in the order of the ranks.

    Args:
        messages: ``[P, capacity * (inner + outer)]``.
        counts: rows of each.
        inner: N.
        outer: M.
    """
    border = max(counts) * inner
    pairs = list(zip(messages, counts, strict=True))
    inputs = torch.cat([message[: rows * inner].view(rows, inner) for message, rows in pairs])
    gradients = torch.cat([message[border : border + rows * outer].view(rows, outer) for message, rows in pairs])
    return inputs, gradients
