"""Bits and pieces of messages: packing bits and small numbers into bytes, reading them back, checking what arrives."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

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


def planes(bits: int) -> list[tuple[int, int]]:
    """The planes that codes of ``bits`` bits are stored in: ``(position of the lowest bit, bits of a code)``.

    A plane holds 8, 4, 2 or 1 bits of every code, so that its bytes can be made by whole vectors of them: 5 bits are
    a plane of 4 and a plane of 1.
    """
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return [(sum(widths[:number]), width) for number, width in enumerate(widths)]


def code_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take."""
    return -(-count * bits // 8)


def pack_plane(codes: Tensor, low: int, width: int, packed: Tensor) -> None:
    """Pack bits ``low`` to ``low + width - 1`` of every code, the first code lowest.

    Args:
        codes: uint8 ``[n]``, contiguous, n a multiple of 8.
        low: the lowest bit to take.
        width: 1, 2, 4 or 8 (then ``low`` is 0).
        packed: uint8 ``[at most code_bytes(n, width)]``, wholly overwritten.
    """
    if width == 8:
        packed.copy_(codes[: len(packed)])
    elif codes.device.type == "cpu":  # lanes of as many codes as a byte will hold, folded in halves
        kind, folds = _lanes(width)
        source = codes.numpy().view(kind)
        lanes, shifted = (
            scratch(name, len(codes), torch.uint8, codes.device).numpy().view(kind) for name in ("lanes", "shifted")
        )
        np.right_shift(source, kind.type(low), out=lanes)
        np.bitwise_and(lanes, folds[0][1], out=lanes)
        for shift, _ in folds:
            np.bitwise_or(lanes, np.right_shift(lanes, shift, out=shifted), out=lanes)
        np.copyto(packed.numpy(), lanes[: len(packed)], casting="unsafe")
    else:
        pack_plane_torch(codes, low, width, packed)


def unpack_plane(packed: Tensor, low: int, width: int, codes: Tensor) -> None:
    """Put a plane back into the codes; the plane at 0 overwrites all of a code, others add to it.

    Args:
        packed: uint8 ``[at most code_bytes(n, width)]``; the codes beyond it become 0, or stay.
        low: where the plane's bits stand in a code.
        width: bits of a code that are in the plane.
        codes: uint8 ``[n]``, contiguous, n a multiple of 8.
    """
    if width == 8:
        codes[: len(packed)] = packed
    elif codes.device.type == "cpu":
        kind, folds = _lanes(width)
        lanes, shifted = (
            scratch(name, len(codes), torch.uint8, codes.device).numpy().view(kind) for name in ("lanes", "shifted")
        )
        if low == 0:
            lanes = codes.numpy().view(kind)
        np.copyto(lanes[: len(packed)], packed.numpy(), casting="unsafe")
        lanes[len(packed) :] = 0
        for shift, mask in reversed(folds):
            np.bitwise_or(lanes, np.left_shift(lanes, shift, out=shifted), out=lanes)
            np.bitwise_and(lanes, mask, out=lanes)
        if low:
            target = codes.numpy().view(kind)
            np.bitwise_or(target, np.left_shift(lanes, kind.type(low), out=lanes), out=target)
    else:
        unpack_plane_torch(packed, low, width, codes)


def pack_plane_torch(codes: Tensor, low: int, width: int, packed: Tensor) -> None:
    """``pack_plane`` by torch alone, for accelerators."""
    rows = ((codes >> low) & (2**width - 1)).view(-1, 8 // width)
    packed.copy_((rows << _positions(width, codes.device)).sum(dim=1, dtype=torch.uint8)[: len(packed)])


def unpack_plane_torch(packed: Tensor, low: int, width: int, codes: Tensor) -> None:
    """``unpack_plane`` by torch alone, for accelerators."""
    rows = torch.nn.functional.pad(packed, (0, code_bytes(len(codes), width) - len(packed)))
    bits = ((rows.view(-1, 1) >> _positions(width, codes.device)) & (2**width - 1)) << low
    codes.copy_(bits.view(-1) if low == 0 else codes | bits.view(-1))


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
def _lanes(width: int) -> tuple[np.dtype[Any], list[tuple[Any, Any]]]:
    """The lane type whose codes make one byte, and ``(shift, mask before it)`` of each fold, smallest first."""
    kind = np.dtype(f"u{8 // width}")
    bits = 8 * kind.itemsize
    folds, group = [], 1
    while width * group < 8:
        mask = sum((2 ** (width * group) - 1) << start for start in range(0, bits, 8 * group))
        folds.append((kind.type((8 - width) * group), kind.type(mask)))
        group *= 2
    return kind, folds


@cache
def _positions(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)


@cache
def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


@cache
def _table(device: torch.device) -> Tensor:
    """The eight bits of every byte as float32."""
    values = torch.arange(256, dtype=torch.int32, device=device)
    return ((values.view(-1, 1) >> torch.arange(8, dtype=torch.int32, device=device)) & 1).float()


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
