"""Packing bits into bytes, and reading them back."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor


def packed_size(count: int) -> int:
    """Bytes that ``count`` bits take."""
    return -(-count // 8)


def pack(bits: Tensor, packed: Tensor) -> None:
    """Pack bits into bytes, the first one lowest; the last byte is filled up with zeros.

    Args:
        bits: bool ``[n]``, contiguous.
        packed: uint8 ``[ceil(n / 8)]``, contiguous, wholly overwritten.
    """
    if bits.device.type == "cpu":
        packed.numpy()[:] = np.packbits(bits.numpy(), bitorder="little")
        return
    rows = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    torch.sum(rows * _powers(bits.device), dim=1, dtype=torch.uint8, out=packed)


def unpack(packed: Tensor, out: Tensor) -> None:
    """Write every bit as 0.0 or 1.0.

    Args:
        packed: uint8 ``[n]``, contiguous.
        out: float32 ``[8 n]``, contiguous.
    """
    table = _table(packed.device)
    if packed.device.type == "cpu":  # twice as fast as index_select, which cannot copy short rows by vectors
        np.take(table.numpy(), packed.numpy(), axis=0, out=out.numpy().reshape(-1, 8), mode="clip")
    else:
        torch.index_select(table, 0, packed.int(), out=out.view(-1, 8))


@cache
def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


@cache
def _table(device: torch.device) -> Tensor:
    """The eight bits of every byte as float32."""
    values = torch.arange(256, dtype=torch.int32, device=device)
    return ((values.view(-1, 1) >> torch.arange(8, dtype=torch.int32, device=device)) & 1).float()
