"""D2: D-PSGD without the error that comes from different data on different ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.gossip.algorithm import Algorithm, Averaging, Mixing
from lightning_compress.gossip.modulo import averaging, check_averaging
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import TOLERANCE, Topology

LEAST_BITS = 4
"""Of Moniqua. A round puts ``(1 - l)^2`` squared cells of noise into the mode ``l`` of the lazy graph, and D2 amplifies
it by ``1 / (1 - l)^2``. Slack cancels out. Noise alone keeps ranks about a cell apart: 2/3 of theta at 2 bits."""


@dataclass(frozen=True)
class D2(Algorithm):
    """``x_(k+1) = W (2 x_k - x_(k-1) - (step_k - step_(k-1)))``, after ``x_1 = W (x_0 - step_0)``.

    A step is the optimizer's change of the model (in the paper: learning rate times gradient), so momentum and changing
    learning rates work too. ``x_k - step_k`` is what the optimizer leaves, so one vector is kept instead of the paper's
    two: by how much the last round moved this rank, ``c_k = x_k - (x_(k-1) - step_(k-1))``. A round averages the
    optimizer's result plus ``c_k``. The mean of ``c_k`` over the ranks is 0, so the mean of the models does not change.
    ``c_k`` sums what the edges move, not differences of models, whose rounding errors would add up.

    Tang, Lian, Yan, Zhang, Liu, "D2: Decentralized Training over Decentralized Data", ICML 2018, arXiv 1803.07068.
    """

    name: ClassVar[str] = "d2"
    fixed: ClassVar[bool] = True
    memory: ClassVar[int] = 4

    def check_compressor(self, compressor: object) -> None:
        """See ``Algorithm``; exact means, or Moniqua with ``LEAST_BITS`` or more."""
        check_averaging(self.name, compressor)
        if isinstance(compressor, Moniqua) and compressor.bits < LEAST_BITS:
            raise ValueError(
                f"algorithm d2 would diverge with moniqua at bits={compressor.bits}: it amplifies rounding noise, and "
                f"needs {LEAST_BITS} bits or more at any slack. Take bits=4 or 8, or algorithm dpsgd"
            )

    def fit_topology(self, topology: Topology, lazy: bool | None) -> Topology:
        """See ``Algorithm``. All eigenvalues must be above -1/3; a ring of an even number of ranks just misses it."""
        topology = super().fit_topology(topology, lazy)
        if topology.least > -1 / 3 + TOLERANCE:
            return topology
        if lazy is None:
            return topology.lazy()
        raise ValueError(
            f"topology {topology.name}: its smallest eigenvalue is {topology.least:.6g}, and algorithm d2 diverges "
            "unless it is above -1/3. Keep half of the weight on the rank itself: topology={'name': ..., 'lazy': True}"
        )

    def begin(
        self, start: Tensor, neighbours: Neighbours, compressor: Moniqua | None, layout: Layout, seed: int
    ) -> Mixing:
        """See ``Algorithm``."""
        return _Mixing(start, averaging(compressor, neighbours, layout, start.device, seed))


class _Mixing(Mixing):
    def __init__(self, start: Tensor, averaging: Averaging) -> None:
        super().__init__(averaging.neighbours)
        self._averaging = averaging
        self.vectors, self.numbers = averaging.vectors, averaging.numbers  # one state for both
        self.vectors["moved"] = torch.zeros_like(start)

    def run(self, vector: Tensor, rate: float) -> None:
        moved = self.vectors["moved"]
        vector.add_(moved)
        self._averaging.average(vector, rate, moved)

    def figures(self) -> dict[str, float]:
        return self._averaging.figures()
