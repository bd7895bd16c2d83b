"""Float formats of N bits that are fitted to a range, so that no code is wasted on magnitudes that do not occur.

Shift a float32's bit pattern without its sign right by ``23 - m``: the result is an integer that grows with the
magnitude, in ``2^m`` steps per binade. Code 0 of a format is 0.0. Its other ``2^N - 1`` codes are consecutive such
integers, from ``base`` up to those of the range's two ends: first the positive values, ascending in magnitude, then the
negative values. The spacing doubles with every binade. Magnitudes below the smallest value ``eps`` become 0,
except those within half a step of it if the format rounds to nearest.

After Wang, Wu, Zhang, Liu, Bosilca, Herlihy, Fonseca, "FFT-based Gradient Sparsification for the Distributed Training
of Deep Neural Networks", HPDC 2020, arXiv 1811.08596; the authors' quantiser was never released, so the details are
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.codecs.packing.planes import code_dtype

FINITE = 0x7F7FFFFF
"""The pattern of the largest finite float32."""


@dataclass(frozen=True)
class Formats:
    """One format for each of R rows.

    Args:
        bits: N, bits of a code.
        shift: ``23 - m`` for ``m`` bits of mantissa: int32, a scalar or ``[R, 1]``.
        half: added to a bit pattern before it is truncated: int32, a scalar or ``[R, 1]``.
        mask: the bits of a pattern that truncation keeps: int32, a scalar or ``[R, 1]``.
        below: ``(base - 1) << shift``, the bit pattern of the float just below the smallest value: int32 ``[R, 1]``.
        positive: number of positive values: ``code_dtype`` ``[R, 1]``.
        last: the last code, which is the number of nonzero values: ``code_dtype`` ``[R, 1]``.
    """

    bits: int
    shift: Tensor
    half: Tensor
    mask: Tensor
    below: Tensor
    positive: Tensor
    last: Tensor

    def split(self, sizes: list[int]) -> list[Formats]:
        """Return the formats of consecutive groups of rows, of these sizes."""
        fields = (self.shift, self.half, self.mask, self.below, self.positive, self.last)
        parts = [field.split(sizes) if field.dim() else [field] * len(sizes) for field in fields]
        return [Formats(self.bits, *part) for part in zip(*parts, strict=True)]

    @property
    def negative(self) -> Tensor:
        """Number of negative values."""
        return self.last - self.positive

    @property
    def base(self) -> Tensor:
        """The integer of the smallest magnitude; see above."""
        return (self.below >> self.shift) + 1

    @property
    def eps(self) -> Tensor:
        """The smallest nonzero magnitude, float32 ``[R, 1]``."""
        return (self.below - self.mask).view(torch.float32)

    @property
    def highest(self) -> Tensor:
        """The largest value, float32 ``[R, 1]``; 0 if no value is positive."""
        return self._end(self.positive)

    @property
    def lowest(self) -> Tensor:
        """The least value, float32 ``[R, 1]``; 0 if no value is negative."""
        return -self._end(self.negative)

    def _end(self, count: Tensor) -> Tensor:
        return (self.below + (count.int() << self.shift)).view(torch.float32) * (count > 0)


def build(bits: int, mantissa: int | Tensor, low: Tensor, high: Tensor, nearest: bool = False) -> Formats:
    """Return the formats that cover ``[low, high]``, with the smallest ``eps`` that the number of codes allows.

    If the magnitude of one end is below ``eps``, its sign has no codes.

    Args:
        bits: bits of a code, 2 to 16, or 32.
        mantissa: bits of mantissa, clamped to 0 to 23: an int, a scalar or ``[R, 1]``.
        low: float32 ``[R]``; values above 0 count as 0.
        high: float32 ``[R]``; values below 0 count as 0.
        nearest: round the ends to nearest instead of truncating them, so that values which are rounded to nearest stay
            between the ends.
    """
    shift = 23 - torch.as_tensor(mantissa, dtype=torch.int32, device=low.device).clamp(0, 23)
    step = torch.ones_like(shift).bitwise_left_shift_(shift)
    half = step >> 1 if nearest else torch.zeros_like(step)
    # Negative floats have negative patterns, so these, and -0.0, become 0.
    pattern = torch.stack([high, -low], dim=1).view(torch.int32).clamp_(0, FINITE)
    ends = pattern.add_(half).clamp_(max=FINITE).bitwise_right_shift_(shift).long()
    lesser, greater = ends.amin(dim=1, keepdim=True), ends.amax(dim=1, keepdim=True)
    codes = 2**bits - 1
    below = (lesser + greater - codes + 1) >> 1  # base - 1, if both signs have codes
    one_sided = greater - codes
    one_sided += lesser == one_sided + 1  # otherwise the lesser sign would have one code too many
    below = torch.where(lesser <= below, one_sided, below).clamp_(min=0)
    counts = (ends - below).clamp_(min=0).to(code_dtype(bits))
    last = counts.sum(dim=1, keepdim=True, dtype=counts.dtype)
    return Formats(bits, shift, half, -step, below.int().bitwise_left_shift_(shift), counts[:, :1], last)


def check_settings(name: str, bits: object, mantissa: object) -> None:
    """Raise ValueError if ``bits`` or ``mantissa`` is out of range. The message begins with the class ``name``."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not (2 <= bits <= 16 or bits == 32):
        raise ValueError(f"{name}(bits={bits!r}): bits must be 2 to 16, or 32; try 8")
    top = min(bits - 1, 23)
    if mantissa != "auto" and (isinstance(mantissa, bool) or not isinstance(mantissa, int) or not 0 <= mantissa <= top):
        raise ValueError(f"{name}(mantissa={mantissa!r}): mantissa must be 'auto', or 0 to {top} for {bits} bits")
