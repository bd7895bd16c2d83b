"""Sparsifying the spectrum of blocks, whatever their transform."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan, aligned
from lightning_compress.codecs.packing.planes import Planes
from lightning_compress.codecs.quantize.formats import Formats, build, check_settings
from lightning_compress.codecs.quantize.minifloat import Coder, best_mantissa
from lightning_compress.codecs.spectral.bins import Places
from lightning_compress.core.layout import Layout
from lightning_compress.core.workspace import pieces, scratch

SHORTEST = 8
"""The least length that a rest is filled up to."""
SAMPLE = 8
"""Blocks that the mantissa is chosen on."""
LONGEST = 1 << 16
"""The largest block; places are numbers of 16 bits."""
CHUNK = 1 << 18
"""Elements to transform at a time on a CPU; with fewer, the many small operations on the kept ones cost more."""


class Transform(ABC):
    """A change of basis of rows of one length that keeps their norm.

    Args:
        length: of a row; a power of two.

    Attributes:
        bins: coefficients of a row, each of which is kept or dropped as a whole.
        width: float32 numbers of a coefficient.
    """

    bins: int
    width: int

    def __init__(self, length: int) -> None:
        self.length = length

    @abstractmethod
    def forward(self, rows: Tensor, out: Tensor) -> None:
        """Coefficients, float32 ``[R, bins, width]``, of float32 ``[R, length]``."""

    @abstractmethod
    def inverse(self, coefficients: Tensor, out: Tensor) -> None:
        """Rows again; the coefficients may be lost."""

    @abstractmethod
    def energy(self, coefficients: Tensor, out: Tensor) -> None:
        """The squared magnitude of every coefficient, float32 ``[R, bins]``; the coefficients stay."""


@dataclass(frozen=True)
class Spectral(Codec):
    """Keep the largest coefficients of every block's spectrum, as floats of N bits made for their range."""

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
        """Only where most of the gradient is sent at once; the limits are guesses, 0.85 is known to be too much."""
        return self.theta <= 0.5 and self.bits >= 8

    @abstractmethod
    def transform(self, length: int) -> Transform:
        """The transform of blocks of this length."""

    def refined(self, ranks: int) -> Codec:
        """See ``Codec.refined``: root of the ranks times as many coefficients.

        Ranks keep others each; with that many the whole exchange leaves about as much as one that sums all of them.
        """
        return self if ranks == 1 else replace(self, theta=max(0.0, 1 - math.sqrt(ranks) * (1 - self.theta)))

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return _SpectralPlan(layout, device, self)


