"""Packing of codes of a few bits into planes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress.core.workspace import scratch


def planes(bits: int) -> list[tuple[int, int]]:
    """Return the planes of codes of ``bits`` bits: pairs (position of the plane's lowest bit in a code, its width).

    A plane holds 32, 16, 8, 4, 2 or 1 bits of every code, so whole vectors of codes are packed at a time. 5 bits are a
    plane of 4 bits and one of 1 bit; 10 bits are a plane of 8 and one of 2.
    """
    widths = [width for width in (32, 16, 8, 4, 2, 1) if bits & width]
    return [(sum(widths[:index]), width) for index, width in enumerate(widths)]


def code_bytes(count: int, bits: int) -> int:
    """Return the bytes of ``count`` codes of ``bits`` bits: ``ceil(count * width / 8)`` for each plane."""
    return sum(-(-count * width // 8) for _, width in planes(bits))


def code_dtype(bits: int) -> torch.dtype:
    """Return the dtype of unpacked codes: uint8 up to 8 bits, int32 up to 16, int64 for 32."""
    return torch.uint8 if bits <= 8 else torch.int32 if bits <= 16 else torch.int64


class Planes:
    """Writes and reads a message's codes plane by plane, the lowest bits first, the first code lowest in each byte.

    Args:
        bits: bits of a code, 1 to 16, or 32.
        count: number of codes in the message.

    Attributes:
        size: bytes of the codes, ``code_bytes(count, bits)``.
        table: of each plane the lowest bit, the width, and the first byte: int64 ``[planes, 3]``.
    """

    def __init__(self, bits: int, count: int) -> None:
        self.size = code_bytes(count, bits)
        self._low: list[tuple[int, int, int]] = []
        self._high: list[tuple[int, int, int]] = []
        start, rows = 0, []
        for low, width in planes(bits):
            rows.append((low, width, start))
            (self._high if low >= 8 else self._low).append((low % 8, width, start))
            start += code_bytes(count, width)
        self.table = np.array(rows, np.int64)

    def write(self, codes: Tensor, elements: slice, body: Tensor) -> None:
        """Pack codes.

        Args:
            codes: ``code_dtype`` ``[number of elements, rounded up to a multiple of 8]``, contiguous, below ``2^bits``.
                The codes added by rounding up are 0.
            elements: slice of the message's codes; starts at a multiple of 8.
            body: uint8 ``[size]``, contiguous. The bytes of these codes are overwritten.
        """
        for low, width, offset in self._low:
            pack_plane(codes, low, width, body[_place(elements, width, offset)])
        if self._high:
            shifted = scratch("code words", len(codes), codes.dtype, codes.device)
            high = scratch("code bytes", len(codes), torch.uint8, codes.device)
            high.copy_(torch.bitwise_right_shift(codes, 8, out=shifted))
            for low, width, offset in self._high:
                pack_plane(high, low, width, body[_place(elements, width, offset)])

    def read(self, codes: Tensor, elements: slice, body: Tensor) -> None:
        """Read codes; those added by rounding up are undefined. See ``write``."""
        for low, width, offset in self._low:
            unpack_plane(body[_place(elements, width, offset)], low, width, codes)
        if self._high:
            shifted = scratch("code words", len(codes), codes.dtype, codes.device)
            high = scratch("code bytes", len(codes), torch.uint8, codes.device)
            for low, width, offset in self._high:
                unpack_plane(body[_place(elements, width, offset)], low, width, high)
            codes.add_(shifted.copy_(high), alpha=256)

    def places(self, first: int) -> npt.NDArray[np.int64]:
        """Return what kernels need: the bits of a code, at most 8, and where the planes of 4 or 8, 2 and 1 bits begin.

        Args:
            first: the code at whose byte each plane is to begin; a multiple of 8.
        """
        starts = {min(width, 4): start + first * width // 8 for _, width, start in self._low}
        bits = sum(width for _, width, _ in self._low)
        return np.array([bits, *(starts.get(width, 0) for width in (4, 2, 1))])


def pack_codes(codes: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Return the bytes, uint8 ``[code_bytes(n, bits)]``, of n codes below ``2^bits``; ``bits`` is 0 to 16."""
    planes, rounded = Planes(bits, len(codes)), -(-len(codes) // 8) * 8
    packed, padded = torch.empty(planes.size, dtype=torch.uint8), torch.zeros(rounded, dtype=code_dtype(bits))
    padded[: len(codes)] = torch.from_numpy(codes)
    planes.write(padded, slice(0, len(codes)), packed)
    return packed.numpy()


def unpack_codes(packed: npt.NDArray[np.uint8], count: int, bits: int) -> npt.NDArray[Any]:
    """Return the ``count`` codes that ``pack_codes`` packed."""
    codes = torch.zeros(-(-count // 8) * 8, dtype=code_dtype(bits))
    if count:
        Planes(bits, count).read(codes, slice(0, count), torch.from_numpy(packed.copy()))
    return codes[:count].numpy()


def pack_plane(codes: Tensor, low: int, width: int, packed: Tensor) -> None:
    """Pack the bits ``low`` to ``low + width - 1`` of every code, the first code lowest.

    Args:
        codes: ``[n]``, contiguous, n a multiple of 8; uint8 if the width is below 8.
        low: the lowest bit of the plane; 0 for a width of 8, 16 or 32.
        width: 1, 2, 4, 8, 16 or 32.
        packed: uint8 ``[at most code_bytes(n, width)]``, overwritten; aligned to the width's bytes.
    """
    if width in _WORDS:
        words = packed if width == 8 else packed.view(_WORDS[width])
        if len(words) < len(codes):
            codes = codes[: len(words)]
        words.copy_(codes)
    elif codes.device.type == "cpu":  # a lane holds the codes of one byte; it is folded in halves
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
    """Write a plane's bits into the codes. The plane with ``low`` 0 overwrites the codes; the others add to them.

    Args:
        packed: uint8 ``[at most code_bytes(n, width)]``. Codes beyond it become 0, or keep the bits of other planes.
        low: position of the plane's lowest bit in a code.
        width: 1, 2, 4, 8, 16 or 32.
        codes: ``[n]``, contiguous, n a multiple of 8; uint8 if the width is below 8.
    """
    if width in _WORDS:
        words = packed.view(_WORDS[width])
        codes[: len(words)] = words
        if width > 8:  # these words are signed, codes are not
            codes.bitwise_and_(2**width - 1)
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
    """Do ``pack_plane`` of widths below 8 in torch, for accelerators."""
    rows = ((codes >> low) & (2**width - 1)).view(-1, 8 // width)
    packed.copy_((rows << _positions(width, codes.device)).sum(dim=1, dtype=torch.uint8)[: len(packed)])


def unpack_plane_torch(packed: Tensor, low: int, width: int, codes: Tensor) -> None:
    """Do ``unpack_plane`` of widths below 8 in torch, for accelerators."""
    rows = torch.nn.functional.pad(packed, (0, code_bytes(len(codes), width) - len(packed)))
    bits = ((rows.view(-1, 1) >> _positions(width, codes.device)) & (2**width - 1)) << low
    codes.copy_(bits.view(-1) if low == 0 else codes | bits.view(-1))


_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def _place(elements: slice, width: int, offset: int) -> slice:
    return slice(offset + elements.start * width // 8, offset + code_bytes(elements.stop, width))


@cache
def _lanes(width: int) -> tuple[np.dtype[Any], list[tuple[Any, Any]]]:
    """Return the type of a lane (the codes of one byte), and ``(shift, mask before it)`` of each fold in order."""
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
