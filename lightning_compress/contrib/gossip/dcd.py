"""DCD-PSGD: compressed changes of models, which neighbours keep replicas of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.contrib.gossip.replicating import Replicating
from lightning_compress.gossip.algorithm import Replicas


class _Mixing(Replicas):
    def run(self, vector: Tensor, rate: float) -> None:
        model = self.vectors["model"]
        self.exchange(vector.sub_(model).add_(self.vectors["apart"]))
        vector.copy_(model)


@dataclass(frozen=True)
class DCD(Replicating):
    """``z_i = sum_j W_ij x_j - step_i - x_i; x_i <- x_i + C(z_i)``, and the same at all who have a replica of x_i.

    The noise of the codec becomes part of the model, so it must be unbiased and small: see ``bearable``, the
    paper's condition on alpha for noise that is each rank's own. At 1 and 2 bits this diverges, as the papers say; what
    would is refused when a fit begins. Kept are the model of the last round and how far the weighted mean of the
    neighbourhood's is from it: 8 bytes a parameter.

    Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", NeurIPS 2018, arXiv
    1803.06443.
    """

    name: ClassVar[str] = "dcd"
    mixing: ClassVar[type[Replicas]] = _Mixing
