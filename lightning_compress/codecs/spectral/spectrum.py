"""Sparsification of the spectrum of blocks, for any transform."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import Codec, Plan, SourcePlan, aligned
from lightning_compress.codecs.packing.planes import Planes
from lightning_compress.codecs.quantize.formats import Formats, build, check_settings
from lightning_compress.codecs.quantize.minifloat import Coder, best_mantissa, candidates
from lightning_compress.codecs.spectral.bins import Places
from lightning_compress.codecs.spectral.transform import Transform
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import NOTHING, Pieces, Source, place_of
from lightning_compress.core.workspace import pieces, scratch

SHORTEST = 8
"""Least length that a short last block is filled up to."""
SAMPLE = 8
"""Number of blocks in the sample that the mantissa is chosen on."""
LONGEST = 1 << 16
"""Largest length of a block, because positions have 16 bits."""
CHUNK = 1 << 18
"""Elements that a CPU transforms at a time. With fewer, the overhead of many small operations is larger."""
FUSED_CHUNK = 1 << 18
"""The same where kernels do the rest: their rows and spectra stay in a core's own cache."""


@dataclass(frozen=True)
class Spectral(Codec):
    """Base of codecs that send the largest coefficients of a block's spectrum, as floats of N bits for their range."""

    contractive: ClassVar[bool] = True
    theta: float = 0.85
    block: int = 4096
    bits: int = 10
    mantissa: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.theta, bool) or not isinstance(self.theta, (int, float)) or not 0 <= self.theta < 1:
            raise ValueError(f"{name}(theta={self.theta!r}): theta must be in [0, 1); 0.85 drops 85 %")
        whole = isinstance(self.block, int) and not isinstance(self.block, bool)
        if not whole or not 64 <= self.block <= LONGEST or self.block & (self.block - 1):
            raise ValueError(f"{name}(block={self.block!r}): block must be a power of two, 64 to {LONGEST}")
        check_settings(name, self.bits, self.mantissa)

    @property
    def safe_with_adam(self) -> bool:
        """True if most of the gradient is sent at once. The limits are guesses; theta 0.85 is known to be too large."""
        return self.theta <= 0.5 and self.bits >= 8

    @abstractmethod
    def transform(self, length: int) -> Transform:
        """Return the transform of blocks of this length."""

    def refined(self, ranks: int) -> Codec:
        """Return it with ``sqrt(ranks)`` times as many coefficients.

        Each rank sends other coefficients. With this many, encoding their sum loses about as little as an exact sum.
        """
        return self if ranks == 1 else replace(self, theta=max(0.0, 1 - math.sqrt(ranks) * (1 - self.theta)))

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        fast = kernels.backend(__name__, device, "numba")
        return _FusedPlan(layout, self, fast) if fast else _SpectralPlan(layout, device, self)


