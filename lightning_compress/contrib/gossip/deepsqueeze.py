"""DeepSqueeze: compressed models, whose errors are sent with the next ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, EFSign
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.algorithm import Algorithm, Coded, Mixing, check_contractive, check_share
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.noise import fit_step


@dataclass(frozen=True)
class DeepSqueeze(Algorithm):
    """``v_i = x_i + e_i; e_i = v_i - C(v_i); x_i <- x_i + eta * sum_j W_ij (C(v_j) - C(v_i))``.

    Any contractive codec goes. It compresses the model itself, and not a difference, so its noise is a share of the
    model: at few bits eta must be small. Kept is the error: 4 bytes a parameter.

    Args:
        eta: how far to move towards the neighbours, in (0, 1]; see ``Choco.gamma``. None: a tenth of the largest step,
            at which noise is about as large as the distance of the ranks, and at most 0.1.

    Raises:
        ValueError: eta is out of range.

    Tang, Lian, Qiu, Yuan, Zhang, Zhang, Liu, "DeepSqueeze: Decentralization Meets Error-Compensated Compression", 2019,
    arXiv 1907.07346.
    """

    name: ClassVar[str] = "deepsqueeze"
    codec: ClassVar[Codec | None] = EFSign()
    memory: ClassVar[int] = 4
    eta: float | None = None

    def __post_init__(self) -> None:
        check_share("deepsqueeze: eta", self.eta)

    def check_compressor(self, compressor: object) -> None:
        """Contractive ones."""
        check_contractive(self.name, compressor)

    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Codec, layout: Layout, seed: int) -> Mixing:
        """See ``Algorithm.begin``."""
        eta = fit_step("deepsqueeze: eta", self.eta, 0.1, 0.1, start, neighbours, compressor, layout)
        return _Mixing(start, neighbours, compressor, layout, seed, eta)


class _Mixing(Coded):
    def __init__(
        self, start: Tensor, neighbours: Neighbours, codec: Codec, layout: Layout, seed: int, eta: float
    ) -> None:
        super().__init__(neighbours, codec, layout, start.device, seed)
        self.steps["eta"] = eta
        self.vectors["error"] = torch.zeros_like(start)

    def run(self, vector: Tensor, rate: float) -> None:
        error = self.vectors["error"].add_(vector)
        for weight, message in self.tell(error, self.steps["eta"]):
            self.add(message, vector, weight)
