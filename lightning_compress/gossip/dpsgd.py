"""D-PSGD: a local step, then the weighted mean with the neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.gossip.algorithm import Algorithm, Mixing
from lightning_compress.gossip.modulo import averaging, check_averaging
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours


@dataclass(frozen=True)
class DPSGD(Algorithm):
    """``x_i <- sum_j W_ij (x_j - step_j)``: every rank averages its model with its neighbours' after its own step.

    The paper averages the models and then subtracts the gradient. Here the step is averaged too, so that on the
    complete graph this is SGD with averaged gradients. Nothing is kept between rounds.

    Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS 2017,
    arXiv 1705.09056.
    """

    name: ClassVar[str] = "dpsgd"

    def check_compressor(self, compressor: object) -> None:
        """See ``Algorithm``; exact means or Moniqua."""
        check_averaging(self.name, compressor)

    def begin(
        self, start: Tensor, neighbours: Neighbours, compressor: Moniqua | None, layout: Layout, seed: int
    ) -> Mixing:
        """See ``Algorithm``."""
        return averaging(compressor, neighbours, layout, start.device, seed)
