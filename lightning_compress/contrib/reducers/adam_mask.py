"""Sends the elements with the largest momentum, which all ranks know without exchanging indices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_compress.collectives import World
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import PER_WORD, RandomBits, draw_places
from lightning_compress.core.state import States, StateSpec
from lightning_compress.core.workspace import scratch
from lightning_compress.reducers.reducer import Reducer, ReducerPlan

Rest = Literal["residual", "moment"]


@dataclass(frozen=True)
class AdamMask(Reducer):
    """Average the elements with the largest moment of past gradients, in one all-reduce of values without indices.

    The moment ``m <- beta m + (1 - beta) mean`` is Adam's first moment, the same on all ranks. A step sends
    ``k = ceil(density n)`` of n elements. ``round(explore k)`` of them are random (at least one, unless explore is 0),
    one in each of equally long intervals, and the same on all ranks. The others have the largest ``|m|``. Random
    elements are needed because the moment of an element that is never sent decays, so that it would never be sent.
    While m is 0, as in the first step, everything is sent. The optimizer gets the mean of the sent elements. For all
    other elements it gets:

    * ``rest="residual"``: 0. What was not sent is sent later by error feedback, as for other sparse methods, and is
      conserved as with these.
    * ``rest="moment"``: m, so that Adam's moment does not change. What was not sent is dropped. Nothing is conserved,
      and error feedback is refused. It is meant for Adam with the same beta.

    Bits per element: ``32 density`` for any number of ranks; an all-reduce of float32 times the density. State:
    ``moment``, float32, the same on all ranks; with its second buffer 8 bytes for each parameter.

    Args:
        density: share of the elements that is sent, in (0, 1].
        explore: share of these that is random, in [0, 1].
        rest: "residual" or "moment".
        beta: of the moment, in [0, 1); as Adam's first beta.

    Raises:
        ValueError: a setting is out of range.

    Our own method, after the idea of "SCAPE" (arXiv 2607.01678, of which only the abstract was read): a mask can follow
    from what the optimizer knows.
    """

    name: ClassVar[str] = "adam_mask"
    follows_optimizer: ClassVar[bool] = True
    density: float = 0.02
    explore: float = 0.1
    rest: Rest = "residual"
    beta: float = 0.9

    def __post_init__(self) -> None:
        for name, least, value in (("density", "(0, 1]", self.density), ("explore", "[0, 1]", self.explore)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1 or (least[0] == "(" and not value):
                raise ValueError(f"AdamMask({name}={value!r}): {name} must be in {least}")
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 0 <= self.beta < 1:
            raise ValueError(f"AdamMask(beta={self.beta!r}): beta must be in [0, 1), as Adam's first; try 0.9")
        if self.rest not in get_args(Rest):
            raise ValueError(f"AdamMask(rest={self.rest!r}): rest must be one of 'residual', 'moment'")

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        """See ``Reducer``: only with a residual."""
        return self.rest == "residual"

    @property
    def conserves(self) -> bool:  # type: ignore[override]
        """See ``Reducer``: only with a residual."""
        return self.rest == "residual"

    @property
    def safe_with_adam(self) -> bool:
        """See ``Reducer``: not known to be."""
        return False

    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """See ``Reducer``: the moment."""
        return {"moment": StateSpec(layout, "shared")}

    def plan(self, layout: Layout, carried: int, world: World, states: States) -> ReducerPlan:
        """See ``Reducer.plan``."""
        return _Plan(self, layout, carried, world, states)


class _Plan(ReducerPlan):
    def __init__(self, settings: AdamMask, layout: Layout, carried: int, world: World, states: States) -> None:
        self._collective, device, self._meter = world
        self._settings, self._moment = settings, states["moment"]
        numel = layout.numel
        self._count = math.ceil(settings.density * numel)
        self._drawn = max(round(settings.explore * self._count), 1 if settings.explore else 0)
        self._begun = 0
        self._sizes = scratch("mask sizes", numel, torch.float32, device)
        self._random = RandomBits(PER_WORD * self._drawn, device)
        first = torch.arange(self._drawn, dtype=torch.int64, device=device)
        self._starts = first * numel // max(1, self._drawn)
        self._lengths = (first + 1) * numel // max(1, self._drawn) - self._starts
        self._places = torch.empty(self._count, dtype=torch.int64, device=device)
        self._carried, self._device = carried, device
        self._values = torch.empty(carried + self._count, dtype=torch.float32, device=device)
        self.bytes_sent = all_reduce_bytes(4 * len(self._values), self._collective.size)
        self.rounds = all_reduce_rounds(self._collective.size)

    def mean(self, vector: Tensor, out: Tensor, carried: Tensor, key: int) -> None:
        base, beta = self._moment.base(), self._settings.beta
        # checked only until the moment is not 0: the check waits for the device
        if self._begun != self._moment.resets and (bool(self._moment.committed.any()) or not len(vector)):
            self._begun = self._moment.resets
        if self._begun == self._moment.resets and self._count < len(vector):
            self._chosen(base, key)
            torch.index_select(vector, 0, self._places, out=self._values[self._carried :])
            self._add_up(self._values, carried)
            if self._settings.rest == "moment":
                out.copy_(base)
            else:
                out.zero_()
            out.index_copy_(0, self._places, self._values[self._carried :])
            vector.index_fill_(0, self._places, 0.0)
        else:
            self._add_up(whole := torch.cat([carried, vector]), carried)
            out.copy_(whole[self._carried :])
            vector.zero_()
        torch.mul(base, beta, out=self._moment.pending).add_(out, alpha=1 - beta)

    def _add_up(self, values: Tensor, carried: Tensor) -> None:
        """All-reduce ``carried`` and ``values`` together: ``carried`` is summed, ``values`` are averaged."""
        values[: self._carried] = carried
        self._collective.all_reduce(values)
        carried.copy_(values[: self._carried])
        values[self._carried :].mul_(1 / self._collective.size)

    def _chosen(self, moment: Tensor, key: int) -> None:
        """Write the positions of the elements to send: the random ones first, then those with the largest moment."""
        with self._meter.encode:
            sizes = torch.abs(moment, out=self._sizes)
            if self._drawn:
                places = self._places[: self._drawn]
                drawn = draw_places(self._random, key, self._starts, self._lengths, places)
                sizes.index_fill_(0, drawn, -1.0)
            if self._drawn < self._count:
                self._places[self._drawn :] = torch.topk(sizes, self._count - self._drawn, sorted=False).indices
