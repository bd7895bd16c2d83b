"""Adaptive quantisation: sends the largest positive and negative elements of each parameter as their two means."""

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
from lightning_compress.codecs.packing.entries import Entries, EntriesPlan, Found
from lightning_compress.codecs.packing.positions import Ints, positions_of
from lightning_compress.codecs.packing.values import Floats, LevelValues
from lightning_compress.codecs.sparse.selection import sample_of
from lightning_compress.contrib.codecs.crossings import Crossings
from lightning_compress.core.layout import Layout

Indices = Literal["rice", "int16"]
TINY = float(np.finfo(np.float32).smallest_subnormal)
SURPLUS = 4
"""A message has room for this many times the expected number of elements; the rest is dropped."""


class TwoMeans(LevelValues):
    """A sign for each element, and for each part the mean of its values >= 0 and the mean of the others."""

    stored: ClassVar[int] = 2

    def _fit(self, values: Floats, parts: Ints) -> tuple[npt.NDArray[np.uint8], Floats]:
        codes = (values < 0).astype(np.uint8)
        return codes, self._means(values, 2 * parts + codes, 2).astype(np.float32)


@dataclass(frozen=True)
class Adaptive(Codec):
    """Send the largest 1 / ``proportion`` of a parameter's positive and of its negative elements, as their means.

    For a parameter with P positive and N negative elements, the thresholds are its
    ``max(1, floor(P / proportion))``-th largest and its ``max(1, floor(N / proportion))``-th smallest element. With
    more than 4096 elements, they come from a strided sample, whose offset is drawn from the key; if the sample has
    only one sign, the other sign gets the same threshold. Elements that reach a threshold are sent as their mean, one
    mean for each sign of each parameter, computed in float64. ``v - mean`` stays in the vector, and so do all other
    elements. If more than 4 times the target reach a threshold (many equal elements, an unlucky sample), the last ones
    are not sent. Zeros are never sent. The method is biased and needs error feedback.

    Messages vary in length. They hold the positions, as Golomb-Rice codes of their gaps or as 16-bit numbers in blocks
    of 65536 (see ``positions``), then the two means of each parameter as float32, then the signs as bits. At one in 32,
    a sent element takes 1 + 6.5 bits, or 1 + 16. Encoding runs on the host; an accelerator waits for it.

    Args:
        proportion: sends one in ``proportion`` elements; 1 or more. The default is that of the authors' library, LBANN.
        indices: "rice" or "int16".

    Raises:
        ValueError: a setting is out of range.

    Dryden, Moon, Jacobs, Van Essen, "Communication Quantization for Data-Parallel Training of Deep Neural Networks",
    MLHPC 2016 (per column of a matrix; here per parameter).
    """

    name: ClassVar[str] = "adaptive"
    contractive: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    proportion: float = 32.0
    indices: Indices = "rice"

    def __post_init__(self) -> None:
        proportion = self.proportion
        if isinstance(proportion, bool) or not isinstance(proportion, (int, float)) or not 1 <= proportion < math.inf:
            raise ValueError(
                f"Adaptive(proportion={self.proportion!r}): proportion must be 1 or more; 32 sends one in 32"
            )
        if self.indices not in get_args(Indices):
            raise ValueError(f"Adaptive(indices={self.indices!r}): indices must be one of 'rice', 'int16'")

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return 1 / self.proportion

    @property
    def rounds(self) -> bool:
        """See ``Codec``."""
        return True

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; messages are not summed, so ``summands`` has no effect."""
        return _AdaptivePlan(layout, self)


class _AdaptivePlan(EntriesPlan):
    def __init__(self, layout: Layout, codec: Adaptive) -> None:
        self._proportion = codec.proportion
        parts = [slice(segment.offset, segment.end) for segment in layout.segments if segment.numel]
        targets = [max(2, math.ceil((part.stop - part.start) / codec.proportion)) for part in parts]
        self._parts = [
            (part, min(part.stop - part.start, SURPLUS * target)) for part, target in zip(parts, targets, strict=True)
        ]
        positions = positions_of(codec.indices, layout.numel, sum(most for _, most in self._parts))
        values = TwoMeans(len(parts))
        entries = Entries(positions, values, [part.stop for part in parts])
        usual = positions_of(codec.indices, layout.numel, sum(targets)).size + values.size(sum(targets))
        super().__init__(layout, [entries], usual)
        self._crossings = Crossings()

    def _find(self, vector: Tensor, key: int) -> Sequence[Found]:
        source = vector.cpu().numpy()
        by_part = []
        for part, most in self._parts:
            low, high = self._thresholds(source[part], key)
            by_part.append(self._crossings.find(source[part], low, high, most) + part.start)
        positions = np.concatenate(by_part)
        return [(positions, source[positions])]

    def _thresholds(self, part: Floats, key: int) -> tuple[float, float]:
        """Return the largest negative and the smallest positive number to send.

        If the sample has only one sign, both thresholds are equal. If it has only zeros, all nonzero elements are sent.
        """
        target = max(1, int(len(part) / self._proportion))
        where = sample_of(len(part), target, key)
        some = 0 < round(target * len(where) / len(part)) < len(where)
        sample = part[where.start : where.stop : where.step] if some else part
        high, low = self._threshold(sample[sample > 0]), self._threshold(-sample[sample < 0])
        high, low = high or low or TINY, low or high or TINY
        return -low, high

    def _threshold(self, magnitudes: Floats) -> float:
        """Return the smallest magnitude to send, or 0 if there are no magnitudes."""
        if not len(magnitudes):
            return 0.0
        place = len(magnitudes) - max(1, int(len(magnitudes) / self._proportion))
        return float(np.partition(magnitudes, place)[place])
