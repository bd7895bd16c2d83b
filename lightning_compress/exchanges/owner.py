"""What the owner of a shard does with the sum before it is encoded again: AdaGrad, in full precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import States, StateSpec
from lightning_compress.core.workspace import chunk_size, pieces, scratch
from lightning_compress.exchanges.exchange import Keeper
from lightning_compress.exchanges.message import Section

LARGEST = torch.finfo(torch.float32).max
"""Of a history: an infinite one would hold an element still for ever."""


@dataclass(frozen=True)
class OwnerAdaGrad(Keeper):
    """``out = mean / (sqrt(history) + eps)`` plus what the last encode left, in the shard that a rank owns.

    Args:
        eps: added to the root, above 0.

    Raises:
        ValueError: it is no such number.
    """

    eps: float

    replaces_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)) or not 0 < self.eps < math.inf:
            raise ValueError(
                f"TwoShot(adagrad={self.eps!r}): adagrad is what is added to the root of AdaGrad's history, above 0 "
                "(1e-8 is usual), or null for no AdaGrad"
            )

    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """The sum of all squared means, and what encoding left of what was made of them."""
        return {"history": StateSpec(layout, "owner"), "residual": StateSpec(layout, "owner")}

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Refuse anything but SGD.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(optimizer, SGD):
            raise ValueError(
                f"two_shot(adagrad={self.eps}) cannot be combined with {type(optimizer).__name__} (which has "
                f"{', '.join(names[:3])}): its learning rates would adapt twice; use torch.optim.SGD, or adagrad=None"
            )
        return None

    def plan(self, sections: Sequence[Section], world: World, states: States) -> OwnerStep:
        """Make ready for this rank's shards of these sections."""
        return OwnerStep(self.eps, sections, world, states)

    def adopted(self, sections: Sequence[Section], world: World, states: States) -> None:
        """Every element goes to its new owner; the others have 0, so that the sum is the old owner's number."""
        owned = _owned(sections, world)
        for state in states.values():
            for numbers in (state.committed, state.pending):
                everything = numbers.clone()
                world.collective.all_reduce(everything)
                numbers.zero_()
                for piece in owned:
                    numbers[piece] = everything[piece]


def _owned(sections: Sequence[Section], world: World) -> list[slice]:
    """Slices of the vector that this rank owns, in pieces that stay in a cache."""
    rank, size = world.collective.rank, world.collective.size
    return [
        slice(shard.start + piece.start, shard.start + piece.stop)
        for shard in (section.shard(rank, size) for section in sections)
        for piece in pieces(shard.layout.numel, chunk_size(world.device))
    ]


class OwnerStep:
    """AdaGrad made ready for the vectors of one group.

    Args:
        eps: see ``OwnerAdaGrad``.
        sections: what the vectors consist of.
        world: the ranks.
        states: what ``OwnerAdaGrad.state`` declared.
    """

    def __init__(self, eps: float, sections: Sequence[Section], world: World, states: States) -> None:
        self._eps, self._size = eps, world.collective.size
        self._history, self._residual = states["history"], states["residual"]
        self._pieces = _owned(sections, world)
        longest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        self._root = scratch("adagrad root", longest, torch.float32, world.device)

    def before(self, vector: Tensor) -> None:
        """The sum over the ranks, in the own shard of the vector, becomes what is to be sent."""
        old, left = self._history.base(), self._residual.base()
        for piece in self._pieces:
            values, history = vector[piece], self._history.pending[piece]
            values.div_(self._size)
            torch.addcmul(old[piece], values, values, out=history).clamp_(max=LARGEST)
            root = torch.sqrt(history, out=self._root[: len(values)])
            values.div_(root.add_(self._eps)).add_(left[piece])

    def after(self, vector: Tensor) -> None:
        """Take what was not sent out of the vector: it is no gradient."""
        for piece in self._pieces:
            self._residual.pending[piece] = vector[piece]
            vector[piece] = 0.0