def stretches(numel: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Start, number and length of a vector's whole blocks, and of its rest, where there are any."""
    whole, rest = divmod(numel, block)
    if whole:
        yield 0, whole, block
    if rest:
        yield whole * block, 1, rest


class Area:
    """Blocks of one length: their place in the vector and in the message.

    Args:
        codec: its settings.
        start: where the blocks begin in the vector.
        blocks: how many.
        length: elements of a block.
        offset: where they begin in the message.
    """

    def __init__(self, codec: Spectral, start: int, blocks: int, length: int, offset: int) -> None:
        self.start, self.blocks, self.length, self.bits = start, blocks, length, codec.bits
        self.transform = transform = codec.transform(1 << max(length - 1, SHORTEST - 1).bit_length())
        self.padded = transform.length
        keep = max(1, math.ceil((1 - codec.theta) * transform.bins - 1e-9))  # 1 - 0.9 is above 0.1
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
        # A value that is scaled down by no more than this overflows in no sum of an inverse transform.
        self.limit = 126 - 2 * (self.padded.bit_length() - 1)

    @property
    def sample(self) -> range:
        """The blocks that the mantissa is chosen on, if these are the first ones."""
        return range(0, self.blocks, -(-self.blocks // min(SAMPLE, self.blocks)))


class _Area(Area):
    """The same with views of the scratch."""

    def __init__(
        self, codec: Spectral, start: int, blocks: int, length: int, offset: int, device: torch.device
    ) -> None:
        super().__init__(codec, start, blocks, length, offset)
        # Spectra are a little longer than blocks, and what the inverse transform copies should not pass 1 MiB.
        # The codes of a multiple of 8 blocks begin with a byte.
        self.rows = min(max(8, (CHUNK if device.type == "cpu" else 1 << 22) // (self.padded + 2) // 8 * 8), blocks)
        self.floats = self._view("rows", (self.padded,), device)
        self.spectrum = self._view("spectrum", (self.transform.bins, self.transform.width), device)
        self.energy = self._view("energy", (self.transform.bins,), device)
        self.work = Coder(codec.bits, self.rows * self.values, device)

    def _view(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        numel = self.rows * math.prod(shape)
        return scratch(f"spectrum {name}", numel, torch.float32, device).view(self.rows, *shape)

    def source(self, vector: Tensor, blocks: slice) -> Tensor:
        """These blocks of a vector, ``[R, length]``."""
        first, last = (self.start + edge * self.length for edge in (blocks.start, blocks.stop))
        return vector[first:last].view(-1, self.length)

    def write(self, message: Tensor, blocks: slice) -> None:
        """Pack the codes of these blocks, which are in the workspace."""
        elements = slice(blocks.start * self.values, blocks.stop * self.values)
        self.planes.write(self.work.codes(elements.stop - elements.start), elements, message[self.codes :])

    def read(self, message: Tensor, blocks: slice) -> None:
        """Unpack the codes of these blocks into the workspace."""
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
        given = 0 if codec.mantissa == "auto" else codec.mantissa
        self._given = torch.tensor(given, device=device)  # made in every step, it would wait for a device

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
            for number, blocks in enumerate(pieces(area.blocks, area.rows)):
                rows = area.source(out, blocks)
                spectrum = area.spectrum[: len(rows)].zero_()
                for message, (scale, formats) in zip(messages, ranges, strict=True):
                    places = area.places.read(_part(message, area.where, area.places.size, blocks), len(rows))
                    area.read(message, blocks)
                    magnitudes, signs = area.work.decode((len(rows), area.values), formats[number])
                    self._add(area, spectrum, places, magnitudes.mul_(signs).mul_(scale[blocks]))
                summed = self._synthesise(area, spectrum)  # one inverse transform, however many messages
                if accumulate:
                    rows.add_(summed)
                else:
                    rows.copy_(summed)

    def _analyse(self, area: _Area, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transform blocks and choose among their coefficients.

        Returns:
            scale: powers of two by which the blocks were divided, so that nothing overflows: float32 ``[R]``.
            places: of the kept coefficients among those of all these blocks, ascending: int64 ``[R * keep]``.
            values: the coefficients there, float32 ``[R, keep * width]``.
        """
        floats = area.floats[: len(rows)]
        # The power of two above the block's largest magnitude; beyond the limit, values saturate.
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
        """Of a message's blocks: scales times the weight, and formats; finite for any bytes."""
        ranges = message[area.ranges].view(torch.float32).view(3, -1)
        bound = 2.0**area.limit
        scale = ranges[0].nan_to_num(0, bound, 0).clamp(0, bound)
        low, high = ranges[1:].nan_to_num(0, area.padded, -area.padded).clamp(-area.padded, area.padded)
        formats = build(self._codec.bits, message[:4].view(torch.int32)[0], low, high, nearest=True)
        sizes = [piece.stop - piece.start for piece in pieces(area.blocks, area.rows)]
        return (scale * weight).view(-1, 1), formats.split(sizes)

    def _mantissa(self, vector: Tensor) -> Tensor:
        if self._codec.mantissa != "auto":
            return self._given
        area = self._areas[0]
        rows = area.source(vector, slice(0, area.blocks))[:: area.sample.step]
        _, _, values = self._analyse(area, rows)
        return best_mantissa(values, self._codec.bits, values.amin(dim=1), values.amax(dim=1), nearest=True)


def _part(message: Tensor, offset: int, size: int, blocks: slice) -> Tensor:
    """The bytes of some blocks, each of which has ``size`` of them."""
    return message[offset + blocks.start * size : offset + blocks.stop * size]
