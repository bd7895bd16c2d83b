"""TernGrad with scales that all ranks share, so that an all-reduce can add integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs.quantize.levels import UNIT, fit
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.contrib.codecs.ternary import Ternary, pack_digits, unpack_digits
from lightning_compress.contrib.codecs.terngrad import check_clip
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import Stream, mix
from lightning_compress.core.state import States
from lightning_compress.reducers.reducer import Reducer, ReducerPlan

WORD = 2**31
"""Words are int32; only non-negative numbers are used."""


@dataclass(frozen=True)
class TernGradShared(Reducer):
    """Average ``s * sign(v) * b`` with random bits b that are 1 with probability ``min(|v|, c * sigma) / s``.

    The scale s of a parameter is the largest magnitude on any rank, after each rank has clipped its gradient at c of
    its own standard deviations (as in TernGrad, there is no clipping at a deviation of 0 or below 64 elements). So the
    sum over W ranks is s times an integer from -W to W, and the mean is unbiased for the clipped gradients, to 2^-17 of
    s. Rounding noise is independent between ranks. The errors of clipping and rounding stay in the vector; error
    feedback, off by default, would send them later. A parameter whose scale is below 2^-111 (4e-34) sends 0 and
    stays in the vector; without error feedback, it counts as zero. No state.

    The ranks agree on scales by an all-reduce (maximum) of one float32 for each parameter. ``sign * b + 1`` are digits
    in base ``2 W + 1`` of int32 words, so an all-reduce of words never carries from one digit to the next. A word holds
    as many digits as fit: 13 for 2 ranks, 9 for 4, 7 for 8, 6 for 16. That is ``32 / digits`` bits per element, close
    to the paper's ``log2(2 W + 1)``: 2.46, 3.56, 4.57, 5.33. Digits are packed in runs of 163,840 elements: in a run of
    n, word j of ``m = ceil(n / digits)`` has elements j, ``m + j``, ``2 m + j`` and so on, the first one lowest.
    ``carried`` is summed as float32 in a separate all-reduce. A rank sends ``2 (W - 1) / W`` times all that.

    Args:
        clip: c, in standard deviations, above 0. The paper uses 2.5; None switches clipping off.

    Raises:
        ValueError: clip is out of range, or (from ``plan``) there are more than 23,169 ranks: a word would then hold
            only one sum, which saves nothing.

    Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning", NIPS 2017, arXiv 1705.07878 (scaler sharing, gradient clipping, layer-wise ternarizing).
    """

    name: ClassVar[str] = "terngrad_shared"
    keeps_zeros: ClassVar[bool] = True
    clip: float | None = 2.5

    def __post_init__(self) -> None:
        check_clip("TernGradShared", self.clip)

    @property
    def safe_with_adam(self) -> bool:
        """See ``Reducer``: not known to be. Rounding is coarse, and Adam divides by the gradient's size."""
        return False

    def plan(self, layout: Layout, carried: int, world: World, states: States) -> ReducerPlan:
        """See ``Reducer.plan``."""
        return _TernGradSharedPlan(layout, carried, world, self.clip)


def digits_of(ranks: int) -> int:
    """Return the number of sums in a word: the largest d with ``(2 ranks + 1)^d <= 2^31``.

    Raises:
        ValueError: d is less than 2.
    """
    digits = 0
    while (2 * ranks + 1) ** (digits + 1) <= WORD:
        digits += 1
    if digits < 2:
        raise ValueError(
            f"terngrad_shared: {ranks} ranks are too many: with more than 23,169, a word holds only one sum, which "
            "saves nothing; use compressor='terngrad'"
        )
    return digits


class _TernGradSharedPlan(ReducerPlan):
    def __init__(self, layout: Layout, carried: int, world: World, clip: float | None) -> None:
        collective, device, self._meter = world
        self._collective = collective
        self._clips = clip is not None
        self._digits = digits_of(collective.size)
        self._ternary = Ternary(layout, device, clip)
        self._places: list[slice] = []  # words of each piece
        count = 0
        for piece in self._ternary.pieces:
            words = -(-(piece.stop - piece.start) // self._digits)
            self._places.append(slice(count, count + words))
            count += words
        self._words = torch.empty(count, dtype=torch.int32, device=device)
        most = max((piece.stop - piece.start for piece in self._ternary.pieces), default=0)
        self._sums = torch.empty(most, dtype=torch.int32, device=device)
        self._scales = torch.empty(self._ternary.count, dtype=torch.float32, device=device)
        self.bytes_sent = sum(
            all_reduce_bytes(4 * numbers, collective.size) for numbers in (self._ternary.count, count, carried)
        )
        self.rounds = (2 + bool(carried)) * all_reduce_rounds(collective.size)

    def mean(self, vector: Tensor, out: Tensor, carried: Tensor, key: int) -> None:
        if carried.numel():
            self._collective.all_reduce(carried)
        if not self._words.numel():
            return
        with self._meter.encode:
            own = self._ternary.measure(vector)
            self._scales.copy_(own)
        self._collective.all_reduce(self._scales, "max")
        scales, factors = fit(self._scales.double(), 1.0)
        with self._meter.encode:
            stream = Stream(mix(key, self._collective.rank))
            bounds = own.mul_(factors).float().clamp_(max=UNIT) if self._clips else None
            for number, place in enumerate(self._places):
                codes = self._ternary.round(vector, number, scales, factors, bounds, stream)
                pack_digits(codes, 2 * self._collective.size + 1, self._digits, self._words[place])
        self._collective.all_reduce(self._words)
        with self._meter.decode:
            steps = scales / self._collective.size
            for number, (piece, place) in enumerate(zip(self._ternary.pieces, self._places, strict=True)):
                sums = self._sums[: piece.stop - piece.start]
                unpack_digits(self._words[place], 2 * self._collective.size + 1, self._digits, sums)
                out[piece] = 0.0
                self._ternary.add(out, number, sums, self._collective.size, steps)
