"""Threshold quantisation: sends one fixed step for every element that is larger than the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan
from lightning_compress.codecs.packing.bits import Bytes, prefix
from lightning_compress.codecs.packing.entries import Entries, EntriesPlan, Found
from lightning_compress.codecs.packing.positions import Int32, Ints, Rice
from lightning_compress.codecs.packing.values import Floats, LevelValues
from lightning_compress.contrib.codecs.crossings import Crossings
from lightning_compress.core.layout import Layout

Coding = Literal["rice", "words"]


class FixedLevels(LevelValues):
    """A sign for each element; its value is one of two constants.

    Args:
        positive: replaces a value >= 0.
        negative: replaces a value below 0.
    """

    stored: ClassVar[int] = 0

    def __init__(self, positive: float, negative: float) -> None:
        super().__init__(1)
        self._table = np.array([[positive, negative]], np.float32)

    def _fit(self, values: Floats, parts: Ints) -> tuple[npt.NDArray[np.uint8], Floats]:
        return (values < 0).astype(np.uint8), np.empty((1, 0), np.float32)

    def _levels(self, numbers: Floats) -> Floats:
        return self._table


@dataclass(frozen=True)
class Threshold(Codec):
    """Send ``tau_plus`` for every element ``v >= tau_plus``, ``-tau_minus`` for every ``v <= -tau_minus``.

    However large an element is, it sends one step. The rest stays in the vector and is sent in later steps. Smaller
    elements stay in the vector. So the method needs error feedback, and a threshold that suits the model: too large a
    threshold sends nothing, too small a one sends small steps of as many elements as fit. There is no rule for it. Look
    at the magnitudes of the gradients, or use ``adaptive``.

    Messages vary in length. With "words", they hold the number of elements as uint32, then ``position << 1 | sign`` of
    each as uint32; the sign is 1 for negative elements. With "rice", they hold Golomb-Rice codes of the gaps (see
    ``Rice``), then the signs as bits: 9.1 bits for each if one in 100 is sent. A message has room for ``capacity``. If
    more elements reach the thresholds, the search starts at a position that is drawn from the key, wraps around, and
    the elements after the last that fits stay in the vector. Encoding runs on the host; an accelerator waits for it.

    Args:
        tau_plus: the step upwards, above 0. The default is a placeholder.
        tau_minus: the step downwards, above 0.
        coding: "rice" or "words".
        capacity: share of the elements that fit into a message, in (0, 1].

    Raises:
        ValueError: a setting is out of range, or (from ``plan``) the vector has 2^31 elements or more.

    Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015 (words of a 31-bit
    index and a sign). Dryden, Moon, Jacobs, Van Essen, "Communication Quantization for Data-Parallel Training of Deep
    Neural Networks", MLHPC 2016 (whose library has Golomb-Rice codes of the gaps).
    """

    name: ClassVar[str] = "threshold"
    contractive: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    tau_plus: float = 0.001
    tau_minus: float = 0.001
    coding: Coding = "rice"
    capacity: float = 0.1

    def __post_init__(self) -> None:
        for field in ("tau_plus", "tau_minus"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 2.0**-126 <= value < 2.0**127:
                raise ValueError(f"Threshold({field}={value!r}): {field} must be a number above 0, such as 0.001")
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, (int, float)) or not 0 < self.capacity <= 1:
            raise ValueError(
                f"Threshold(capacity={self.capacity!r}): capacity must be in (0, 1]; 0.1 has room for 10 %"
            )
        if self.coding not in get_args(Coding):
            raise ValueError(f"Threshold(coding={self.coding!r}): coding must be one of 'rice', 'words'")

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``; the capacity, which is the most."""
        return self.capacity

    @property
    def rounds(self) -> bool:
        """See ``Codec``."""
        return True

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; messages are not summed, so ``summands`` has no effect."""
        return _ThresholdPlan(layout, self)


class _ThresholdPlan(EntriesPlan):
    def __init__(self, layout: Layout, codec: Threshold) -> None:
        if layout.numel >= 2**31:
            raise ValueError(
                f"Threshold: the vector has {layout.numel} elements, but positions end at 2^31 - 1; "
                "give parameters this large to another compressor by rules, such as 'rotated', or exclude them"
            )
        self._most = math.ceil(codec.capacity * layout.numel)
        self._high, self._low = (float(np.float32(tau)) for tau in (codec.tau_plus, -codec.tau_minus))
        levels = self._high, self._low
        entries: Entries = _Words(layout.numel, self._most, levels)
        if codec.coding == "rice":
            entries = Entries(Rice(layout.numel, self._most), FixedLevels(*levels), [layout.numel])
        super().__init__(layout, [entries], entries.size)
        self._crossings = Crossings()

    def _find(self, vector: Tensor, key: int) -> Sequence[Found]:
        source = vector.cpu().numpy()
        start = key % len(source)
        later = self._crossings.find(source[start:], self._low, self._high, self._most)
        first = self._crossings.find(source[:start], self._low, self._high, self._most - len(later))
        positions = np.concatenate([first, later + start])
        return [(positions, source[positions])]


class _Words(Entries):
    """Entries of one word each, with a position and a sign.

    Args:
        numel: length of the vector.
        most: largest number of entries.
        levels: values of a positive and of a negative element.
    """

    def __init__(self, numel: int, most: int, levels: tuple[float, float]) -> None:
        super().__init__(Int32(numel, most), FixedLevels(*levels), [numel])
        self.size = 4 + 4 * most
        self._levels = np.array(levels, np.float32)

    def write(self, found: Found, body: Bytes) -> tuple[Floats, int]:
        """See ``Entries.write``."""
        positions, values = found
        signs = (values < 0).astype(np.int64)
        end = 4 + 4 * len(positions)
        words = body[:end].view(np.uint32)
        words[0] = len(positions)
        words[1:] = positions << 1 | signs
        return self._levels[signs], end

    def read(self, body: Bytes) -> tuple[Found, int]:
        """See ``Entries.read``."""
        count = int(prefix(body, 4, "their number").view(np.uint32)[0])
        words = prefix(body, 4 + 4 * count, "words")[4:].view(np.uint32).astype(np.int64)
        self._positions.check(words >> 1)
        return (words >> 1, self._levels[words & 1]), 4 + 4 * count
