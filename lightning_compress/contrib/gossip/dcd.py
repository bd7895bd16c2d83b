"""DCD-PSGD: sends compressed changes of models, of which neighbours keep replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.contrib.gossip.replicating import Replicating
from lightning_compress.gossip.algorithm import Replicas


class _Mixing(Replicas):
    def run(self, vector: Tensor, rate: float) -> None:
        model = self.vectors["model"]
        self.update(vector.sub_(model).add_(self.vectors["apart"]))
        vector.copy_(model)


@dataclass(frozen=True)
class DCD(Replicating):
    """``z_i = sum_j W_ij x_j - step_i - x_i; x_i <- x_i + C(z_i)``, on rank i and in all replicas of x_i.

    The codec's noise becomes part of the model, so it must be unbiased and small: see ``bearable``, the paper's
    condition on alpha for independent noise. At 1 and 2 bits it diverges, as the papers say; settings that diverge are
    refused when a fit begins. It keeps 8 bytes for each parameter: the model of the last round, and the distance of the
    neighbourhood's weighted mean from it.

    Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", NeurIPS 2018, arXiv
    1803.06443.
    """

    name: ClassVar[str] = "dcd"
    mixing: ClassVar[type[Replicas]] = _Mixing
