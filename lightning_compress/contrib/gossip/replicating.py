"""Base of algorithms whose ranks keep replicas of their neighbours, with unbiased codecs of little noise."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs import QSGD, Codec
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.core.vector import squares
from lightning_compress.gossip.algorithm import Algorithm, Mixing, Replicas
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import TOLERANCE, Topology


class Replicating(Algorithm):
    """An algorithm whose mixing keeps ``Replicas``, with unbiased codecs.

    Attributes:
        mixing: class of the mixing.
        most: exclusive upper limit of the relative variance of messages, on any graph.
    """

    codec: ClassVar[Codec | None] = QSGD(8)
    fixed: ClassVar[bool] = True
    memory: ClassVar[int] = 8
    mixing: ClassVar[type[Replicas]]
    most: ClassVar[float] = math.inf

    def check_compressor(self, compressor: object) -> None:
        """See ``Algorithm``; unbiased codecs."""
        check_unbiased(self.name, compressor)

    def check_noise(self, compressor: Codec, layout: Layout, topology: Topology) -> None:
        """See ``Algorithm``."""
        noise, most = noise_of(compressor, layout), min(bearable(topology), self.most)
        if noise >= most:
            raise ValueError(
                f"algorithm {self.name} would diverge with {compressor}: on a model of these shapes the variance of "
                f"its messages is {noise:.3g} times their square, and it bears less than {most:.3g} on topology "
                f"{topology.name} of {topology.size} ranks. Take qsgd or rotated with 8 bits, or none; "
                "or algorithm choco or deepsqueeze, which take contractive codecs"
            )

    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Codec, layout: Layout, seed: int) -> Mixing:
        """See ``Algorithm``."""
        return self.mixing(start, neighbours, compressor, layout, seed)


def noise_of(codec: Codec, layout: Layout) -> float:
    """Return the squared error of a message relative to the squared vector, for normal numbers."""
    vector = torch.randn(layout.numel, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    plan, before = codec.plan(layout, vector.device), float(squares(vector))
    plan.share(0)
    plan.encode(vector, torch.zeros(plan.message_size, dtype=torch.uint8), mix(0, 1))
    return float(squares(vector)) / before if before else 0.0


def bearable(topology: Topology) -> float:
    """Return the relative variance of messages at which the noise of replicas amplifies itself.

    A replica moves by its distance from the neighbourhood's mean, plus the noise of that message. Noise is equally
    strong in all modes of the graph. In a round, a mode is multiplied by its eigenvalue ``l``, and its message has the
    share ``1 - l`` of it. So of a variance ``w``, ``w / n`` times the sum of ``(1 - l) / (1 + l)`` comes back.
    """
    others = np.linalg.eigvalsh(topology.matrices[0])[:-1]
    left = float(((1 - others) / np.maximum(1 + others, TOLERANCE)).sum()) / topology.size
    return 1 / left if left else math.inf


def unbiased(codec: Codec) -> bool:
    """Return whether decoded messages equal the vector on average."""
    exact = codec.is_cast and codec.sum_dtype == torch.float32
    return exact or not (codec.contractive or codec.sum_dtype is not None)


def check_unbiased(name: str, compressor: object) -> None:
    """Raise ValueError if the compressor is not an unbiased codec."""
    if not isinstance(compressor, Codec) or not unbiased(compressor):
        raise ValueError(
            f"algorithm {name} needs an unbiased codec, and the errors of {compressor} would add up. Use qsgd, "
            "rotated, natural, terngrad or none; or algorithm choco, which takes biased codecs"
        )
