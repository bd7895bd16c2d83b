"""Packing of bits into bytes, and reading of a message's bytes."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]


def packed_size(count: int) -> int:
    """Return the number of bytes that ``count`` bits take."""
    return -(-count // 8)


def block_shape(numel: int, block: int) -> tuple[int, int]:
    """Return the length of a block and the number of blocks of a vector.

    A vector that is shorter than ``block`` is one block, whose length is rounded up to a multiple of 8.
    """
    width = min(block, 8 * packed_size(max(1, numel)))
    return width, -(-numel // width)


def pack(bits: Tensor, packed: Tensor) -> None:
    """Pack bits into bytes, the first bit lowest. The last byte is filled up with zeros.

    Args:
        bits: bool ``[n]``, contiguous.
        packed: uint8 ``[ceil(n / 8)]``, contiguous, overwritten.
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
    if packed.device.type == "cpu":  # twice as fast as index_select, which copies short rows one element at a time
        np.take(table.numpy(), packed.numpy(), axis=0, out=out.numpy().reshape(-1, 8), mode="clip")
    else:
        torch.index_select(table, 0, packed.int(), out=out.view(-1, 8))


def damaged(problem: str) -> ValueError:
    """Return the error for a message that no ``encode`` of the plan writes."""
    return ValueError(f"the message is truncated, damaged, or of another layout: {problem}")


def prefix(body: Bytes, size: int, content: str) -> Bytes:
    """Return the first ``size`` bytes.

    Args:
        body: uint8, the rest of a message.
        size: number of bytes.
        content: what these bytes are, in the plural, for the error.

    Raises:
        ValueError: there are fewer bytes.
    """
    if size > len(body):
        raise damaged(f"{content} take {size} bytes, but only {len(body)} are left")
    return body[:size]


@cache
def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


@cache
def _table(device: torch.device) -> Tensor:
    """Return the eight bits of every byte: float32 ``[256, 8]``."""
    values = torch.arange(256, dtype=torch.int32, device=device)
    return ((values.view(-1, 1) >> torch.arange(8, dtype=torch.int32, device=device)) & 1).float()
