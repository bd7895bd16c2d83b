"""Stochastic rounding to -1, 0 and 1 times a parameter's scale, and packing of such digits into bytes and words."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.quantize.levels import UNIT
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits, Stream
from lightning_compress.core.workspace import chunk_size, pieces, scratch

RUN = 5 << 15
"""Elements that are rounded at a time on a CPU. They fit its cache, and are a multiple of 4, 5 and 8."""
FEW = 64
"""Parts of parameters with fewer elements are not clipped: their standard deviation is unreliable."""


class Ternary:
    """Measures and rounds the parameters of a layout, one piece of the vector at a time.

    Args:
        layout: of the vector.
        device: of the vector.
        clip: standard deviations at which elements are clipped, or None.
        run: elements that are rounded at a time, a multiple of ``RUN``; None: as many as suit the device.

    Attributes:
        pieces: runs of elements; each starts at a multiple of ``RUN``.
        count: parameters that have elements in the vector.
    """

    def __init__(self, layout: Layout, device: torch.device, clip: float | None, run: int | None = None) -> None:
        run = run or chunk_size(device) // RUN * RUN
        segments = [slice(segment.offset, segment.end) for segment in layout.segments if segment.numel]
        self.pieces = list(pieces(layout.numel, run))
        self.count = len(segments)
        self._clip = clip
        self._parts = [_overlaps(piece, segments) for piece in self.pieces]
        self._firsts = [segment.start for segment in segments]
        numels = [segment.stop - segment.start for segment in segments]
        self._numels = torch.tensor(numels, dtype=torch.float64, device=device)
        most = min(run, layout.numel)
        self._floats = scratch("ternary floats", most, torch.float32, device)
        self._codes = scratch("ternary codes", 40 * (-(-most // 40)), torch.uint8, device)
        self._wide = scratch("ternary wide", most if clip else 0, torch.float64, device)
        self._random = RandomBits(most, device)
        # Random numbers from -32768 to 32767 become the midpoints of the UNIT parts of [0, 1).
        self._offset = torch.tensor(0.5 + 0.5 / UNIT, dtype=torch.float32, device=device)

    def measure(self, vector: Tensor) -> Tensor:
        """Return the largest magnitude of each parameter after clipping, float64 ``[count]``.

        The variance is that of the parameter's elements in this vector, divided by their number, in float64.
        """
        largest = torch.zeros(self.count, dtype=torch.float64, device=vector.device)
        sums, squares = torch.zeros_like(largest), torch.zeros_like(largest)
        for parts in self._parts:
            for number, _, elements in parts:
                part = vector[elements]
                low, high = torch.aminmax(part)
                torch.maximum(largest[number], torch.maximum(-low, high), out=largest[number])
                if self._clip is not None:  # relative to the first element, so that equal ones have variance 0
                    wide = self._wide[: len(part)].copy_(part).sub_(vector[self._firsts[number]])
                    sums[number] += wide.sum()
                    squares[number] += torch.dot(wide, wide)
        if self._clip is None:
            return largest
        variances = squares.sub_(sums.square_().div_(self._numels)).div_(self._numels)
        clipped = torch.minimum(largest, variances.clamp_(min=0).sqrt_().mul_(self._clip))
        return torch.where((variances > 0) & (self._numels >= FEW), clipped, largest)

    def round(
        self, vector: Tensor, piece: int, scales: Tensor, factors: Tensor, bounds: Tensor | None, stream: Stream
    ) -> Tensor:
        """Subtract ``scale * b`` from every element; b is -1, 0 or 1, and ``scale * b`` the bounded element on average.

        Args:
            vector: float32, the whole vector.
            piece: index of the piece to round.
            scales: float32 ``[count]``.
            factors: float32 ``[count]``: ``UNIT / scale``, rounded down.
            bounds: float32 ``[count]``, at which elements times their factors are clipped; None if none is larger.
            stream: of random bits.

        Returns:
            uint8 ``b + 1`` of the piece's elements, in shared memory, with zeros up to a multiple of 5 and of 8.
        """
        elements, parts = self.pieces[piece], self._parts[piece]
        numel = elements.stop - elements.start
        floats = self._floats[:numel]
        for number, place, part in parts:
            scaled = torch.mul(vector[part], factors[number], out=floats[place])
            if bounds is not None:
                torch.minimum(scaled, bounds[number], out=scaled)
                torch.maximum(scaled, -bounds[number], out=scaled)
        random = self._random.draw(stream.key, elements.start, numel, stream.offset)
        if floats.device.type == "cpu":  # torch would allocate a cast of the random numbers
            np.add(floats.numpy(), random.numpy(), out=floats.numpy())
        else:
            floats.add_(random)
        torch.add(self._offset, floats, alpha=1 / UNIT, out=floats).floor_()
        for number, place, part in parts:
            vector[part].addcmul_(floats[place], scales[number], value=-1)
        codes = self._codes[: 40 * (-(-numel // 40))]
        codes.view(torch.int8)[:numel].copy_(floats)
        codes.add_(1)
        codes[numel:] = 0
        return codes

    def codes(self, piece: int) -> Tensor:
        """Return shared memory for the numbers that ``round`` returns, to unpack a message into."""
        elements = self.pieces[piece]
        return self._codes[: 40 * (-(-(elements.stop - elements.start) // 40))]

    def add(self, out: Tensor, piece: int, codes: Tensor, zero: int, steps: Tensor) -> None:
        """Add ``step * (code - zero)`` to the piece's elements.

        Args:
            out: float32, the whole vector.
            piece: index of the piece.
            codes: uint8 or int32, at least as long as the piece; overwritten.
            zero: the code of 0.
            steps: float32 ``[count]``.
        """
        elements, parts = self.pieces[piece], self._parts[piece]
        numel = elements.stop - elements.start
        codes.sub_(zero)  # uint8 wraps
        floats = self._floats[:numel].copy_((codes.view(torch.int8) if codes.dtype == torch.uint8 else codes)[:numel])
        for number, place, part in parts:
            out[part].addcmul_(floats[place], steps[number])


def pack_digits(codes: Tensor, radix: int, digits: int, words: Tensor) -> None:
    """Pack numbers below ``radix``: word j gets digit i, worth ``radix^i``, from ``codes[i * len(words) + j]``.

    In this order, one operation handles the same digit of all words.

    Args:
        codes: uint8, contiguous, up to ``digits * len(words)``; missing ones count as 0.
        radix: number of values of a digit.
        digits: digits in a word; ``radix^digits`` must fit the dtype of the words.
        words: uint8 or int32, contiguous, overwritten.
    """
    words.zero_()
    for digit in reversed(range(digits)):
        part = codes[digit * len(words) : (digit + 1) * len(words)]
        words.mul_(radix)
        words[: len(part)].add_(part)


def unpack_digits(words: Tensor, radix: int, digits: int, codes: Tensor) -> None:
    """Read numbers back; see ``pack_digits``.

    Args:
        words: uint8 or int32.
        radix: as for packing.
        digits: as for packing.
        codes: of the same dtype, contiguous; overwritten. It may be shorter than all digits.
    """
    rest, quotients = (
        scratch(f"{name} {words.dtype}", len(words), words.dtype, words.device) for name in ("rest", "quotients")
    )
    rest.copy_(words)
    for digit in range(digits):
        part = codes[digit * len(words) : (digit + 1) * len(words)]
        if words.device.type == "cpu":  # NumPy multiplies vectors; torch divides one by one
            np.floor_divide(rest.numpy(), radix, out=quotients.numpy())
        else:
            torch.div(rest, radix, rounding_mode="floor", out=quotients)
        part.copy_(rest.sub_(quotients, alpha=radix)[: len(part)])
        rest, quotients = quotients, rest


def _overlaps(piece: slice, segments: list[slice]) -> list[tuple[int, slice, slice]]:
    """Return the segments with elements in a piece: (index, slice of the piece, slice of the vector)."""
    overlaps = []
    for number, segment in enumerate(segments):
        start, stop = max(piece.start, segment.start), min(piece.stop, segment.stop)
        if start < stop:
            overlaps.append((number, slice(start - piece.start, stop - piece.start), slice(start, stop)))
    return overlaps
