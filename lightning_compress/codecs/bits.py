"""Bits and pieces of messages: packing booleans into bytes, reading them back, and checking what arrives."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements that a loop over a vector handles at a time on a CPU: they fit its caches; half as many cost 10 % more."""


def chunk_size(device: torch.device) -> int:
    """Elements to handle at a time: a cache's worth on a CPU, as many as scratch may hold on an accelerator."""
    return CHUNK if device.type == "cpu" else 1 << 24


_local = threading.local()


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[numel]`` elements of undefined content, which all plans of this thread use in turn under this name.

    A plan takes them when it is made; those made before a larger one keep the memory that they have.
    """
    memory: dict[tuple[str, torch.device], Tensor] = _local.__dict__.setdefault("memory", {})
    if (name, device) not in memory or memory[name, device].numel() < numel:
        memory[name, device] = torch.empty(numel, dtype=dtype, device=device)
    return memory[name, device][:numel]


def pieces(numel: int, size: int) -> Iterator[slice]:
    """Cut ``numel`` elements into runs of ``size``; the last one may be shorter."""
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


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


def check(vector: Tensor, messages: Tensor, numel: int, size: int) -> None:
    """Refuse a vector or messages that are not of this plan.

    Raises:
        ValueError: a length or a dtype is not the plan's, as for a truncated message.
    """
    if vector.shape != (numel,) or vector.dtype != torch.float32:
        raise ValueError(
            f"the vector is {vector.dtype} of shape {tuple(vector.shape)}, but this plan is for float32 of shape "
            f"({numel},); make a plan for its layout"
        )
    if messages.shape[-1] != size or messages.dtype != torch.uint8:
        raise ValueError(
            f"the message is {messages.dtype} with {messages.shape[-1]} bytes, but this plan's messages are uint8 "
            f"with {size} bytes; it is truncated, or was made by a plan for another layout"
        )


@cache
def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


@cache
def _table(device: torch.device) -> Tensor:
    """The eight bits of every byte as float32."""
    values = torch.arange(256, dtype=torch.int32, device=device)
    return ((values.view(-1, 1) >> torch.arange(8, dtype=torch.int32, device=device)) & 1).float()


def code_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take."""
    return -(-count * bits // 8)


def pack_codes(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Pack codes into bytes, the first one lowest; the last byte is filled up with zeros.

    Args:
        codes: whole numbers below ``2^bits``, ``[n]``, contiguous.
        bits: 2 to 16, or 32.
        packed: uint8 ``[ceil(n * bits / 8)]``, contiguous, at a multiple of ``bits / 8`` bytes if that is whole.
    """
    if bits in _WHOLE:
        packed.view(_WHOLE[bits]).copy_(codes)
        return
    count, width = _group(bits)
    columns = torch.nn.functional.pad(codes, (0, -len(codes) % count)).view(-1, count)
    rows = torch.empty(len(columns), width, dtype=torch.uint8, device=codes.device)
    for byte in range(width):
        total = torch.zeros_like(columns[:, 0])
        for code in range(8 * byte // bits, (8 * byte + 7) // bits + 1):
            shift = code * bits - 8 * byte
            total |= columns[:, code] << shift if shift >= 0 else columns[:, code] >> -shift
        rows[:, byte] = total & 0xFF
    packed.copy_(rows.view(-1)[: len(packed)])


def unpack_codes(packed: Tensor, bits: int, codes: Tensor) -> None:
    """Read codes back; see ``pack_codes``."""
    if bits in _WHOLE:
        codes.copy_(packed.view(_WHOLE[bits])).bitwise_and_(2**bits - 1)
        return
    count, width = _group(bits)
    rows = torch.nn.functional.pad(packed, (0, -len(packed) % width)).view(-1, width).to(codes.dtype)
    columns = torch.empty(len(rows), count, dtype=codes.dtype, device=codes.device)
    for code in range(count):
        total = torch.zeros_like(rows[:, 0])
        for byte in range(code * bits // 8, ((code + 1) * bits - 1) // 8 + 1):
            shift = 8 * byte - code * bits
            total |= rows[:, byte] << shift if shift >= 0 else rows[:, byte] >> -shift
        columns[:, code] = total & (2**bits - 1)
    codes.copy_(columns.view(-1)[: len(codes)])


_WHOLE = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def _group(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and these bytes."""
    count = 8 // math.gcd(8, bits)
    return count, count * bits // 8
