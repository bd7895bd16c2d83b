"""Floats of N bits over a given range, so that no code is spent on magnitudes that do not occur.

A float32's bit pattern without its sign, shifted right by ``23 - m``, is a whole number that grows with the magnitude
in ``2^m`` steps per binade. A format gives its ``2^N - 1`` codes besides zero to consecutive such numbers, from
``base`` up to those of the range's two ends: 0 is 0.0, then come the positive values ascending in magnitude, then the
negative ones. The spacing doubles with every binade, and what is nearer to zero than the smallest value ``eps``
becomes zero.

After Wang, Wu, Zhang, Liu, Bosilca, Herlihy, Fonseca, "FFT-based Gradient Sparsification for the Distributed Training
of Deep Neural Networks", HPDC 2020, arXiv 1811.08596; the authors' quantiser was never released, so the details are
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAGNITUDE = 0x7FFFFFFF
"""All bits of a float32 but its sign."""
FINITE = 0x7F7FFFFF
"""The pattern of the largest finite float32."""


@dataclass(frozen=True)
class Formats:
    """One format for each of R rows; tensors are whole numbers, ``[R, 1]``, int64 for 32 bits and int32 otherwise.

    Args:
        bits: N, of a code.
        shift: ``23 - m`` for ``m`` bits of mantissa.
        base: the pattern of the smallest value of either sign.
        positive: how many positive values there are.
        negative: how many negative ones; ``positive + negative < 2^bits``.
    """

    bits: int
    shift: Tensor
    base: Tensor
    positive: Tensor
    negative: Tensor

    def some(self, rows: slice) -> Formats:
        """The formats of some rows."""
        tensors = (self.shift, self.base, self.positive, self.negative)
        return Formats(self.bits, *(each[rows] for each in tensors))

    @property
    def eps(self) -> Tensor:
        """The smallest magnitude besides zero, float32 ``[R, 1]``."""
        return self._value(self.base)

    @property
    def highest(self) -> Tensor:
        """The largest value, float32 ``[R, 1]``; 0 where no value is positive."""
        return self._value(self.base + self.positive - 1) * (self.positive > 0)

    @property
    def lowest(self) -> Tensor:
        """The least value, float32 ``[R, 1]``; 0 where no value is negative."""
        return -self._value(self.base + self.negative - 1) * (self.negative > 0)

    def _value(self, number: Tensor) -> Tensor:
        return (number << self.shift).int().view(torch.float32)


def build(bits: int, mantissa: int | Tensor, low: Tensor, high: Tensor, nearest: bool = False) -> Formats:
    """The formats whose codes cover ``[low, high]``, down to the smallest ``eps`` that there is room for.

    Where one end is so much smaller than the other that it lies below ``eps``, its sign has no codes.

    Args:
        bits: of a code, 2 to 16, or 32.
        mantissa: bits of mantissa, 0 to 23 (others count as the nearest of these); a number or a scalar.
        low: float32 ``[R]``; above 0 counts as 0.
        high: float32 ``[R]``; below 0 counts as 0.
        nearest: round the ends to nearest instead of cutting them off, so that whatever is rounded to nearest between
            them stays between them.
    """
    shift = 23 - torch.as_tensor(mantissa, dtype=torch.int64, device=low.device).clamp(0, 23)
    ends = torch.stack([high, -low], dim=1)
    pattern = torch.where(ends > 0, ends, 0).view(torch.int32).long()
    if nearest:
        pattern += _step(shift) >> 1
    ends = pattern.clamp_(max=FINITE) >> shift
    lesser, greater = (end.unsqueeze(1) for end in ends.sort(dim=1).values.unbind(1))
    codes = 2**bits - 1
    base = -((codes - 2 - lesser - greater) >> 1)
    one_sided = greater + (1 - codes)
    one_sided += lesser == one_sided  # or a code of the lesser sign would be one too many
    base = torch.where(lesser < base, one_sided, base).clamp_(min=1)
    dtype = code_dtype(bits)
    positive, negative = (ends - (base - 1)).clamp_(min=0).to(dtype).unbind(1)
    shifts = shift.to(dtype).expand_as(base)
    return Formats(bits, shifts, base.to(dtype), positive.unsqueeze(1), negative.unsqueeze(1))


def _step(shift: Tensor) -> Tensor:
    return torch.ones_like(shift).bitwise_left_shift_(shift)


def code_dtype(bits: int) -> torch.dtype:
    """The dtype to compute codes in."""
    return torch.int64 if bits == 32 else torch.int32


def encode(values: Tensor, formats: Formats, nearest: bool = True) -> Tensor:
    """Codes of float32 ``[R, n]``: to nearest (half away from zero) or cut off, saturating at the range's ends."""
    inside = torch.clamp(values, formats.lowest, formats.highest)
    codes = torch.empty_like(inside, dtype=formats.base.dtype)
    encode_into(inside, formats, nearest, torch.empty_like(inside), codes, torch.empty_like(codes))
    return codes


