"""TernGrad: sends every element as -1, 0 or 1 times the scale of its parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan, aligned
from lightning_compress.codecs.packing.planes import code_bytes, pack_plane, unpack_plane
from lightning_compress.codecs.quantize.levels import LARGEST, UNIT, check_correlated, fit
from lightning_compress.codecs.quantize.qsgd import QSGD
from lightning_compress.contrib.codecs.ternary import RUN, Ternary, pack_digits, unpack_digits
from lightning_compress.core.layout import Layout

Packing = Literal["2bit", "base3"]
DIGITS = 5
"""Three-valued digits in a byte: 3^5 = 243."""


@dataclass(frozen=True)
class TernGrad(Codec):
    """Send ``s * sign(v) * b`` with a random bit b that is 1 with probability ``min(|v|, c * sigma) / s``.

    The scale s is the largest magnitude of the parameter after clipping at c standard deviations sigma. The message is
    unbiased for the clipped gradient, to 2^-17 of s, and has ``sum |clipped v| / s`` nonzero elements on average. The
    errors of clipping and rounding stay in the vector; error feedback, off by default, would send them later. No state.

    If a vector holds a part of a parameter, scale and sigma are those of the part. Sigma divides by the number of
    elements. There is no clipping if sigma is 0 (all elements are equal), or with fewer than 64 elements. A parameter
    whose scale is below 2^-111 (4e-34) sends 0 and stays in the vector; without error feedback, it counts as zero.

    A message holds every parameter's scale as float32, zeros up to a multiple of 16 bytes, then ``sign * b + 1``. These
    are packed 4 to a byte, 2 bits each, the first one lowest; or 5 to a byte, as base-3 digits, in runs of 163,840
    elements: in a run of n, byte j of ``m = ceil(n / 5)`` has the digits of elements j, ``m + j``, ... ``4 m + j``, the
    first one lowest. That is ``2 + 32 / numel`` or ``1.6 + 32 / numel`` bits per element.

    Args:
        clip: c, in standard deviations, above 0. The paper uses 2.5; None switches clipping off.
        packing: "2bit", 4 elements in a byte, or "base3", 5 elements in a byte, which takes about as long.
        correlated: round with random bits that the ranks share; see ``Rotated``.

    Raises:
        ValueError: a setting is out of range.

    Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning", NIPS 2017, arXiv 1705.07878. Its sharing of scales between ranks is ``terngrad_shared``.
    """

    name: ClassVar[str] = "terngrad"
    keeps_zeros: ClassVar[bool] = True
    clip: float | None = 2.5
    packing: Packing = "2bit"
    correlated: bool = False

    def __post_init__(self) -> None:
        check_clip("TernGrad", self.clip)
        check_correlated("TernGrad", self.correlated)
        if self.packing not in get_args(Packing):
            raise ValueError(f"TernGrad(packing={self.packing!r}): packing must be one of '2bit', 'base3'")

    @property
    def safe_with_adam(self) -> bool:
        """See ``Codec``: not known to be. Rounding is coarse, and Adam divides by the gradient's size."""
        return False

    def refined(self, ranks: int) -> Codec:
        """See ``Codec.refined``: ``qsgd`` with ``log2(ranks) / 2`` more bits than the 2 of a message.

        Every message has its own scale, so a sum of them is not integer; ``terngrad_shared`` makes it so.
        """
        return self if ranks == 1 else QSGD(bits=2).refined(ranks)

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; messages are not summed, so ``summands`` has no effect."""
        return _TernGradPlan(layout, device, self)


def check_clip(method: str, clip: object) -> None:
    """Raise ValueError if ``clip`` is neither None nor a number of standard deviations."""
    is_number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if clip is not None and not (is_number and 0 < clip < LARGEST):  # type: ignore[operator]
        raise ValueError(
            f"{method}(clip={clip!r}): clip must be a number of standard deviations above 0, or None (null in YAML) "
            "for none; try 2.5"
        )


class _TernGradPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, codec: TernGrad) -> None:
        super().__init__(layout)
        self._base3 = codec.packing == "base3"
        run = RUN if self._base3 else None  # which is part of the format of base 3
        self._ternary = Ternary(layout, device, codec.clip, run)
        self._header = 4 * self._ternary.count
        self._body = aligned(self._header)
        self.message_size = self._body + self._size(layout.numel)
        bounds = torch.full((self._ternary.count,), float(UNIT), dtype=torch.float32, device=device)
        self._bounds = None if codec.clip is None else bounds

    def _size(self, numel: int) -> int:
        """Return the bytes of ``numel`` codes."""
        return -(-numel // DIGITS) if self._base3 else code_bytes(numel, 2)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        stream = self.stream(key)
        scales, factors = fit(self._ternary.measure(vector), 1.0)
        message[: self._header] = scales.view(torch.uint8)
        message[self._header : self._body] = 0
        for number, piece in enumerate(self._ternary.pieces):
            codes = self._ternary.round(vector, number, scales, factors, self._bounds, stream)
            if self._base3:
                pack_digits(codes, 3, DIGITS, message[self._place(piece)])
            else:
                pack_plane(codes, 0, 2, message[self._place(piece)])

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        header = messages[:, : self._header].clone(memory_format=torch.contiguous_format)
        steps = header.view(-1).view(torch.float32).view(len(messages), self._ternary.count).mul_(weight)
        for number, piece in enumerate(self._ternary.pieces):
            if not accumulate:
                out[piece].zero_()
            codes = self._ternary.codes(number)
            for message, own in zip(messages, steps, strict=True):
                if self._base3:
                    unpack_digits(message[self._place(piece)], 3, DIGITS, codes)
                else:
                    unpack_plane(message[self._place(piece)], 0, 2, codes)
                self._ternary.add(out, number, codes, 1, own)

    def _place(self, piece: slice) -> slice:
        assert piece.start % RUN == 0
        return slice(self._body + self._size(piece.start), self._body + self._size(piece.stop))
