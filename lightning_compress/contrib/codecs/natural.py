"""Natural compression: stochastic rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan, aligned
from lightning_compress.codecs.quantize.levels import Buckets, check_correlated
from lightning_compress.codecs.quantize.qsgd import QSGD
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits, Stream
from lightning_compress.core.workspace import scratch

MANTISSA = 23
WINDOW = 127
"""Number of exponents that a bucket can hold, besides the code for 0."""


@dataclass(frozen=True)
class Natural(Codec):
    """Send the sign and one of the two powers of two next to ``|v|``, chosen at random; unbiased.

    With ``2^a <= |v| < 2^(a+1)``, the upper power has probability ``|v| / 2^a - 1``. Powers of two are sent exactly.
    Below 2^-126, the two neighbours are 0 and 2^-126. The expected squared error of an element is at most 1/8 of its
    square. The rounding error stays in the vector; error feedback, off by default, would send it later. Sums that an
    exchange encodes again are messages of ``qsgd``; those below 5e-32 count as zero. No state.

    The paper's code is a sign and the 8 exponent bits of float32. Here it is one byte: the sign in the highest bit, and
    ``c = e - base`` in the others. e is float32's exponent field of the power of two; c = 0 means 0. Each bucket has
    ``base = max(0, largest e - 127)``. If all powers are at most 1, the base is 0 and no element is cut off. Otherwise,
    elements 2^126 times smaller than the bucket's largest stay in the vector, and so does the part of a magnitude above
    2^127, the largest number that is sent. A message holds the bases, one byte for each bucket, zeros up to a multiple
    of 16 bytes, then the codes: ``8 + 8 / bucket`` bits per element.

    Args:
        bucket: elements that share a base; a multiple of 8, at least 64 (8.13 bits per element), without upper limit (a
            shorter vector is one bucket). It matters only for gradients with elements above 1.
        correlated: round with random bits that the ranks share; see ``Rotated``.

    Raises:
        ValueError: a setting is out of range.

    Horvath, Ho, Horvath, Sahu, Canini, Richtarik, "Natural Compression for Distributed Deep Learning", 2019, arXiv
    1905.10988.
    """

    name: ClassVar[str] = "natural"
    keeps_zeros: ClassVar[bool] = True
    bucket: int = 1024
    correlated: bool = False

    def __post_init__(self) -> None:
        check_correlated("Natural", self.correlated)
        if not isinstance(self.bucket, int) or self.bucket < 64 or self.bucket % 8:
            raise ValueError(f"Natural(bucket={self.bucket!r}): bucket must be a multiple of 8, at least 64; try 1024")

    @property
    def block(self) -> int:  # type: ignore[override]
        """See ``Codec``: shards are cut between buckets."""
        return self.bucket

    def refined(self, ranks: int) -> Codec:
        """See ``Codec.refined``: ``qsgd`` with 8 bits in buckets of 64, half a bit more.

        Its variance, 1e-4 of the square, equals that of a gathered mean of 800 messages. In buckets with large
        elements, it rounds small ones more coarsely than powers of two would: a tenth of an LSTM's gradients at 8
        ranks (a third in buckets of 512; none with ``bf16``, at 16 bits).
        """
        return self if ranks == 1 else QSGD(bits=8, bucket=64)

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; messages are not summed, so ``summands`` has no effect."""
        return _NaturalPlan(layout, device, self.bucket)


class _NaturalPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, bucket: int) -> None:
        super().__init__(layout)
        self._buckets = Buckets(layout.numel, bucket, "max", device)
        self._body = aligned(self._buckets.count)
        self.message_size = self._body + layout.numel
        self._words = scratch("natural words", self._buckets.most, torch.int32, device)
        self._random = RandomBits(self._buckets.most, device)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        message[: self._body] = 0
        stream = self.stream(key)
        for buckets, elements in self._buckets.pieces:
            rows = vector[elements].view(buckets.stop - buckets.start, -1)
            codes = message[self._body :][elements].view(rows.shape)
            signs = self._round(rows, stream, elements.start, codes)
            base = codes.amax(dim=1, keepdim=True).clamp_(WINDOW, 2 * WINDOW).sub_(WINDOW)
            message[buckets] = base.view(-1)
            codes.clamp_(max=2 * WINDOW)  # float32 cannot hold 2^128
            torch.maximum(codes, base, out=codes).sub_(base).bitwise_or_(signs)
            rows.addcmul_(self._values(codes), _powers(base), value=-1)  # exact, because both are powers of two

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        powers = _powers(messages[:, : self._buckets.count] & WINDOW).mul_(weight).unsqueeze(2)
        for buckets, elements in self._buckets.pieces:
            rows = out[elements].view(buckets.stop - buckets.start, -1)
            if not accumulate:
                rows.zero_()
            for message, power in zip(messages, powers[:, buckets], strict=True):
                rows.addcmul_(self._values(message[self._body :][elements].view(rows.shape)), power)

    def _round(self, rows: Tensor, stream: Stream, first: int, codes: Tensor) -> Tensor:
        """Round to powers of two and write their exponents; return the signs in bit 7 of bytes.

        The mantissa, as a share of 2^23, is the probability of rounding up: adding a random number below 2^23 then
        carries into the exponent. The random numbers are odd multiples of 2^7, which do not carry if the mantissa is 0.
        """
        random = self._random.draw(stream.key, first, rows.numel(), stream.offset).bitwise_or_(1)
        words = self._words[: rows.numel()].view(rows.shape)
        words.copy_(random.view(rows.shape)).bitwise_and_(0xFFFF).bitwise_left_shift_(MANTISSA - 16)
        words.add_(rows.view(torch.int32)).bitwise_right_shift_(MANTISSA)
        codes.copy_(words)
        return words.bitwise_right_shift_(1).to(torch.uint8).bitwise_and_(0x80)

    def _values(self, codes: Tensor) -> Tensor:
        """Return the numbers of the codes for base 0: code c is the exponent field of 2^(c - 127) in float32."""
        words = self._words[: codes.numel()].view(codes.shape).copy_(codes.view(torch.int8))  # extends the sign
        return words.bitwise_left_shift_(MANTISSA).bitwise_and_(~(1 << 30)).view(torch.float32)


def _powers(exponents: Tensor) -> Tensor:
    """Return 2 to the power of integers from 0 to 127, exactly."""
    return exponents.int().add_(127).bitwise_left_shift_(MANTISSA).view(torch.float32)