def decode(codes: Tensor, formats: Formats) -> Tensor:
    """Values of whole numbers ``[R, n]``; numbers that are no codes give something finite."""
    codes = codes.to(formats.base.dtype, copy=True)
    out = torch.empty_like(codes, dtype=torch.float32)
    decode_into(codes, formats, out, torch.empty_like(codes))
    return out


def decode_all(formats: Formats) -> Tensor:
    """The values of all numbers of ``bits`` bits in turn, float32 ``[R, 2^bits]``."""
    numbers = torch.arange(2**formats.bits, device=formats.base.device)
    return decode(numbers.expand(len(formats.base), -1), formats)


def encode_into(values: Tensor, formats: Formats, nearest: bool, rounded: Tensor, codes: Tensor, spare: Tensor) -> None:
    """Encode without allocating anything of the size of ``values``, which the ranges must hold.

    Args:
        values: float32 ``[R, n]``.
        formats: of the R rows.
        nearest: round to nearest instead of cutting off.
        rounded: float32 ``[R, n]``; gets what the codes stand for. ``values - rounded`` is exact.
        codes: ``[R, n]`` of the formats' dtype; gets the codes.
        spare: scratch like ``codes``.
    """
    pattern, shift = rounded.view(torch.int32), formats.shift.int()
    step = _step(shift)
    torch.add(values.view(torch.int32), step >> 1 if nearest else 0, out=pattern)  # the sign bit is not reached
    pattern.bitwise_and_(-step)
    torch.bitwise_and(pattern, MAGNITUDE, out=codes)
    codes.bitwise_right_shift_(formats.shift).sub_(formats.base - 1).clamp_(min=0)
    torch.clamp(codes, max=1, out=spare)
    pattern.mul_(spare)  # also turns -0.0 into 0.0
    torch.bitwise_right_shift(pattern, 31, out=spare)  # -1 where negative
    codes.add_(spare.bitwise_and_(formats.positive))


def decode_into(codes: Tensor, formats: Formats, out: Tensor, spare: Tensor) -> None:
    """Decode without allocating anything of the size of ``codes``, which are lost.

    Args:
        codes: ``[R, n]`` of the formats' dtype.
        formats: of the R rows.
        out: float32 ``[R, n]``; gets the values.
        spare: scratch like ``codes``.
    """
    pattern = out.view(torch.int32)
    torch.sub(formats.positive, codes, out=spare)
    spare.bitwise_right_shift_(63 if spare.dtype == torch.int64 else 31)  # -1 where negative
    codes.addcmul_(spare, formats.positive)
    if codes.dtype == pattern.dtype:
        torch.clamp(codes, 0, 1, out=pattern)
    else:
        pattern.copy_(codes.clamp(0, 1))
    codes.add_(formats.base - 1)
    top = torch.full_like(formats.shift, FINITE).bitwise_right_shift_(formats.shift)
    torch.minimum(codes, top, out=codes)  # numbers that are no codes may be past the last float
    pattern.mul_(codes.bitwise_left_shift_(formats.shift))
    pattern.bitwise_or_(spare.bitwise_and_(-(2**31)))


def best_mantissa(values: Tensor, bits: int, low: Tensor, high: Tensor, nearest: bool) -> Tensor:
    """The bits of mantissa, 0 to ``bits - 2``, with the least squared error on ``values``: an int64 scalar.

    More of them are finer but reach less far down.

    Args:
        values: float32 ``[R, n]``, a sample.
        bits: of a code.
        low: the rows' least values, float32 ``[R]``.
        high: the rows' largest values, float32 ``[R]``.
        nearest: how they would be rounded.
    """
    if bits == 32:
        return torch.tensor(23, device=values.device)  # loses nothing
    errors = []
    for mantissa in range(min(bits - 2, 23) + 1):
        formats = build(bits, mantissa, low, high, nearest)
        sent = decode(encode(values, formats, nearest), formats)
        errors.append((values.double() - sent).square().sum())
    return torch.stack(errors).argmin()


def check_settings(name: str, bits: object, mantissa: object) -> None:
    """Refuse what is no format.

    Raises:
        ValueError: bits or mantissa are none; the message begins with ``name``.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not (2 <= bits <= 16 or bits == 32):
        raise ValueError(f"{name}(bits={bits!r}): bits must be 2 to 16, or 32; try 8")
    top = min(bits - 1, 23)
    if mantissa != "auto" and (isinstance(mantissa, bool) or not isinstance(mantissa, int) or not 0 <= mantissa <= top):
        raise ValueError(f"{name}(mantissa={mantissa!r}): mantissa must be 'auto', or 0 to {top} of {bits} bits")
