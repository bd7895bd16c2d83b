"""CHOCO-SGD: compressed differences to what neighbours already know of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_compress.codecs import Codec, EFSign
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.algorithm import Algorithm, Mixing, Replicas, check_contractive, check_share
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.noise import fit_step


@dataclass(frozen=True)
class Choco(Algorithm):
    """``q_i = Q(x_i - known_i); known_j += q_j; x_i <- x_i + gamma * sum_j W_ij (known_j - known_i)``.

    All that neighbours know of each other are the sums of what was sent; what was not sent stays in the difference, so
    that any contractive codec goes. Kept are ``known_i``, which begins with the common model (the paper's: with 0), and
    ``sum_j W_ij (known_j - known_i)``: 8 bytes a parameter.

    Args:
        gamma: how far to move towards the neighbours, in (0, 1]. Too large diverges: see ``noise.largest_step``, which
            follows from the codec, measured when a fit begins, and the topology. None: 0.6 of that, and at most 0.4.
            Four times as much is refused; between, there is a warning.

    Raises:
        ValueError: gamma is out of range.

    Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv 1902.00340.
    """

    name: ClassVar[str] = "choco"
    codec: ClassVar[Codec | None] = EFSign()
    fixed: ClassVar[bool] = True
    memory: ClassVar[int] = 8
    gamma: float | None = None

    def __post_init__(self) -> None:
        check_share("choco: gamma", self.gamma)

    def check_compressor(self, compressor: object) -> None:
        """Contractive ones."""
        check_contractive(self.name, compressor)

    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Codec, layout: Layout, seed: int) -> Mixing:
        """See ``Algorithm.begin``."""
        gamma = fit_step("choco: gamma", self.gamma, 0.4, 0.6, start, neighbours, compressor, layout)
        return _Mixing(start, neighbours, compressor, layout, seed, gamma)


class _Mixing(Replicas):
    known = "known"

    def __init__(
        self, start: Tensor, neighbours: Neighbours, codec: Codec, layout: Layout, seed: int, gamma: float
    ) -> None:
        super().__init__(start, neighbours, codec, layout, seed)
        self.steps["gamma"] = gamma

    def run(self, vector: Tensor, rate: float) -> None:
        self.exchange(vector - self.vectors["known"])
        vector.add_(self.vectors["apart"], alpha=self.steps["gamma"])
