"""Encoding and decoding of floats of N bits over a range; see ``formats.py``."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.packing.planes import code_dtype
from lightning_compress.codecs.quantize.formats import Formats, build
from lightning_compress.core.workspace import scratch

MAGNITUDE = 0x7FFFFFFF
"""All bits of a float32 but its sign."""


class Coder:
    """Encodes and decodes up to ``most`` values at a time, in scratch memory.

    Codes are computed in ``code_dtype(bits)``, mostly uint8: a vector register holds four times as many as int32.

    Args:
        bits: bits of a code.
        most: largest number of values at a time.
        device: device of the values.
    """

    def __init__(self, bits: int, most: int, device: torch.device) -> None:
        numel, codes = -(-most // 8) * 8, code_dtype(bits)
        self._codes = scratch(f"minifloat {codes}", numel, codes, device)
        self._buffers = (
            scratch("minifloat magnitudes", numel, torch.float32, device),
            scratch("minifloat words", numel, torch.int32, device),
            self._codes,
            scratch(f"minifloat negative {codes}", numel, codes, device),
            scratch(f"minifloat spare {codes}", numel, codes, device),
        )
        # A Python number would become a new tensor at every use.
        self._magnitude = torch.full((), MAGNITUDE, dtype=torch.int32, device=device)
        self._shapes: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def codes(self, numel: int) -> Tensor:
        """Return the buffer of codes, ``[numel rounded up to a multiple of 8]``."""
        return self._codes[: -(-numel // 8) * 8]

    def encode(self, values: Tensor, formats: Formats) -> tuple[Tensor, Tensor]:
        """Encode values into the buffer ``codes``.

        Args:
            values: float32 ``[R, n]``, contiguous, within the formats' ranges.
            formats: formats of the R rows.

        Returns:
            Two factors, float32 ``[R, n]``. Their product is the decoded values, and the values minus that product are
            exact.
        """
        rounded, pattern, words, kept, codes, negative, spare = self._views(values.shape)
        torch.add(values.view(torch.int32), formats.half, out=pattern)  # no carry reaches the sign bit
        if values.device.type == "cpu" and negative.dtype == torch.uint8:  # six times as fast as torch
            np.signbit(values.numpy(), out=negative.numpy().view(np.bool_))
        else:
            torch.lt(values.view(torch.int32), 0, out=negative)
        torch.bitwise_and(pattern, self._magnitude, out=words)
        codes.copy_(words.sub_(formats.below).bitwise_right_shift_(formats.shift).clamp_(min=0))
        pattern.bitwise_and_(formats.mask)
        kept.copy_(torch.clamp(codes, max=1, out=spare))
        codes.add_(negative.mul_(spare).mul_(formats.positive))
        self._codes[codes.numel() : -(-codes.numel() // 8) * 8] = 0
        return rounded, kept

    def decode(self, shape: tuple[int, ...], formats: Formats) -> tuple[Tensor, Tensor]:
        """Decode the buffer ``codes``, which is overwritten. Numbers above the last code count as the last code.

        Returns:
            Two factors, float32 of this shape ``[R, n]``. Their product is the decoded values.
        """
        magnitudes, pattern, words, signs, codes, negative, spare = self._views(shape)
        torch.minimum(codes, formats.last, out=codes)
        torch.gt(codes, formats.positive, out=negative)
        words.copy_(codes.sub_(torch.mul(negative, formats.positive, out=spare)))
        torch.add(words.bitwise_left_shift_(formats.shift), formats.below, out=pattern)
        codes.clamp_(max=1).sub_(negative, alpha=2)  # -1, 0 or 1
        signs.copy_(codes.view(torch.int8) if codes.dtype == torch.uint8 else codes)
        return magnitudes, signs

    def _views(self, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return cached views of the buffers: creating views costs as much as using them."""
        if shape not in self._shapes:
            numel = math.prod(shape)
            magnitudes, words, *others = (each[:numel].view(shape) for each in self._buffers)
            views = (magnitudes, magnitudes.view(torch.int32), words, words.view(torch.float32), *others)
            self._shapes[shape] = views
        return self._shapes[shape]


def most_mantissa(bits: int) -> int:
    """Return the largest number of mantissa bits that "auto" tries for codes of ``bits`` bits."""
    return min(bits - 2, 23)


def candidates(bits: int, mantissa: int | str) -> tuple[int, int]:
    """Return a kernel's arguments: bits of mantissa, or -1 for "auto", and the number of candidates."""
    if mantissa == "auto" and bits < 32:
        return -1, most_mantissa(bits) + 1
    return 23 if mantissa == "auto" else int(mantissa), 1  # with 32 bits, 23 is lossless


def best_mantissa(values: Tensor, bits: int, low: Tensor, high: Tensor, nearest: bool) -> Tensor:
    """Return the bits of mantissa, 0 to ``bits - 2``, with the least squared error on ``values``: an int64 scalar.

    More mantissa bits are finer, but ``eps`` is larger. With the most bits, the sign with the smaller magnitudes may
    get no codes. If there is no error, as for zeros, the result is ``bits - 4``, which is best for normal data.

    Args:
        values: float32 ``[R, n]``, a sample.
        bits: bits of a code.
        low: least value of each row, float32 ``[R]``.
        high: largest value of each row, float32 ``[R]``.
        nearest: round to nearest; otherwise truncate.
    """
    if bits == 32:
        return torch.full((), 23, dtype=torch.int64, device=values.device)  # lossless
    tried = most_mantissa(bits) + 1  # all at once, each on its own copy of the rows
    mantissas = torch.arange(tried, dtype=torch.int64, device=values.device).repeat_interleave(len(values)).view(-1, 1)
    formats = build(bits, mantissas, low.repeat(tried), high.repeat(tried), nearest)
    copies = values.repeat(tried, 1)
    inside = torch.clamp(copies, formats.lowest, formats.highest)
    rounded, kept = Coder(bits, copies.numel(), values.device).encode(inside, formats)
    errors = copies.sub_(rounded.mul_(kept)).double().square_().view(tried, -1).sum(dim=1)
    return torch.where(errors.any(), errors.argmin(), max(0, bits - 4))
