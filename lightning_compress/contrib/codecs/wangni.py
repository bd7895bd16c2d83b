"""Unbiased sparsification: keeps every element with a probability proportional to its magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan, check_density
from lightning_compress.codecs.packing.entries import Entries, EntriesPlan, Found
from lightning_compress.codecs.packing.positions import Ints, Rice
from lightning_compress.codecs.packing.values import Floats, FloatValues, OneMagnitude
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import FACTORS, GAMMA, SHIFTS, RandomBits, mix
from lightning_compress.core.workspace import CHUNK, pieces, scratch

ROUNDS = 8
"""Most iterations to find lambda; two or three suffice unless a few elements are very large."""
DEVIATIONS = 4
"""A message has room for this many standard deviations above the expected number of elements."""
SMALLEST, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Wangni(Codec):
    """Keep element ``v`` with probability ``p = min(1, lambda |v|)`` and send ``v / p``; unbiased.

    lambda is chosen so that a share of ``density`` is kept on average. Of all unbiased methods that keep this share, it
    has the smallest variance, ``sum v^2 (1 / p - 1)``. A uniformly random choice has ``(1 / density - 1)`` times the
    squared norm. Elements with p = 1 are sent exactly. All others are sent with magnitude ``1 / lambda``, and cost a
    position and a sign. The difference stays in the vector; error feedback, off by default, would send it later. No
    state.

    lambda is found by the paper's greedy algorithm. It starts at ``density * numel / sum |v|``. Each iteration counts
    the elements with p = 1 and scales the others to make up the rest, until no further element reaches 1, or 8 times.
    ``1 / lambda`` is at least 2^-126. p is compared with 32 random bits. Messages vary in length. They hold Golomb-Rice
    codes of the gaps between elements with p = 1, and these as float32; then the codes of the others, ``1 / lambda`` as
    float32, and their signs as bits (see ``positions`` and ``values``). A message has room for the expected number plus
    four standard deviations; the last elements beyond it stay in the vector. Encoding runs on the host; an accelerator
    waits for it.

    Args:
        density: share of the elements that is kept on average, in (0, 1]; 1 sends everything.

    Raises:
        ValueError: density is out of range.

    Wangni, Wang, Liu, Zhang, "Gradient Sparsification for Communication-Efficient Distributed Optimization", NeurIPS
    2018, arXiv 1710.09854.
    """

    name: ClassVar[str] = "wangni"
    sparse: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    density: float = 0.1

    def __post_init__(self) -> None:
        check_density("Wangni", self.density, "0.1 keeps 10 % on average")

    @property
    def safe_with_adam(self) -> bool:
        """See ``Codec``: from density 0.5 on. The relative variance, up to 1 / density - 1, is then at most 1."""
        return self.density >= 0.5

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return self.density

    def refined(self, ranks: int) -> Codec:
        """See ``Codec.refined``: as many elements as all ranks send if no two send the same."""
        return replace(self, density=min(1.0, ranks * self.density))

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; messages are not summed, so ``summands`` has no effect."""
        return _WangniPlan(layout, self.density)


class _WangniPlan(EntriesPlan):
    def __init__(self, layout: Layout, density: float) -> None:
        numel, self._target = layout.numel, density * layout.numel
        self._certain = min(numel, math.floor(self._target) + 1)
        self._likely = min(numel, math.ceil(self._target + DEVIATIONS * math.sqrt(self._target)))
        likely = Entries(Rice(numel, self._likely), OneMagnitude(1), [numel])
        exact = Entries(Rice(numel, self._certain), FloatValues(1, np.float32), [numel])
        super().__init__(layout, [exact, likely], likely.size + 64)
        cpu = torch.device("cpu")
        self._magnitude = scratch("wangni magnitude", CHUNK, torch.float32, cpu).numpy()
        self._mask = scratch("wangni mask", CHUNK, torch.bool, cpu).numpy()
        self._random = RandomBits(CHUNK, cpu)

    def _find(self, vector: Tensor, key: int) -> Sequence[Found]:
        source = vector.cpu().numpy()
        if self._target >= len(source):
            positions = np.flatnonzero(source)
            return [(positions, source[positions]), (positions[:0], source[:0])]
        level = self._level(source)
        positions = self._draw(source, level, key)
        exact = np.abs(source[positions]) >= level
        certain, likely = positions[exact][: self._certain], positions[~exact][: self._likely]
        return [(certain, source[certain]), (likely, np.copysign(level, source[likely]))]

    def _level(self, source: Floats) -> np.float32:
        """Return 1 / lambda."""
        total, count = self._sum(source), 0
        level = max(total / self._target, SMALLEST)
        for _ in range(ROUNDS):
            large, more = self._larger(source, level)
            if more == count or more >= self._target or large >= total:
                break
            count, level = more, max(min(level, (total - large) / (self._target - more)), SMALLEST)
        return np.float32(min(level, LARGEST))

    def _sum(self, source: Floats) -> float:
        return math.fsum(
            float(np.abs(source[piece], out=self._magnitude[: piece.stop - piece.start]).sum(dtype=np.float64))
            for piece in pieces(len(source), CHUNK)
        )

    def _larger(self, source: Floats, level: float) -> tuple[float, int]:
        """Return the sum and the number of the magnitudes that reach the level."""
        total, count = 0.0, 0
        for piece in pieces(len(source), CHUNK):
            magnitude = np.abs(source[piece], out=self._magnitude[: piece.stop - piece.start])
            mask = np.greater_equal(magnitude, np.float32(min(level, LARGEST)), out=self._mask[: len(magnitude)])
            hits = np.flatnonzero(mask)
            total, count = total + float(magnitude[hits].sum(dtype=np.float64)), count + len(hits)
        return total, count

    def _draw(self, source: Floats, level: np.float32, key: int) -> Ints:
        """Return the positions of the elements that are kept."""
        by_piece = [np.empty(0, np.int64)]
        for piece in pieces(len(source), CHUNK):
            numel = piece.stop - piece.start
            random = self._random.draw(key, piece.start, numel).numpy()  # from -32768 to 32767
            scaled = np.abs(source[piece], out=self._magnitude[:numel])
            with np.errstate(over="ignore", invalid="ignore"):  # 65536 / level may be infinite
                np.multiply(scaled, np.float32(65536 / float(level)), out=scaled)
            np.subtract(scaled, np.float32(32767), out=scaled)  # a quick test that drops most elements
            places = np.flatnonzero(np.less_equal(random, scaled, out=self._mask[:numel]))
            positions = places + piece.start
            chances = np.abs(source[positions]).astype(np.float64) / float(level)
            upper = random[places].astype(np.float64) + 32768
            chosen = (upper + (_more_bits(key, positions) + 0.5) / 65536) / 65536 < chances
            by_piece.append(positions[chosen])
        return np.concatenate(by_piece)


def _more_bits(key: int, positions: Ints) -> npt.NDArray[np.uint64]:
    """Return 16 more random bits for each position: the highest bits of splitmix64 with another key."""
    state = positions.astype(np.uint64) * np.uint64(GAMMA) + np.uint64(mix(key, 1))
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return (state ^ (state >> np.uint64(SHIFTS[-1]))) >> np.uint64(48)