def stretches(numel: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, number and length of a vector's whole blocks, and of its shorter last block, if there are any."""
    whole, rest = divmod(numel, block)
    if whole:
        yield 0, whole, block
    if rest:
        yield whole * block, 1, rest


class Area:
    """Blocks of one length: their place in the vector and in the message.

    Args:
        codec: the settings.
        start: first element of the blocks in the vector.
        blocks: number of blocks.
        length: elements of a block.
        offset: first byte of the blocks in the message.
    """

    def __init__(self, codec: Spectral, start: int, blocks: int, length: int, offset: int) -> None:
        self.start, self.blocks, self.length, self.bits = start, blocks, length, codec.bits
        self.transform = transform = codec.transform(1 << max(length - 1, SHORTEST - 1).bit_length())
        self.padded = transform.length
        keep = max(1, math.ceil((1 - codec.theta) * transform.bins - 1e-9))  # because 1 - 0.9 is slightly above 0.1
        self.places = Places(transform.bins, keep)
        self.values = keep * transform.width
        self.planes = Planes(codec.bits, blocks * self.values)
        self.ranges = slice(offset, offset + 12 * blocks)
        self.where = aligned(self.ranges.stop)
        self.codes = aligned(self.where + blocks * self.places.size)
        self.stop = aligned(self.codes + self.planes.size)
        self.gaps = (
            slice(self.ranges.stop, self.where),
            slice(self.where + blocks * self.places.size, self.codes),
            slice(self.codes + self.planes.size, self.stop),
        )
        # Exponent of the largest scale: beyond it, sums of the inverse transform could overflow.
        self.limit = 126 - 2 * (self.padded.bit_length() - 1)

    @property
    def sample(self) -> range:
        """The blocks that the mantissa is chosen on, if this is the first area."""
        return range(0, self.blocks, -(-self.blocks // min(SAMPLE, self.blocks)))


class _Area(Area):
    """An area with views of the scratch memory."""

    def __init__(
        self, codec: Spectral, start: int, blocks: int, length: int, offset: int, device: torch.device
    ) -> None:
        super().__init__(codec, start, blocks, length, offset)
        # Spectra are slightly longer than blocks, and the inverse transform should copy at most 1 MiB at a time.
        # The codes of a multiple of 8 blocks fill whole bytes.
        self.rows = min(max(8, (CHUNK if device.type == "cpu" else 1 << 22) // (self.padded + 2) // 8 * 8), blocks)
        self.floats = self._view("rows", (self.padded,), device)
        self.spectrum = self._view("spectrum", (self.transform.bins, self.transform.width), device)
        self.energy = self._view("energy", (self.transform.bins,), device)
        self.work = Coder(codec.bits, self.rows * self.values, device)

    def _view(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        numel = self.rows * math.prod(shape)
        return scratch(f"spectrum {name}", numel, torch.float32, device).view(self.rows, *shape)

    def source(self, vector: Tensor, blocks: slice) -> Tensor:
        """Return a view of these blocks of the vector, ``[R, length]``."""
        first, last = (self.start + edge * self.length for edge in (blocks.start, blocks.stop))
        return vector[first:last].view(-1, self.length)

    def write(self, message: Tensor, blocks: slice) -> None:
        """Pack the codes of these blocks from the coder's buffer into the message."""
        elements = slice(blocks.start * self.values, blocks.stop * self.values)
        self.planes.write(self.work.codes(elements.stop - elements.start), elements, message[self.codes :])

    def read(self, message: Tensor, blocks: slice) -> None:
        """Unpack the codes of these blocks from the message into the coder's buffer."""
        elements = slice(blocks.start * self.values, blocks.stop * self.values)
        self.planes.read(self.work.codes(elements.stop - elements.start), elements, message[self.codes :])


class _SpectralPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, codec: Spectral) -> None:
        super().__init__(layout)
        self._codec = codec
        self._areas: list[_Area] = []
        for start, blocks, length in stretches(layout.numel, codec.block):
            offset = self._areas[-1].stop if self._areas else 16
            self._areas.append(_Area(codec, start, blocks, length, offset, device))
        self.message_size = self._areas[-1].stop if self._areas else 0
        fixed = 0 if codec.mantissa == "auto" else codec.mantissa
        # once: in every step it would wait for the device
        self._fixed = torch.tensor(fixed, dtype=torch.int64, device=device)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        if not self._areas:
            return
        message[:16] = 0
        mantissa = self._mantissa(vector)
        message[:4].view(torch.int32).copy_(mantissa)
        for area in self._areas:
            for gap in area.gaps:
                message[gap] = 0
            for blocks in pieces(area.blocks, area.rows):
                self._encode(area, blocks, area.source(vector, blocks), message, mantissa)

    def _encode(self, area: _Area, blocks: slice, rows: Tensor, message: Tensor, mantissa: Tensor) -> None:
        scale, places, values = self._analyse(area, rows)
        ranges = torch.stack([scale, values.amin(dim=1).clamp(max=0), values.amax(dim=1).clamp(min=0)])
        ranges.add_(0.0)  # no range may end at -0.0
        message[area.ranges].view(torch.float32).view(3, -1)[:, blocks] = ranges
        formats = build(self._codec.bits, mantissa, ranges[1], ranges[2], nearest=True)
        rounded, kept = area.work.encode(values, formats)
        area.write(message, blocks)
        area.places.write(places, _part(message, area.where, area.places.size, blocks))
        spectrum = area.spectrum[: len(rows)].zero_()
        self._add(area, spectrum, places, rounded.mul_(kept).mul_(scale.view(-1, 1)))
        rows.sub_(self._synthesise(area, spectrum))

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        for area in self._areas:
            ranges = [self._ranges(area, message, weight) for message in messages]
            for index, blocks in enumerate(pieces(area.blocks, area.rows)):
                rows = area.source(out, blocks)
                spectrum = area.spectrum[: len(rows)].zero_()
                for message, (scale, formats) in zip(messages, ranges, strict=True):
                    places = area.places.read(_part(message, area.where, area.places.size, blocks), len(rows))
                    area.read(message, blocks)
                    magnitudes, signs = area.work.decode((len(rows), area.values), formats[index])
                    self._add(area, spectrum, places, magnitudes.mul_(signs).mul_(scale[blocks]))
                summed = self._synthesise(area, spectrum)  # one inverse transform for all messages
                if accumulate:
                    rows.add_(summed)
                else:
                    rows.copy_(summed)

    def _analyse(self, area: _Area, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transform blocks and choose their largest coefficients.

        Returns:
            scale: power of two by which each block was divided, to avoid overflow: float32 ``[R]``.
            places: positions of the chosen coefficients, see ``Places.largest``: int64 ``[R * keep]``.
            values: the chosen coefficients, float32 ``[R, keep * width]``.
        """
        floats = area.floats[: len(rows)]
        # The power of two above the block's largest magnitude. Beyond the limit, values saturate.
        exponent = torch.frexp(torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_())).exponent
        exponent = exponent.clamp(-125, area.limit)
        scale, inverse = (torch.ldexp(torch.ones_like(rows[:, 0]), power) for power in (exponent, -exponent))
        floats[:, area.length :] = 0
        inside = torch.mul(rows, inverse.view(-1, 1), out=floats[:, : area.length])
        if rows.device.type != "cpu" or bool((exponent == area.limit).any()):
            inside.clamp_(-1, 1)
        spectrum, energy = area.spectrum[: len(rows)], area.energy[: len(rows)]
        area.transform.forward(floats, spectrum)
        area.transform.energy(spectrum, energy)
        places = area.places.largest(energy)
        values = torch.index_select(spectrum.view(-1, area.transform.width), 0, places)
        return scale, places, values.view(len(rows), -1)

    def _add(self, area: _Area, spectrum: Tensor, places: Tensor, values: Tensor) -> None:
        width = area.transform.width
        spectrum.view(-1, width).index_add_(0, places, values.view(-1, width))

    def _synthesise(self, area: _Area, spectrum: Tensor) -> Tensor:
        floats = area.floats[: len(spectrum)]
        area.transform.inverse(spectrum, floats)
        return floats[:, : area.length]

    def _ranges(self, area: _Area, message: Tensor, weight: float) -> tuple[Tensor, list[Formats]]:
        """Return the scales of a message's blocks times the weight, and their formats; finite for any bytes."""
        ranges = message[area.ranges].view(torch.float32).view(3, -1)
        bound = 2.0**area.limit
        scale = ranges[0].nan_to_num(0, bound, 0).clamp(0, bound)
        low, high = ranges[1:].nan_to_num(0, area.padded, -area.padded).clamp(-area.padded, area.padded)
        formats = build(self._codec.bits, message[:4].view(torch.int32)[0], low, high, nearest=True)
        sizes = [piece.stop - piece.start for piece in pieces(area.blocks, area.rows)]
        return (scale * weight).view(-1, 1), formats.split(sizes)

    def _mantissa(self, vector: Tensor) -> Tensor:
        if self._codec.mantissa != "auto":
            return self._fixed
        area = self._areas[0]
        rows = area.source(vector, slice(0, area.blocks))[:: area.sample.step]
        _, _, values = self._analyse(area, rows)
        return best_mantissa(values, self._codec.bits, values.amin(dim=1), values.amax(dim=1), nearest=True)


def _part(message: Tensor, offset: int, size: int, blocks: slice) -> Tensor:
    """Return the bytes of these blocks; each block has ``size`` bytes."""
    return message[offset + blocks.start * size : offset + blocks.stop * size]


class _FusedArea(Area):
    """An area with the scratch memory of kernels."""

    def __init__(self, codec: Spectral, stretch: tuple[int, int, int], offset: int, fast: ModuleType) -> None:
        super().__init__(codec, *stretch, offset)
        places, width, cpu = self.places, self.transform.width, torch.device("cpu")
        self.rows = min(max(8, FUSED_CHUNK // (self.padded + 2) // 8 * 8), self.blocks)
        self.floats = scratch("spectrum rows", self.rows * self.padded, torch.float32, cpu).view(self.rows, -1)
        numbers = self.rows * places.bins * width
        memory = scratch("spectrum spectrum", numbers + fast.MARGIN, torch.float32, cpu)
        self.numbers, self.spectrum = memory.numpy(), memory[:numbers].view(self.rows, -1, width)
        self.scales = np.empty(self.rows, np.float32)
        words, sent = -(-places.bins // 64), -(-self.values // kernels.TILE) * kernels.TILE
        self.work = (
            np.empty(64 * words, np.int32),
            np.empty(64 * words, np.int16),
            np.empty(words, np.uint64),
            np.empty(64 * words + 8, np.uint32),
            np.empty(sent, np.float32),
        )
        self.shape = places.bins, width, places.keep, places.size, places.listed
        self.packed = np.empty(self.rows * self.values + kernels.TILE, np.uint32)

    def sections(self, message: Tensor) -> tuple[Any, Any, Any, Any, Any, Any]:
        """Return what kernels get of a message: see ``encode_rows`` from ``ranges`` on."""
        ranges = message[self.ranges].view(torch.float32).view(3, -1).numpy()
        where, body = message[self.where : self.codes].numpy(), message[self.codes : self.stop].numpy()
        return ranges, where, self.packed, body, self.planes.table, self.work


class _FusedPlan(SourcePlan):
    """Does everything but the transforms by CPU kernels, a few blocks at a time in cache."""

    in_pieces = True

    def __init__(self, layout: Layout, codec: Spectral, fast: ModuleType) -> None:
        super().__init__(layout)
        self._codec, self._fast = codec, fast
        self._areas: list[_FusedArea] = []
        for stretch in stretches(layout.numel, codec.block):
            self._areas.append(_FusedArea(codec, stretch, self._areas[-1].stop if self._areas else 16, fast))
        self.message_size = self._areas[-1].stop if self._areas else 0

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        if self._areas:
            source.feed(self._encode, NOTHING if rest is None else rest.numpy(), message)

    def _encode(self, source: Any, rest: Any, message: Tensor) -> int:
        """Encode a source, and return the largest magnitude in its memory; see ``source_numba.py``."""
        message[:16] = 0
        coding = self._codec.bits, self._best_mantissa(source)
        message[:4].view(torch.int32)[0] = coding[1]
        most = 0
        for area in self._areas:
            for gap in area.gaps:
                message[gap] = 0
            sections = area.sections(message)
            for blocks in pieces(area.blocks, area.rows):
                count, first = blocks.stop - blocks.start, area.start + blocks.start * area.length
                most = max(most, self._forward(area, source, first, rest, count))
                scales = area.scales[:count]
                self._fast.encode_rows(area.numbers, scales, blocks.start, area.shape, coding, *sections)
                if len(rest):
                    area.transform.inverse(area.spectrum[:count], area.floats[:count])
                    self._fast.subtract_rows(rest, first, area.floats[:count].numpy(), area.length)
        return most

    def _forward(self, area: _FusedArea, source: Any, first: int, rest: Any, count: int) -> int:
        """Transform the blocks that begin at element ``first``."""
        floats = area.floats[:count]
        scales = area.scales[:count]
        most: int = self._fast.load_rows(source, first, rest, area.length, area.limit, floats.numpy(), scales)
        area.transform.forward(floats, area.spectrum[:count])
        return most

    def decode(self, messages: Tensor, out: Tensor | Pieces, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        place = place_of(out)
        for area in self._areas:
            sections = [((self._codec.bits, _mantissa(each)), area.sections(each)) for each in messages]
            bounds = np.float32(weight), np.float32(2.0**area.limit), np.float32(area.padded)
            for blocks in pieces(area.blocks, area.rows):
                count = blocks.stop - blocks.start
                floats, spectrum = area.floats[:count], area.spectrum[:count]
                if not sections:
                    spectrum.zero_()
                for number, (coding, given) in enumerate(sections):
                    inputs = area.numbers, count, number == 0, blocks.start, area.shape, coding
                    if not self._fast.add_rows(*inputs, bounds, *given):
                        raise area.places.damaged()
                area.transform.inverse(spectrum, floats)
                first = area.start + blocks.start * area.length
                self._fast.write_rows(place, first, floats.numpy(), area.length, accumulate)

    def _best_mantissa(self, source: Any) -> int:
        mantissa, tried = candidates(self._codec.bits, self._codec.mantissa)
        if mantissa >= 0:
            return mantissa
        area = self._areas[0]
        sample = area.sample
        for row, block in enumerate(sample):
            floats, scales = area.floats[row : row + 1].numpy(), area.scales[row : row + 1]
            self._fast.load_rows(source, block * area.length, NOTHING, area.length, area.limit, floats, scales)
        area.transform.forward(area.floats[: len(sample)], area.spectrum[: len(sample)])
        given = area.numbers, len(sample), area.shape, self._codec.bits, tried, area.packed, area.work
        return int(self._fast.best_mantissa(*given))


def _mantissa(message: Tensor) -> int:
    return int(message[:4].view(torch.int32)[0])
