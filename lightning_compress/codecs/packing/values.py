"""Codings of the values of the few elements that a sparse message holds, all on the host in NumPy.

The elements belong to parts (parameters); codings of 1 and 2 bits have levels for each part, means in float64, which
are sent as float32 before the codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_compress.codecs.packing.planes import code_bytes, pack_codes, unpack_codes
from lightning_compress.codecs.variable import Bytes, damaged, take

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
HALF = 65504.0
"""The largest float16."""


class Values(ABC):
    """A way to write down values.

    Args:
        parts: of how many parts there may be elements.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts

    @abstractmethod
    def size(self, count: int) -> int:
        """Bytes that so many values take."""

    @abstractmethod
    def write(self, values: Floats, counts: Ints, body: Bytes) -> Floats:
        """Write values at the beginning of ``body``.

        Args:
            values: float32 ``[n]``, those of the first part first.
            counts: how many are of each part.
            body: uint8, ``size(n)`` or more.

        Returns:
            What ``read`` will make of them.
        """

    @abstractmethod
    def read(self, body: Bytes, counts: Ints) -> Floats:
        """Read values from the beginning of ``body``.

        Raises:
            ValueError: there are too few bytes, or a number is not finite.
        """


class FloatValues(Values):
    """float32 exactly, or the nearest float16, at most 65504.

    Args:
        parts: of how many parts there may be elements.
        dtype: which.
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
        return _finite(take(body, size, "values").view(self._dtype).astype(np.float32))


class LevelValues(Values):
    """Codes of 1 or 2 bits that say which of a part's levels a value becomes, the first code lowest.

    Attributes:
        bits: of a code.
        stored: numbers that are sent for each part.
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
        data = take(body, self.size(count), "codes of values")
        levels = self._levels(_finite(data[:middle].view(np.float32).reshape(self.parts, self.stored)))
        codes = unpack_codes(data[middle:], count, self.bits)
        values: Floats = levels[np.repeat(np.arange(self.parts), counts), codes]
        return values

    @abstractmethod
    def _fit(self, values: Floats, parts: Ints) -> tuple[npt.NDArray[np.uint8], Floats]:
        """Codes of the values, and what is stored: float32 ``[parts, stored]``."""

    def _levels(self, numbers: Floats) -> Floats:
        """Levels ``[parts, 2^bits]`` from what is stored."""
        return numbers

    def _means(self, values: Floats, groups: Ints, width: int) -> npt.NDArray[np.float64]:
        """Mean of each group, in float64, 0 where there is none: ``[parts, width]``."""
        sums = np.bincount(groups, values.astype(np.float64), self.parts * width)
        return (sums / np.maximum(np.bincount(groups, minlength=self.parts * width), 1)).reshape(-1, width)


class OneMagnitude(LevelValues):
    """A sign each, and for each part the mean of the magnitudes."""

    stored: ClassVar[int] = 1

    def _fit(self, values: Floats, parts: Ints) -> tuple[npt.NDArray[np.uint8], Floats]:
        return (values < 0).astype(np.uint8), self._means(np.abs(values), parts, 1).astype(np.float32)

    def _levels(self, numbers: Floats) -> Floats:
        return np.concatenate([numbers, -numbers], axis=1)


class FourMeans(LevelValues):
    """Four buckets for each part: of either sign what is below the mean of its magnitudes, and the others; their means.

    Code 0 is small and positive, 1 small and negative, 2 large and positive, 3 large and negative.
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
