"""D-PSGD: a local step, then the weighted mean with neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.gossip.algorithm import Algorithm, Mixing
from lightning_compress.gossip.averaging import Averaging
from lightning_compress.gossip.modulo import averaging, check_averaging
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours


@dataclass(frozen=True)
class DPSGD(Algorithm):
    """``x_i <- sum_j W_ij (x_j - step_j)``: every rank averages its model with its neighbours' after its own step.

    The gradient is that of the model before the mean, as in the paper, which subtracts it after the mean; here it is
    averaged too, so that on the complete graph this is SGD with averaged gradients. Nothing is kept between rounds.

    Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS 2017,
    arXiv 1705.09056.
    """

    name: ClassVar[str] = "dpsgd"

    def check_compressor(self, compressor: object) -> None:
        """Exact means, or Moniqua."""
        check_averaging(self.name, compressor)

    def begin(
        self, start: Tensor, neighbours: Neighbours, compressor: Moniqua | None, layout: Layout, seed: int
    ) -> Mixing:
        """See ``Algorithm.begin``."""
        return Averages(neighbours, averaging(compressor, neighbours, layout, start.device, seed))


class Averages(Mixing):
    """Weighted means of what local steps made of the models."""

    def __init__(self, neighbours: Neighbours, averaging: Averaging) -> None:
        super().__init__(neighbours)
        self._averaging = averaging
        self.numbers |= averaging.numbers
        self.vectors |= averaging.vectors

    def run(self, vector: Tensor, rate: float) -> None:
        """See ``Mixing``."""
        self._averaging.average(vector, self.numbers, rate)

    def figures(self) -> dict[str, float]:
        """See ``Mixing``."""
        return self._averaging.figures()
