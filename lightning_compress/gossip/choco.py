"""CHOCO-SGD: sends compressed differences between a model and what its neighbours already know of it."""

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

    Neighbours know of each other only the sums of what was sent. What a message loses stays in the difference, so any
    contractive codec works. It keeps 8 bytes for each parameter: ``known_i``, which starts at the common model (in the
    paper: at 0), and ``sum_j W_ij (known_j - known_i)``.

    Args:
        gamma: how far to move towards the neighbours, in (0, 1]. Too large a value diverges: see
            ``noise.largest_step``, which depends on the topology and on the codec, measured when a fit begins. None:
            0.6 of that, and at most 0.4. More than the largest step is a warning, more than 4 times as much an error.

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
        """See ``Algorithm``; contractive codecs."""
        check_contractive(self.name, compressor)

    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Codec, layout: Layout, seed: int) -> Mixing:
        """See ``Algorithm``."""
        mixing = _Mixing(start, neighbours, compressor, layout, seed)
        mixing.steps["gamma"] = fit_step("choco: gamma", self.gamma, 0.4, 0.6, start, neighbours, compressor, layout)
        return mixing


class _Mixing(Replicas):
    known = "known"

    def run(self, vector: Tensor, rate: float) -> None:
        self.update(vector - self.vectors["known"])
        vector.add_(self.vectors["apart"], alpha=self.steps["gamma"])
