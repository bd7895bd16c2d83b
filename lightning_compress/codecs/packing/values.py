"""Codings of the values of a sparse message's elements, in NumPy on the host.

The elements belong to parts (parameters). Codings of 1 and 2 bits have levels for each part: means, computed in float64
and sent as float32 before the codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_compress.codecs.packing.bits import Bytes, damaged, prefix
from lightning_compress.codecs.packing.planes import code_bytes, pack_codes, unpack_codes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
HALF = 65504.0
"""The largest float16."""


class Values(ABC):
    """Base of codings of values.

    Args:
        parts: number of parts that the elements may belong to.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts

    @abstractmethod
    def size(self, count: int) -> int:
        """Return the number of bytes of ``count`` values."""

    @abstractmethod
    def write(self, values: Floats, counts: Ints, body: Bytes) -> Floats:
        """Write values at the beginning of ``body``.

        Args:
            values: float32 ``[n]``, ordered by part.
            counts: int64 ``[parts]``, number of values of each part.
            body: uint8, at least ``size(n)`` bytes.

        Returns:
            The values that ``read`` will return.
        """

    @abstractmethod
    def read(self, body: Bytes, counts: Ints) -> Floats:
        """Read values from the beginning of ``body``.

        Raises:
            ValueError: there are too few bytes, or a value is not finite.
        """


class FloatValues(Values):
    """Values as float32, exact, or as float16, rounded to nearest and at most 65504 in magnitude.

    Args:
        parts: see ``Values``.
        dtype: float32 or float16.
    """

    def __init__(self, parts: int, dtype: type[np.float32] | type[np.float16]) -> None:
        super().__init__(parts)
        self._dtype: np.dtype[Any] = np.dtype(dtype)

    def size(self, count: int) -> int:
        """See ``Values.size``."""
        return self._dtype.itemsize * count

    def write(self, values: Floats, counts: Ints, body: Bytes) -> Floats:
        """See ``Values.write``."""
        if self._dtype.itemsize == 2:
            values = np.clip(values, -HALF, HALF)
        sent = values.astype(self._dtype)
        body[: sent.nbytes] = sent.view(np.uint8)
        return sent.astype(np.float32)

    def read(self, body: Bytes, counts: Ints) -> Floats:
        """See ``Values.read``."""
        size = self.size(int(counts.sum()))
        return _finite(prefix(body, size, "values").view(self._dtype).astype(np.float32))


class LevelValues(Values):
    """Base of codings that replace a value by one of its part's levels, by a code of 1 or 2 bits, the first lowest.

    Attributes:
        bits: bits of a code.
        stored: float32 numbers that are sent per part.
    """

    bits: ClassVar[int] = 1
    stored: ClassVar[int]

    def size(self, count: int) -> int:
        """See ``Values.size``."""
        return 4 * self.stored * self.parts + code_bytes(count, self.bits)

    def write(self, values: Floats, counts: Ints, body: Bytes) -> Floats:
        """See ``Values.write``."""
        parts = np.repeat(np.arange(self.parts), counts)
        codes, numbers = self._fit(values, parts)
        middle, end = 4 * self.stored * self.parts, self.size(len(values))
        body[:middle] = numbers.reshape(-1).view(np.uint8)
        body[middle:end] = pack_codes(codes, self.bits)
        sent: Floats = self._levels(numbers)[parts, codes]
        return sent

    def read(self, body: Bytes, counts: Ints) -> Floats:
        """See ``Values.read``."""
        count, middle = int(counts.sum()), 4 * self.stored * self.parts
        data = prefix(body, self.size(count), "codes of values")
        levels = self._levels(_finite(data[:middle].view(np.float32).reshape(self.parts, self.stored)))
        codes = unpack_codes(data[middle:], count, self.bits)
        values: Floats = levels[np.repeat(np.arange(self.parts), counts), codes]
        return values

    @abstractmethod
    def _fit(self, values: Floats, parts: Ints) -> tuple[npt.NDArray[np.uint8], Floats]:
        """Return the codes of the values, and the numbers to send: float32 ``[parts, stored]``."""

    def _levels(self, numbers: Floats) -> Floats:
        """Return the levels, float32 ``[parts, 2^bits]``, from the numbers that are sent."""
        return numbers

    def _means(self, values: Floats, groups: Ints, width: int) -> npt.NDArray[np.float64]:
        """Return the mean of each group, 0 for an empty group: float64 ``[parts, width]``."""
        sums = np.bincount(groups, values.astype(np.float64), self.parts * width)
        return (sums / np.maximum(np.bincount(groups, minlength=self.parts * width), 1)).reshape(-1, width)


class OneMagnitude(LevelValues):
    """One sign per value, and the mean magnitude of each part."""

    stored: ClassVar[int] = 1

    def _fit(self, values: Floats, parts: Ints) -> tuple[npt.NDArray[np.uint8], Floats]:
        return (values < 0).astype(np.uint8), self._means(np.abs(values), parts, 1).astype(np.float32)

    def _levels(self, numbers: Floats) -> Floats:
        return np.concatenate([numbers, -numbers], axis=1)


class FourMeans(LevelValues):
    """Four means per part: of the small and the large values of each sign.

    A value is small if its magnitude is below the mean magnitude of its sign. Code 0 is small and positive, 1 small and
    negative, 2 large and positive, 3 large and negative.
    """

    bits: ClassVar[int] = 2
    stored: ClassVar[int] = 4

    def _fit(self, values: Floats, parts: Ints) -> tuple[npt.NDArray[np.uint8], Floats]:
        signs = (values < 0).astype(np.uint8)
        means = np.abs(self._means(values, 2 * parts + signs, 2))
        codes = signs + 2 * (np.abs(values) >= means[parts, signs]).astype(np.uint8)
        return codes, self._means(values, 4 * parts + codes, 4).astype(np.float32)


def _finite(numbers: Floats) -> Floats:
    if not np.isfinite(numbers).all():
        raise damaged("a value is not finite")
    return numbers
