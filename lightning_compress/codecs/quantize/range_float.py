"""Range-based floats: every element rounded to a float of N bits that is made for its block's range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan, aligned
from lightning_compress.codecs.packing.planes import Planes, code_bytes
from lightning_compress.codecs.quantize.formats import Formats, build, check_settings
from lightning_compress.codecs.quantize.minifloat import Coder, best_mantissa, candidates
from lightning_compress.core.layout import Layout
from lightning_compress.core.workspace import chunk_size, pieces

Rounding = Literal["nearest", "truncate"]
RUN = 1 << 17
"""Elements that a CPU handles at a time; with fewer, the calls cost more than the cache of a core saves."""
SAMPLE = 4
"""Blocks that the mantissa is chosen on."""
SAMPLE_NUMEL = 1024
"""Elements of each of them, at most."""
EDGE = 2.0**127
"""Beyond this magnitude rounding may pass the largest float."""


@dataclass(frozen=True)
class RangeFloat(Codec):
    """Send each element as a float of N bits whose codes cover its block's range: ``N + 64 / block`` bits per element.

    In a block with least value ``lo`` and largest value ``hi``, the ``2^N`` codes stand for 0 and for the floats with
    ``m`` bits of mantissa from ``eps`` up to ``hi`` and down to ``lo``, see ``formats.py``. The relative error
    is at most ``2^-(m+1)`` down to ``eps`` (``2^-m`` for "truncate"); what is smaller is sent as 0, and the rounding of
    the ends is that of all elements. What was not sent stays in the vector, exactly.

    The ranges are those of this very vector and travel with it, so there is no state, nothing saturates, and no range
    grows stale. The paper describes ranges that are estimated in the first iterations; how, is not verified.

    The method is biased (without error feedback, what is below ``eps`` is never sent), hence error feedback by default.
    At 8 bits it keeps back 1.3 % of the norm of normal data, so it counts as safe beside Adam, as it was in a short
    training.

    A message is the bits of mantissa as int32 and zeros up to 16 bytes; ``lo`` of every block and ``hi`` of every
    block as float32, zeros up to a multiple of 16 bytes; the codes in planes of 8, 4, 2 and 1 bits of all of them (16
    and 32 bits are one plane), the lowest bits and the first code first; and again zeros.

    Args:
        bits: N, 2 (coarsest: 0 and three other values) to 16, or 32 (with 23 bits of mantissa nothing is lost).
        mantissa: m, 0 (only powers of two, the widest reach) to ``min(N - 1, 23)`` (the finest, over about a binade
            of either sign); "auto" takes the one of 0 to ``N - 2`` with the least squared error on a sample of each
            message.
        block: elements that share a range; a multiple of 8, at least 64, and as large as one likes.
        rounding: "nearest", or "truncate", which is the paper's and makes magnitudes smaller on average.

    Raises:
        ValueError: a setting is none of these.

    Wang, Wu, Zhang, Liu, Bosilca, Herlihy, Fonseca, "FFT-based Gradient Sparsification for the Distributed Training of
    Deep Neural Networks", HPDC 2020, arXiv 1811.08596 (a reconstruction: the authors' quantiser is not released).
    """

    name: ClassVar[str] = "range_float"
    contractive: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    bits: int = 8
    mantissa: int | Literal["auto"] = "auto"
    block: int = 4096
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_settings("RangeFloat", self.bits, self.mantissa)
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 64 or self.block % 8:
            raise ValueError(f"RangeFloat(block={self.block!r}): block must be a multiple of 8, at least 64; try 4096")
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"RangeFloat(rounding={self.rounding!r}): rounding must be 'nearest' or 'truncate'")

    @property
    def safe_with_adam(self) -> bool:
        """From 8 bits on, where hardly anything waits in the residual."""
        return self.bits >= 8

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        fused = kernels.backend(__name__, device)
        if not fused or self.block > fused.LONGEST:
            return _RangeFloatPlan(layout, device, self)
        _, body, used = self.sections(layout.numel)
        sample, length = self.sample(layout.numel), min(self.block, layout.numel)
        looked = length, sample.step * self.block, -(-length // SAMPLE_NUMEL) or 1
        mantissa, tried = candidates(self.bits, self.mantissa)
        errors = torch.zeros(len(sample), tried, dtype=torch.float64, device=device)
        kernel = fused.Ranges(self.block, self.bits, self.rounding == "nearest", mantissa, body, errors, looked)
        return KernelPlan(layout, aligned(used), kernel)

    def sections(self, numel: int) -> tuple[int, int, int]:
        """Of a message: how many blocks it has, where codes begin, and where they end."""
        blocks = -(-numel // self.block)
        body = aligned(16 + 8 * blocks) if numel else 0
        return blocks, body, body + code_bytes(numel, self.bits)

    def sample(self, numel: int) -> range:
        """The blocks that the mantissa is chosen on."""
        whole = numel // self.block or 1
        return range(0, whole, -(-whole // SAMPLE))


class _RangeFloatPlan(Plan):
    """By tensor operations."""

    def __init__(self, layout: Layout, device: torch.device, codec: RangeFloat) -> None:
        super().__init__(layout)
        self._codec, self._nearest = codec, codec.rounding == "nearest"
        self._blocks, self._codes, self._used = codec.sections(layout.numel)
        self._ranges = slice(16, 16 + 8 * self._blocks)
        self._planes = Planes(codec.bits, layout.numel)
        self.message_size = aligned(self._used)
        whole, rest = divmod(layout.numel, codec.block)
        run = RUN if device.type == "cpu" else chunk_size(device)
        rows = max(1, min(run // codec.block, whole))
        self._sizes = [part.stop - part.start for part in pieces(whole, rows)] + [1] * bool(rest)
        self._elements = list(pieces(whole * codec.block, rows * codec.block))
        if rest:
            self._elements.append(slice(layout.numel - rest, layout.numel))
        self._work = Coder(codec.bits, min(layout.numel, rows * codec.block), device)
        self._low, self._high = torch.empty(2, self._blocks, device=device)
        self._ends = list(zip(self._low.split(self._sizes), self._high.split(self._sizes), strict=True))
        given = 0 if codec.mantissa == "auto" else codec.mantissa
        self._given = torch.tensor(given, device=device)  # made in every step, it would wait for a device

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        if not self.layout.numel:
            return
        cut = self._cut(vector)
        for rows, (low, high) in zip(cut, self._ends, strict=True):
            torch.amin(rows, dim=1, out=low)
            torch.amax(rows, dim=1, out=high)
        self._low.clamp_(max=0).add_(0.0)  # so that no range ends at -0.0
        self._high.clamp_(min=0).add_(0.0)
        mantissa = self._mantissa(cut)
        formats = build(self._codec.bits, mantissa, self._low, self._high, self._nearest)
        edge = vector.device.type != "cpu" or bool(self._high.max() > EDGE or self._low.min() < -EDGE)
        body = message[self._codes :]
        for rows, elements, part in zip(cut, self._elements, formats.split(self._sizes), strict=True):
            inside = torch.clamp(rows, part.lowest, part.highest) if edge else rows
            rounded, kept = self._work.encode(inside, part)
            rows.addcmul_(rounded, kept, value=-1)
            self._planes.write(self._work.codes(rows.numel()), elements, body)
        message[: self._codes] = message[self._used :] = 0
        message[:4].view(torch.int32).copy_(mantissa)
        message[self._ranges].view(torch.float32).copy_(torch.cat([self._low, self._high]))

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        formats: list[list[Formats]] = []
        for message in messages if self.layout.numel else ():
            low, high = message[self._ranges].view(torch.float32).view(2, -1)
            mantissa = message[:4].view(torch.int32)[0]
            formats.append(build(self._codec.bits, mantissa, low, high, self._nearest).split(self._sizes))
        for number, (rows, elements) in enumerate(zip(self._cut(out), self._elements, strict=True)):
            if not accumulate:
                rows.zero_()
            for message, each in zip(messages, formats, strict=True):
                self._planes.read(self._work.codes(rows.numel()), elements, message[self._codes :])
                magnitudes, signs = self._work.decode(rows.shape, each[number])
                rows.addcmul_(magnitudes, signs, value=weight)

    def _mantissa(self, cut: list[Tensor]) -> Tensor:
        if self._codec.mantissa != "auto":
            return self._given
        blocks = self._codec.sample(self.layout.numel)
        each, stride = self._sizes[0], -(-cut[0].shape[1] // SAMPLE_NUMEL)
        sample = torch.stack([cut[block // each][block % each, ::stride] for block in blocks])
        chosen = slice(0, blocks.stop, blocks.step)
        return best_mantissa(sample, self._codec.bits, self._low[chosen], self._high[chosen], self._nearest)

    def _cut(self, vector: Tensor) -> list[Tensor]:
        """The vector's pieces, one block a row."""
        pairs = zip(self._elements, self._sizes, strict=True)
        return [vector[elements].view(size, -1) for elements, size in pairs]
