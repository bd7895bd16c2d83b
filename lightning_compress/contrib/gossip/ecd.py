"""ECD-PSGD: compressed extrapolations of models, from which neighbours estimate them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.contrib.gossip.replicating import Replicating
from lightning_compress.gossip.algorithm import Replicas


class _Mixing(Replicas):
    def run(self, vector: Tensor, rate: float) -> None:
        model, apart, t = self.vectors["model"], self.vectors["apart"], self.round + 1
        vector.add_(apart)
        model.mul_(1 - t / 2).add_(vector, alpha=t / 2)
        told = self.tell(model)  # what the message does not have stays in it
        apart.mul_(t / 2 - 1).sub_(model)
        for weight, message in told:
            self.add(message, apart, weight)
        apart.mul_(2 / t)
        model.copy_(vector)


@dataclass(frozen=True)
class ECD(Replicating):
    """``x' = sum_j W_ij y_j - step; z = (1 - t/2) x + t/2 x'; y <- (1 - 2/t) y + 2/t C(z)`` in round t = 1, 2, ...

    The noise of an estimate ``y`` falls as 1/t, if that of the codec is bounded whatever it encodes; codecs whose error
    grows with the vector (most) break that, since z grows as t. Their noise does not fall while the learning rate does
    not: it grows as the square root of variance times rounds. On a ring of 8, a variance of 0.03 (``rotated`` with 4
    bits) makes ranks three times as distant in 2,000 rounds; 0.01 and above is refused. Kept are the model of the last
    round and how far the weighted mean of the neighbourhood's estimates is from it, ``a``, which needs no estimate:
    ``a <- 2/t ((t/2 - 1) a + sum_j W_ij (C(z_j) - C(z_i)) - (z_i - C(z_i)))``. That is 8 bytes a parameter.

    Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", NeurIPS 2018, arXiv
    1803.06443.
    """

    name: ClassVar[str] = "ecd"
    mixing: ClassVar[type[Replicas]] = _Mixing
    most: ClassVar[float] = 0.01
