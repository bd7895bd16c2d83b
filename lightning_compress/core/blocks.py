"""Values in 8 bits each, for states that need not be exact, such as an average of errors.

A parameter's n values are n int8 codes, followed by one byte per block of 64 codes: the exponent of the block's largest
magnitude. A value is its code times a power of two, which is 1/64 to 1/128 of that magnitude. So decoding and encoding
again gives the same bytes, a float32 copy can stand for the codes, and any bytes decode to finite values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core.workspace import chunk_size, pieces

BLOCK = 64
"""Values that share a scale."""
_LEAST, _MOST, _SHIFT = 6, 253, 23
"""Least and largest exponent of a block that is not zero, and the position of a float32's exponent."""


def coded_bytes(numel: int) -> int:
    """Return the bytes of ``numel`` values."""
    return numel + -(-numel // BLOCK)


def coded_numel(size: int) -> int:
    """Return the number of values in ``size`` bytes; the inverse of ``coded_bytes``."""
    return size - -(-size // (BLOCK + 1))


def encode(values: Tensor, coded: Tensor) -> None:
    """Encode finite float32 ``values [n]`` as uint8 ``[coded_bytes(n)]``, each rounded to the nearest."""
    blend(coded, 0.0, values, 1.0, coded)


def decode(coded: Tensor) -> Tensor:
    """Return the values, float32 ``[n]``, of uint8 ``[coded_bytes(n)]``."""
    out = torch.zeros(coded_numel(len(coded)), dtype=torch.float32, device=coded.device)
    add(coded, out)
    return out


def add(coded: Tensor, out: Tensor) -> None:
    """Add the values of uint8 ``coded [coded_bytes(n)]`` to float32 ``out [n]``."""
    codes, scales = _parts(coded)
    if fast := kernels.backend(__name__, out.device):
        values = out.numpy()
        fast.add_to(codes.numpy(), scales.numpy(), values, values.view(np.int32), values)
        return
    for piece in pieces(len(out), chunk_size(out.device)):
        out[piece].add_(_read(codes, scales, piece))


def add_to(coded: Tensor, gradient: Tensor, out: Tensor) -> int:
    """Compute ``out = gradient + coded`` on a CPU, in one pass.

    Args:
        coded: uint8 ``[coded_bytes(n)]``.
        gradient: float32 ``[n]``.
        out: float32 ``[n]``, overwritten.

    Returns:
        the gradient's largest magnitude, as the bits of a float32.
    """
    codes, scales = _parts(coded)
    if fast := kernels.backend(__name__, out.device):
        values = gradient.numpy()
        return int(fast.add_to(codes.numpy(), scales.numpy(), values, values.view(np.int32), out.numpy()))
    out.copy_(gradient)
    add(coded, out)
    return int(gradient.view(torch.int32).bitwise_and(0x7FFFFFFF).max()) if len(gradient) else 0


def blend(old: Tensor, kept: float, values: Tensor, share: float, new: Tensor) -> None:
    """Compute ``new = kept * old + share * values``, rounded to the nearest.

    Args:
        old: uint8 ``[coded_bytes(n)]``.
        kept: in [0, 1]; with 0, ``old`` is ignored.
        values: float32 ``[n]``, finite.
        share: in [0, 1].
        new: uint8 ``[coded_bytes(n)]``, overwritten; may be ``old``.
    """
    codes, scales = _parts(old)
    new_codes, new_scales = _parts(new)
    if fast := kernels.backend(__name__, values.device):
        sources = codes.numpy(), scales.numpy(), np.float32(kept), values.numpy(), np.float32(share)
        fast.blend(*sources, new_codes.numpy(), new_scales.numpy())
        return
    for piece in pieces(len(values), chunk_size(values.device)):
        part = _read(codes, scales, piece).mul_(kept).add_(values[piece] * share)
        blocks = torch.nn.functional.pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
        exponents = blocks.abs().amax(1).view(torch.int32) >> _SHIFT
        exponents.masked_fill_(~_valid(exponents), 0)
        rounded = blocks.mul_(_power(260 - exponents, exponents > 0).unsqueeze(1)).round_().clamp_(-127, 127)
        new_codes[piece] = rounded.view(-1)[: len(part)].to(torch.int8)
        new_scales[piece.start // BLOCK : -(-piece.stop // BLOCK)] = exponents.to(torch.uint8)


def _parts(coded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, int8 ``[n]``, and the exponents, uint8 ``[blocks]``."""
    numel = coded_numel(len(coded))
    return coded[:numel].view(torch.int8), coded[numel:]


def _read(codes: Tensor, scales: Tensor, piece: slice) -> Tensor:
    exponents = scales[piece.start // BLOCK : -(-piece.stop // BLOCK)].to(torch.int32)
    steps = _power(exponents - _LEAST, _valid(exponents))
    return codes[piece].float().mul_(steps.repeat_interleave(BLOCK)[: piece.stop - piece.start])


def _valid(exponents: Tensor) -> Tensor:
    return (exponents > _LEAST) & (exponents <= _MOST)


def _power(exponents: Tensor, valid: Tensor) -> Tensor:
    """Return the powers of two with these float32 exponents; 0 where they are not valid."""
    return (torch.where(valid, exponents, 0) << _SHIFT).view(torch.float32)
