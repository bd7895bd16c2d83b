"""A model whose computing is a sleep, a third of it in forward: what messages cost where cores are free."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.models import MODELS
from lightning_compress.planning.predict import BACKWARD


class _Backward(torch.autograd.Function):
    """Sleeps on the way back, and hands out a gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.given = gradient, seconds
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, seconds = ctx.given
        time.sleep(seconds)
        return grads[0], gradient.clone(), None, None


class Asleep(nn.Module):
    """The parameters of a model, and random gradients, each after its share of the backward pass.

    Args:
        model: of ``MODELS``.
        seconds: of a step.
    """

    def __init__(self, model: str, seconds: float) -> None:
        super().__init__()
        self.parts = nn.ParameterList([each.detach() for each in MODELS[model][0]().parameters()])
        self._seconds = seconds
        self._share = BACKWARD * seconds / sum(each.numel() for each in self.parts)
        drawn = torch.Generator().manual_seed(dist.get_rank())
        self._gradients = [torch.randn(each.shape, generator=drawn) * 1e-3 for each in self.parts]

    def forward(self, loss: Tensor) -> Tensor:
        """Sleep; return a loss whose backward sleeps, too."""
        time.sleep((1 - BACKWARD) * self._seconds)
        for parameter, gradient in zip(self.parts, self._gradients, strict=True):
            seconds = self._share * parameter.numel()
            loss = _Backward.apply(loss, parameter, gradient, seconds)  # type: ignore[no-untyped-call]
        return loss
