"""Formats of N bits over a given range, so that no code is spent on magnitudes that do not occur.

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

from lightning_compress.codecs.packing.planes import code_dtype

FINITE = 0x7F7FFFFF
"""The pattern of the largest finite float32."""


@dataclass(frozen=True)
class Formats:
    """One format for each of R rows.

    Args:
        bits: N, of a code.
        shift: ``23 - m`` for ``m`` bits of mantissa: int32, a scalar or ``[R, 1]``, as the next two.
        half: what to add to a bit pattern before it is cut off.
        mask: bits of a pattern that are left after that.
        below: the bit pattern of the float of ``m`` bits just below the smallest value, ``(base - 1) << shift``:
            int32 ``[R, 1]``.
        positive: how many positive values there are: ``code_dtype`` ``[R, 1]``.
        last: the last code, the number of all values but 0: as ``positive``.
    """

    bits: int
    shift: Tensor
    half: Tensor
    mask: Tensor
    below: Tensor
    positive: Tensor
    last: Tensor

    def split(self, sizes: list[int]) -> list[Formats]:
        """The formats of so many rows each."""
        own = [each.split(sizes) for each in (self.below, self.positive, self.last)]
        common = [
            each.split(sizes) if each.dim() else [each] * len(sizes) for each in (self.shift, self.half, self.mask)
        ]
        return [Formats(self.bits, *each) for each in zip(*common, *own, strict=True)]

    @property
    def negative(self) -> Tensor:
        """How many negative values there are."""
        return self.last - self.positive

    @property
    def base(self) -> Tensor:
        """The number of the smallest value of either sign."""
        return (self.below >> self.shift) + 1

    @property
    def eps(self) -> Tensor:
        """The smallest magnitude besides zero, float32 ``[R, 1]``."""
        return (self.below - self.mask).view(torch.float32)

    @property
    def highest(self) -> Tensor:
        """The largest value, float32 ``[R, 1]``; 0 where no value is positive."""
        return self._end(self.positive)

    @property
    def lowest(self) -> Tensor:
        """The least value, float32 ``[R, 1]``; 0 where no value is negative."""
        return -self._end(self.negative)

    def _end(self, count: Tensor) -> Tensor:
        return (self.below + (count.int() << self.shift)).view(torch.float32) * (count > 0)


def build(bits: int, mantissa: int | Tensor, low: Tensor, high: Tensor, nearest: bool = False) -> Formats:
    """The formats whose codes cover ``[low, high]``, down to the smallest ``eps`` that there is room for.

    Where one end is so much smaller than the other that it lies below ``eps``, its sign has no codes.

    Args:
        bits: of a code, 2 to 16, or 32.
        mantissa: bits of mantissa, 0 to 23 (others count as the nearest of these); a number, a scalar or ``[R, 1]``.
        low: float32 ``[R]``; above 0 counts as 0.
        high: float32 ``[R]``; below 0 counts as 0.
        nearest: round the ends to nearest instead of cutting them off, so that whatever is rounded to nearest between
            them stays between them.
    """
    shift = 23 - torch.as_tensor(mantissa, dtype=torch.int32, device=low.device).clamp(0, 23)
    step = torch.ones_like(shift).bitwise_left_shift_(shift)
    half = step >> 1 if nearest else torch.zeros_like(step)
    # Floats below 0 have patterns below 0, so that all of them, and -0.0, become 0.
    pattern = torch.stack([high, -low], dim=1).view(torch.int32).clamp_(0, FINITE)
    ends = pattern.add_(half).clamp_(max=FINITE).bitwise_right_shift_(shift).long()
    lesser, greater = ends.amin(dim=1, keepdim=True), ends.amax(dim=1, keepdim=True)
    codes = 2**bits - 1
    below = (lesser + greater - codes + 1) >> 1  # the base less 1, if both ends have codes
    one_sided = greater - codes
    one_sided += lesser == one_sided + 1  # or a code of the lesser sign would be one too many
    below = torch.where(lesser <= below, one_sided, below).clamp_(min=0)
    counts = (ends - below).clamp_(min=0).to(code_dtype(bits))
    last = counts.sum(dim=1, keepdim=True, dtype=counts.dtype)
    return Formats(bits, shift, half, -step, below.int().bitwise_left_shift_(shift), counts[:, :1], last)


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
