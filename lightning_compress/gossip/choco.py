"""CHOCO-SGD: compressed differences to what neighbours already know of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.base import Algorithm, Mixing, Replicas, check_contractive, check_share
from lightning_compress.gossip.neighbours import Neighbours


@dataclass(frozen=True)
class Choco(Algorithm):
    """``q_i = Q(x_i - known_i); known_j += q_j; x_i <- x_i + gamma * sum_j W_ij (known_j - known_i)``.

    All that neighbours know of each other are the sums of what was sent; what was not sent stays in the difference, so
    that any contractive codec goes. Kept are ``known_i``, which begins with the common model (the paper's: with 0), and
    ``sum_j W_ij (known_j - known_i)``: 8 bytes a parameter.

    Args:
        gamma: how far to move, in (0, 1]. The coarser the codec, the smaller: 0.4 to 0.5 for signs; too large diverges.

    Raises:
        ValueError: gamma is out of range.

    Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv 1902.00340.
    """

    name: ClassVar[str] = "choco"
    fixed: ClassVar[bool] = True
    memory: ClassVar[int] = 8
    gamma: float = 0.4

    def __post_init__(self) -> None:
        check_share("choco: gamma", self.gamma)

    def check_compressor(self, compressor: object) -> None:
        """Contractive ones."""
        check_contractive(self.name, compressor)

    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Codec, layout: Layout, seed: int) -> Mixing:
        """See ``Algorithm.begin``."""
        return _Mixing(start, neighbours, compressor, layout, seed, self.gamma)


class _Mixing(Replicas):
    known = "known"

    def __init__(
        self, start: Tensor, neighbours: Neighbours, codec: Codec, layout: Layout, seed: int, gamma: float
    ) -> None:
        super().__init__(start, neighbours, codec, layout, seed)
        self._gamma = gamma

    def run(self, vector: Tensor, rate: float) -> None:
        self.exchange(vector - self.vectors["known"])
        vector.add_(self.vectors["apart"], alpha=self._gamma)
