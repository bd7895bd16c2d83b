"""Casts to 16-bit floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan
from lightning_compress.codecs.dense import Dense
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits, word_state
from lightning_compress.core.workspace import chunk_size, pieces, scratch

_LARGEST = torch.finfo(torch.bfloat16).max


class StochasticRounding:
    """Rounds float32 to bfloat16, up or down at random, such that the mean is exact.

    Rounding to nearest would lose small addends: 256 + 1 would stay 256 for ever. A number that bfloat16 can represent
    is not changed. A magnitude above the largest bfloat16, 3.39e38, becomes that.

    Args:
        numel: length of the vectors.
        device: device of the vectors.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self._fused = kernels.backend(__name__, device)
        if self._fused:
            return
        self._chunk = min(chunk_size(device), numel)
        self._bits = RandomBits(self._chunk, device)
        self._words = scratch("rounded words", self._chunk, torch.int32, device)
        self._noise = scratch("rounding noise", self._chunk, torch.int32, device)

    def round(self, values: Tensor, out: Tensor, key: int) -> None:
        """Round ``values``, float32 ``[numel]``, to ``out``, bfloat16 ``[numel]``. Equal keys round alike."""
        if self._fused:
            self._fused.round_at_random(values, out, word_state(key, 0))
            return
        for piece in pieces(len(values), self._chunk):
            numel = piece.stop - piece.start
            words, noise = self._words[:numel], self._noise[:numel]
            torch.clamp(values[piece], -_LARGEST, _LARGEST, out=words.view(torch.float32))
            noise.copy_(self._bits.draw(key, piece.start, numel)).bitwise_and_(0xFFFF)
            words.add_(noise).bitwise_right_shift_(16)
            out[piece].view(torch.int16).copy_(words)


@dataclass(frozen=True)
class Cast(Codec):
    """Send every element in a 16-bit format, rounded to nearest, ties to even. Rounding errors stay in the vector.

    Attributes:
        sum_dtype: the 16-bit format.
        digits: number of its significant binary digits.
    """

    sum_dtype: ClassVar[torch.dtype]
    digits: ClassVar[int]
    elementwise: ClassVar[bool] = True
    is_cast: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; up to ``summands`` messages may be summed."""
        fused = kernels.backend(__name__, device)
        if fused:
            return KernelPlan(layout, 2 * layout.numel, fused.Halves(self.sum_dtype, self.limit(summands)))
        return _CastPlan(layout, device, self.sum_dtype, self.limit(summands))

    def limit(self, summands: int) -> float:
        """Return the largest magnitude that is sent: about ``finfo(dtype).max / summands``.

        It is rounded down so that all its multiples up to ``summands`` can be represented. Then no sum of ``summands``
        messages overflows, in whatever order they are added and rounded.
        """
        largest = torch.finfo(self.sum_dtype).max
        top = 2**self.digits - 1
        return max(float(top // summands * (largest / top)), 2.0 ** math.floor(math.log2(largest / summands)))


@dataclass(frozen=True)
class FP16(Cast):
    """IEEE half precision: 16 bits per element, 11 significant digits, magnitudes from 6e-8 to 65504.

    The relative error is at most 2^-11 for magnitudes from 6.1e-5 on, and larger below. Magnitudes above
    ``65504 / summands`` saturate, and the rest stays in the vector. So do those below 3e-8; without error feedback,
    which is off by default, they count as zero: use BF16 or a loss scale. No settings, no state. Messages may be summed
    as float16.

    Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """

    name: ClassVar[str] = "fp16"
    sum_dtype: ClassVar[torch.dtype] = torch.float16
    digits: ClassVar[int] = 11


@dataclass(frozen=True)
class BF16(Cast):
    """The upper half of a float32: 16 bits per element, 8 significant digits, the range of float32.

    The relative error is at most 2^-8. No settings, no state. Messages may be summed as bfloat16.

    Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", arXiv 1905.12322, 2019.
    """

    name: ClassVar[str] = "bf16"
    sum_dtype: ClassVar[torch.dtype] = torch.bfloat16
    digits: ClassVar[int] = 8


@dataclass(frozen=True)
class Narrow(Dense):
    """Send the dense parameters of a 16-bit model in the dtype of their gradients, which is lossless.

    An exception are float16 magnitudes above ``65504 / summands`` that the transport sums: they saturate.

    Args:
        cast: cast to the dtype of the gradients.
    """

    cast: Cast

    @property
    def sum_dtype(self) -> torch.dtype:  # type: ignore[override]
        """See ``Codec.sum_dtype``."""
        return self.cast.sum_dtype

    def limit(self, summands: int) -> float:
        """See ``Cast.limit``."""
        return self.cast.limit(summands)

    def refined(self, ranks: int) -> Codec:
        """Return ``Dense`` for float16, because a sum may overflow; otherwise itself."""
        return Dense() if ranks > 1 and isinstance(self.cast, FP16) else self

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Cast.plan``."""
        return self.cast.plan(layout, device, summands)


def dense_of(dtype: torch.dtype) -> Dense:
    """Return the codec that sends gradients of this dtype without loss, up to float32."""
    cast = next((cast for cast in (BF16(), FP16()) if cast.sum_dtype == dtype), None)
    return Narrow(cast) if cast else Dense()


class _CastPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype, limit: float) -> None:
        super().__init__(layout)
        self.message_size = 2 * layout.numel
        self._dtype = dtype
        self._limit = limit
        self._size = chunk_size(device)
        self._scratch = scratch("cast", min(self._size, layout.numel), torch.float32, device)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        casts = message.view(self._dtype)
        for piece in pieces(self.layout.numel, self._size):
            part, cast, floats = vector[piece], casts[piece], self._scratch[: piece.stop - piece.start]
            cast.copy_(torch.clamp(part, -self._limit, self._limit, out=floats))
            part.sub_(floats.copy_(cast))

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        rows = [message.view(self._dtype) for message in messages]
        for piece in pieces(self.layout.numel, self._size):
            part, floats = out[piece], self._scratch[: piece.stop - piece.start]
            if not accumulate and not rows:
                part.zero_()
            for index, row in enumerate(rows):
                if accumulate or index:
                    part.add_(floats.copy_(row[piece]).mul_(weight))  # rounded twice, also where a fused one exists
                else:
                    part.copy_(row[piece]).mul_(weight)
