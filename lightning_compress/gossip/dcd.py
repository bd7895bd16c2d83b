"""DCD-PSGD: compressed changes of models, which neighbours keep replicas of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.base import Algorithm, Coded, Mixing, check_unbiased
from lightning_compress.gossip.neighbours import Neighbours


@dataclass(frozen=True)
class DCD(Algorithm):
    """``z_i = sum_j W_ij x_j - step_i - x_i; x_i <- x_i + C(z_i)``, and the same at all who have a replica of x_i.

    The noise of the codec becomes part of the model, so it must be unbiased and small: at 1 and 2 bits this
    diverges, as the papers say. Kept are the model of the last round and the weighted mean of the neighbourhood's:
    8 bytes a parameter.

    Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", NeurIPS 2018, arXiv
    1803.06443.
    """

    name: ClassVar[str] = "dcd"
    fixed: ClassVar[bool] = True
    memory: ClassVar[int] = 8

    def check_compressor(self, compressor: object) -> None:
        """Unbiased ones."""
        check_unbiased(self.name, compressor)

    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Codec, layout: Layout, seed: int) -> Mixing:
        """See ``Algorithm.begin``."""
        return _Mixing(start, neighbours, compressor, layout, seed)


class _Mixing(Coded):
    def __init__(self, start: Tensor, neighbours: Neighbours, codec: Codec, layout: Layout, seed: int) -> None:
        super().__init__(neighbours, codec, layout, start.device, seed)
        self.vectors |= {"model": start.clone(), "mean": start.clone()}

    def run(self, vector: Tensor, rate: float) -> None:
        model, mean = self.vectors["model"], self.vectors["mean"]
        vector.sub_(model).add_(mean).sub_(model)
        told = self.tell(vector)
        self.add(told[0][1], model, 1.0)
        for weight, message in told:
            self.add(message, mean, weight)
        vector.copy_(model)
