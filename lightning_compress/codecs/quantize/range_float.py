"""Range-based floats: each element becomes a float of N bits whose format fits its block's range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan, Shard, Shards, SourcePlan, aligned
from lightning_compress.codecs.packing.planes import Planes, code_bytes
from lightning_compress.codecs.quantize.formats import Formats, build, check_settings
from lightning_compress.codecs.quantize.levels import memory_of
from lightning_compress.codecs.quantize.minifloat import Coder, best_mantissa, candidates
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import NOTHING, Pieces, Source, place_of
from lightning_compress.core.workspace import chunk_size, pieces

Rounding = Literal["nearest", "truncate"]
RUN = 1 << 17
"""Elements that a CPU handles at a time. With fewer, call overhead exceeds the gain of a core's own cache."""
SAMPLE = 4
"""Number of blocks in the sample that the mantissa is chosen on."""
SAMPLE_NUMEL = 1024
"""Largest number of elements per block of the sample."""
EDGE = 2.0**127
"""Above this magnitude, rounding may overflow float32."""


@dataclass(frozen=True)
class RangeFloat(Codec):
    """Send each element as a float of N bits whose format fits its block's range: ``N + 64 / block`` bits per element.

    In a block with least value ``lo`` and largest value ``hi``, the ``2^N`` codes are 0 and the floats with ``m`` bits
    of mantissa from ``eps`` up to ``hi`` and from ``-eps`` down to ``lo``; see ``formats.py``. The relative error is at
    most ``2^-(m+1)`` for magnitudes from ``eps`` on (``2^-m`` with "truncate"). Smaller magnitudes are sent as 0. The
    ends are rounded as all elements are. What was not sent stays in the vector, exactly.

    Each message holds its own ranges, so there is no state, nothing saturates, and ranges are never outdated. The paper
    describes ranges that are estimated in the first iterations; we could not verify how.

    The method is biased, because magnitudes below ``eps`` would never be sent without error feedback. So error feedback
    is on by default. At 8 bits it leaves 1.3 % of the norm of normal data, and it counts as safe with Adam; a short
    training run confirmed that.

    A message is: the bits of mantissa as int32, and zeros up to 16 bytes; every block's ``lo`` and every block's ``hi``
    as float32, and zeros up to a multiple of 16 bytes; the codes in planes of 8, 4, 2 and 1 bits of all elements (16
    and 32 bits are one plane), the lowest bits and the first code first; and zeros up to a multiple of 16 bytes.

    Args: bits: N, 2 to 16, or 32. 2 is the coarsest: 0 and three other values. 32 with 23 bits of mantissa is lossless.
        mantissa: m, 0 to ``min(N - 1, 23)``, or "auto". 0 has only powers of two and the smallest ``eps``. The largest
        m
            is the finest, but covers only about one binade of each sign. "auto" takes the m from 0 to ``N - 2`` with
            the least squared error on a sample of each message.
        block: elements that share a range: a multiple of 8, at least 64, without upper limit.
        rounding: "nearest", or "truncate" as in the paper, which makes magnitudes smaller on average.

    Raises:
        ValueError: a setting is out of range.

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
        """True from 8 bits on, where the residual is small."""
        return self.bits >= 8

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        if loops := kernels.backend(__name__, device, "numba"):
            return _LoopPlan(layout, device, self, loops)
        fused = kernels.backend(__name__, device, "triton")
        if not fused or self.block > fused.LONGEST:
            return _RangeFloatPlan(layout, device, self)
        _, body, used = self.sections(layout.numel)
        sample, length = self.sample(layout.numel), min(self.block, layout.numel)
        spacing = length, sample.step * self.block, -(-length // SAMPLE_NUMEL) or 1
        mantissa, tried = candidates(self.bits, self.mantissa)
        errors = torch.zeros(len(sample), tried, dtype=torch.float64, device=device)
        kernel = fused.Ranges(self.block, self.bits, self.rounding == "nearest", mantissa, body, errors, spacing)
        return KernelPlan(layout, aligned(used), kernel)

    def sections(self, numel: int) -> tuple[int, int, int]:
        """Return a message's number of blocks, the first byte of its codes, and the end of its codes."""
        blocks = -(-numel // self.block)
        body = aligned(16 + 8 * blocks) if numel else 0
        return blocks, body, body + code_bytes(numel, self.bits)

    def sample(self, numel: int) -> range:
        """Return the blocks of the sample that the mantissa is chosen on."""
        whole = numel // self.block or 1
        return range(0, whole, -(-whole // SAMPLE))


class _RangeFloatPlan(Plan):
    """Encodes and decodes by tensor operations."""

    def __init__(self, layout: Layout, device: torch.device, codec: RangeFloat) -> None:
        super().__init__(layout)
        self._codec, self._nearest = codec, codec.rounding == "nearest"
        self._blocks, self._codes, self._end = codec.sections(layout.numel)
        self._ranges = slice(16, 16 + 8 * self._blocks)
        self._planes = Planes(codec.bits, layout.numel)
        self.message_size = aligned(self._end)
        whole, rest = divmod(layout.numel, codec.block)
        run = RUN if device.type == "cpu" else chunk_size(device)
        rows = max(1, min(run // codec.block, whole))
        self._sizes = [part.stop - part.start for part in pieces(whole, rows)] + [1] * bool(rest)
        self._elements = list(pieces(whole * codec.block, rows * codec.block))
        if rest:
            self._elements.append(slice(layout.numel - rest, layout.numel))
        self._work = Coder(codec.bits, min(layout.numel, rows * codec.block), device)
        self._low, self._high = torch.empty(2, self._blocks, dtype=torch.float32, device=device)
        self._ends = list(zip(self._low.split(self._sizes), self._high.split(self._sizes), strict=True))
        fixed = 0 if codec.mantissa == "auto" else codec.mantissa
        # once: in every step it would wait for the device
        self._fixed = torch.tensor(fixed, dtype=torch.int64, device=device)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        if not self.layout.numel:
            return
        cut = self._cut(vector)
        for rows, (low, high) in zip(cut, self._ends, strict=True):
            torch.amin(rows, dim=1, out=low)
            torch.amax(rows, dim=1, out=high)
        self._low.clamp_(max=0).add_(0.0)  # no range may end at -0.0
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
        message[: self._codes] = message[self._end :] = 0
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
            for message, parts in zip(messages, formats, strict=True):
                self._planes.read(self._work.codes(rows.numel()), elements, message[self._codes :])
                magnitudes, signs = self._work.decode(rows.shape, parts[number])
                rows.addcmul_(magnitudes, signs, value=weight)

    def _mantissa(self, cut: list[Tensor]) -> Tensor:
        if self._codec.mantissa != "auto":
            return self._fixed
        blocks = self._codec.sample(self.layout.numel)
        size, stride = self._sizes[0], -(-cut[0].shape[1] // SAMPLE_NUMEL)
        sample = torch.stack([cut[block // size][block % size, ::stride] for block in blocks])
        chosen = slice(0, blocks.stop, blocks.step)
        return best_mantissa(sample, self._codec.bits, self._low[chosen], self._high[chosen], self._nearest)

    def _cut(self, vector: Tensor) -> list[Tensor]:
        """Return the vector's pieces, one block per row."""
        pairs = zip(self._elements, self._sizes, strict=True)
        return [vector[elements].view(size, -1) for elements, size in pairs]


class _LoopPlan(SourcePlan):
    """Encodes and decodes by loops on a CPU, which access each number in memory once."""

    in_pieces = True

    def __init__(self, layout: Layout, device: torch.device, codec: RangeFloat, loops: Any) -> None:
        super().__init__(layout)
        _, self._body, self._end = codec.sections(layout.numel)
        self.message_size = aligned(self._end)
        self._codec, self._loops, self._planes = codec, loops, Planes(codec.bits, layout.numel).table
        mantissa, tried = candidates(codec.bits, codec.mantissa)
        self._settings = codec.block, codec.bits, mantissa, tried, codec.rounding == "nearest"
        self._codes = np.empty(loops.TILE, np.uint32)
        whole = Shard(0, layout.numel, self, 0, self.message_size, 0, 0)
        self._own = Shards.of([self._row(whole)], [whole], device)

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""
        if self.layout.numel:
            self.encode_shards(source, rest, message, self._own, key)

    def decode(self, messages: Tensor, out: Tensor | Pieces, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        if not self.layout.numel:
            return
        heads = messages[:, : self._body].clone(memory_format=torch.contiguous_format).view(-1).view(torch.int32)
        inputs = (
            heads.view(len(messages), self._body // 4).numpy(),
            *memory_of(messages[:, self._body : self._end]),
            self._planes,
        )
        self._loops.decode(*inputs, self._settings, self._codes, place_of(out), np.float32(weight), accumulate)

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """See ``ShardCoder``."""
        rows = []
        for shard in shards:
            if not isinstance(plan := shard.coder, _LoopPlan) or plan._codec != self._codec:
                return None
            rows.append(plan._row(shard))
        return Shards.of(rows, shards, device)

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """See ``ShardCoder``."""
        inputs = shards.table.numpy(), messages.view(-1).numpy(), self._settings, self._codes
        source.feed(self._loops.encode_shards, *inputs, NOTHING if rest is None else rest.numpy())

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor | Pieces, weight: float, accumulate: bool, skip: int | None
    ) -> None:
        """See ``ShardCoder``."""
        inputs = messages.view(-1).numpy(), shards.table.numpy(), self._settings, self._codes, place_of(out)
        self._loops.decode_shards(*inputs, np.float32(weight), accumulate)

    def _row(self, shard: Shard) -> tuple[int, ...]:
        """Return the row of a shard that this plan encodes; see ``range_float_numba.py``."""
        place = shard.start, shard.numel, shard.at, self._body, self._end, self.message_size
        return (*place, *self._planes.ravel().tolist())
