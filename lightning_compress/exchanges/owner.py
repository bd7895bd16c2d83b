"""AdaGrad in full precision, applied by the owner of a shard to the mean before it is encoded again."""

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
"""The largest value of a history: an infinite one would stop its element for ever."""


@dataclass(frozen=True)
class OwnerAdaGrad(Keeper):
    """``out = mean / (sqrt(history) + eps)``, plus the last step's encoding error, in each rank's own shard.

    Args:
        eps: added to the root, above 0.

    Raises:
        ValueError: eps is not a finite number above 0.
    """

    eps: float

    replaces_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)) or not 0 < self.eps < math.inf:
            raise ValueError(
                f"TwoShot(adagrad={self.eps!r}): use a finite number above 0, which is added to the root of AdaGrad's "
                "history (1e-8 is usual), or null for no AdaGrad"
            )

    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """Return the states: the sum of squared means, and the error of the last encode."""
        return {"history": StateSpec(layout, "owner"), "residual": StateSpec(layout, "owner")}

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Raise ValueError unless the optimizer is SGD."""
        if not isinstance(optimizer, SGD):
            raise ValueError(
                f"two_shot(adagrad={self.eps}) cannot be combined with {type(optimizer).__name__} (of "
                f"{', '.join(names[:3])}), as learning rates would adapt twice; use torch.optim.SGD, or adagrad=None"
            )
        return None

    def adopted(self, sections: Sequence[Section], world: World, states: States) -> None:
        """Move every element to its new owner. Non-owners hold 0, so that the sum is the old owner's value."""
        owned = _owned(sections, world)
        for state in states.values():
            for numbers in (state.committed, state.pending):
                everything = numbers.clone()
                world.collective.all_reduce(everything)
                numbers.zero_()
                for piece in owned:
                    numbers[piece] = everything[piece]


def _owned(sections: Sequence[Section], world: World) -> list[slice]:
    """Return the slices of the vector that this rank owns, in pieces that fit a cache."""
    rank, size = world.collective.rank, world.collective.size
    return [
        slice(shard.start + piece.start, shard.start + piece.stop)
        for shard in (section.shard(rank, size) for section in sections)
        for piece in pieces(shard.layout.numel, chunk_size(world.device))
    ]


class OwnerStep:
    """AdaGrad for the vectors of one group.

    Args:
        eps: see ``OwnerAdaGrad``.
        sections: what the vectors consist of.
        world: the ranks.
        states: the states that ``OwnerAdaGrad.state`` declared.
    """

    def __init__(self, eps: float, sections: Sequence[Section], world: World, states: States) -> None:
        self._eps, self._size = eps, world.collective.size
        self._history, self._residual = states["history"], states["residual"]
        self._pieces = _owned(sections, world)
        longest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        self._root = scratch("adagrad root", longest, torch.float32, world.device)

    def before(self, vector: Tensor) -> None:
        """Turn the sum over the ranks, in the rank's own shard of the vector, into the values to send."""
        old, left = self._history.base(), self._residual.base()
        for piece in self._pieces:
            values, history = vector[piece], self._history.pending[piece]
            values.div_(self._size)
            torch.addcmul(old[piece], values, values, out=history).clamp_(max=LARGEST)
            root = torch.sqrt(history, out=self._root[: len(values)])
            values.div_(root.add_(self._eps)).add_(left[piece])

    def after(self, vector: Tensor) -> None:
        """Move the encoding error out of the vector into the state, because it is not a gradient."""
        for piece in self._pieces:
            self._residual.pending[piece] = vector[piece]
            vector[piece] = 0.0
