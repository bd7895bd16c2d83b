"""DeepSqueeze: sends compressed models, with error feedback."""

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

    Any contractive codec works. It compresses the model itself, not a difference, so its noise is proportional to the
    model, and eta must be small at few bits. It keeps the error: 4 bytes for each parameter.

    Args:
        eta: how far to move towards the neighbours, in (0, 1]; see ``Choco.gamma``. None: a tenth of the largest step,
            and at most 0.1. At a tenth, noise is about as large as the distance of the ranks.

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
        """See ``Algorithm``; contractive codecs."""
        check_contractive(self.name, compressor)

    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Codec, layout: Layout, seed: int) -> Mixing:
        """See ``Algorithm``."""
        mixing = _Mixing(neighbours, compressor, layout, start.device, seed)
        mixing.steps["eta"] = fit_step("deepsqueeze: eta", self.eta, 0.1, 0.1, start, neighbours, compressor, layout)
        mixing.vectors["error"] = torch.zeros_like(start)
        return mixing


class _Mixing(Coded):
    def run(self, vector: Tensor, rate: float) -> None:
        error = self.vectors["error"].add_(vector)
        for weight, message in self.send(error, self.steps["eta"]):
            self.add(message, vector, weight)
