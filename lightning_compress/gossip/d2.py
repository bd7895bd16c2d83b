"""D2: D-PSGD without the part of its error that comes from different data on different ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.gossip.algorithm import Algorithm, Mixing
from lightning_compress.gossip.averaging import Averaging
from lightning_compress.gossip.dpsgd import Averages
from lightning_compress.gossip.modulo import averaging, check_averaging
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import TOLERANCE, Topology

LEAST_BITS = 4
"""Of Moniqua. A round puts ``(1 - l)^2`` squared cells of noise into the mode ``l`` of the lazy graph, and D2 amplifies
it by ``1 / (1 - l)^2``. Slack cancels out, and noise alone keeps ranks about a cell apart: 2/3 of theta at 2 bits."""


@dataclass(frozen=True)
class D2(Algorithm):
    """``x_(k+1) = W (2 x_k - x_(k-1) - (step_k - step_(k-1)))``, after ``x_1 = W (x_0 - step_0)``.

    A step is what the optimizer does (the paper's: learning rate times gradient), so that momentum and changing rates
    go too. Since ``x_k - step_k`` is what the optimizer leaves, one vector is kept and not the paper's two: by how much
    the last round's mean moved this rank, ``c_k = x_k - (x_(k-1) - step_(k-1))``; what is averaged is the optimizer's
    result plus ``c_k``. Its mean over the ranks is 0, so the mean of the models is not touched; what is added to
    ``c_k`` is what the edges move, and no difference of models, whose rounding would add up in it.

    Tang, Lian, Yan, Zhang, Liu, "D2: Decentralized Training over Decentralized Data", ICML 2018, arXiv 1803.07068.
    """

    name: ClassVar[str] = "d2"
    fixed: ClassVar[bool] = True
    memory: ClassVar[int] = 4

    def check_compressor(self, compressor: object) -> None:
        """Exact means, or Moniqua with ``LEAST_BITS`` or more."""
        check_averaging(self.name, compressor)
        if isinstance(compressor, Moniqua) and compressor.bits < LEAST_BITS:
            raise ValueError(
                f"algorithm d2 would diverge with moniqua at bits={compressor.bits}: it needs {LEAST_BITS} bits or "
                "more at any slack, since it amplifies the noise of rounding. Take bits=4 or 8, or algorithm dpsgd"
            )

    def fit_topology(self, topology: Topology, lazy: bool | None) -> Topology:
        """All eigenvalues must be above -1/3, which the ring by thirds of an even number of ranks just misses."""
        found = super().fit_topology(topology, lazy)
        if found.least > -1 / 3 + TOLERANCE:
            return found
        if lazy is None:
            return found.lazy()
        raise ValueError(
            f"topology {found.name}: its smallest eigenvalue is {found.least:.6g}, and algorithm d2 needs more than "
            "-1/3, or it diverges. Leave half of the weight where it is: topology={'name': ..., 'lazy': True}"
        )

    def begin(
        self, start: Tensor, neighbours: Neighbours, compressor: Moniqua | None, layout: Layout, seed: int
    ) -> Mixing:
        """See ``Algorithm.begin``."""
        return _Mixing(start, neighbours, averaging(compressor, neighbours, layout, start.device, seed))


class _Mixing(Averages):
    def __init__(self, start: Tensor, neighbours: Neighbours, averaging: Averaging) -> None:
        super().__init__(neighbours, averaging)
        self.vectors["moved"] = torch.zeros_like(start)

    def run(self, vector: Tensor, rate: float) -> None:
        moved = self.vectors["moved"]
        vector.add_(moved)
        self._averaging.average(vector, self.numbers, rate, moved)
