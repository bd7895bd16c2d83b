"""AdaGrad where a sum is whole: at the owner of a shard, between summing and encoding again.

Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs", Interspeech 2014. Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and
Stochastic Optimization", JMLR 2011.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.codecs.buffers import chunk_size, pieces, scratch
from lightning_compress.collectives import Collective
from lightning_compress.layout import Layout
from lightning_compress.state import Declared, States


class OwnerAdaGrad:
    """``out = mean / (sqrt(history) + eps)`` plus what the last encode left, in the shard that this rank owns.

    Args:
        eps: added to the root.
        own: stretches of the vector that this rank owns.
        collective: the ranks.
        device: where vectors are.
        states: what ``state`` declared.
    """

    def __init__(
        self, eps: float, own: Sequence[slice], collective: Collective, device: torch.device, states: States
    ) -> None:
        self._eps = eps
        self._collective = collective
        self._history, self._residual = states["history"], states["residual"]
        chunk = chunk_size(device)
        self._pieces = [
            slice(part.start + piece.start, part.start + piece.stop)
            for part in own
            for piece in pieces(part.stop - part.start, chunk)
        ]
        longest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        self._root = scratch("adagrad root", longest, torch.float32, device)

    @staticmethod
    def state(layout: Layout) -> Mapping[str, Declared]:
        """The sum of all squared means, and what encoding left of what was made of them."""
        return {"history": Declared(layout, "owner"), "residual": Declared(layout, "owner")}

    def step(self, vector: Tensor) -> None:
        """The sum over the ranks, in the own shard of the vector, becomes what is to be sent."""
        old, left = self._history.base(), self._residual.base()
        for piece in self._pieces:
            values, history = vector[piece], self._history.pending[piece]
            values.div_(self._collective.size)
            torch.addcmul(old[piece], values, values, out=history)
            root = torch.sqrt(history, out=self._root[: len(values)])
            values.div_(root.add_(self._eps)).add_(left[piece])

    def keep(self, vector: Tensor) -> None:
        """Take what was not sent out of the vector: it is no gradient."""
        for piece in self._pieces:
            self._residual.pending[piece] = vector[piece]
            vector[piece] = 0.0

    def adopted(self) -> None:
        """Every element goes to its new owner; the others have 0, so that the sum is the old owner's number."""
        for state in (self._history, self._residual):
            for numbers in (state.committed, state.pending):
                everything = numbers.clone()
                self._collective.all_reduce(everything)
                numbers.zero_()
                for piece in self._pieces:
                    numbers[piece] = everything[piece]
