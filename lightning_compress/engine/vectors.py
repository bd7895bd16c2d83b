"""What a group averages in a backward pass: gradients and what was kept, added up, and where the means go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.corrections import CorrectionPlan
from lightning_compress.engine.gradients import spoil
from lightning_compress.exchanges.base import ExchangePlan

_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Pass:
    """What one backward pass brings to a group.

    Args:
        slices: the gradients, one-dimensional, in the vector's order.
        pieces: those that are not empty.
        plan: the exchange of this step.
        step: how many steps were committed.
        scale: what the loss was multiplied by, or None.
        draws: what random numbers are drawn from, equal on all ranks.
        left_out: names of parameters whose gradients on this rank are the means of the pass before.
    """

    slices: list[Tensor]
    pieces: list[Tensor]
    plan: ExchangePlan
    step: int
    scale: Tensor | None
    draws: tuple[int, ...]
    left_out: Collection[str]


@dataclass(frozen=True)
class Fed:
    """The residual's pending numbers, to which the gradients were added; each mean replaces its gradient.

    Args:
        vector: float32 ``[numel]``, what is averaged; afterwards what this rank did not send.
        mean: the gradients that are not empty.
        flag: float32 scalar, 0.0, or NaN if any rank's gradients are not finite.
        whole: float32 ``[numel]``, for an exchange that does not write piece by piece; else None.
    """

    vector: Tensor
    mean: list[Tensor]
    flag: Tensor
    whole: Tensor | None

    @property
    def summands(self) -> tuple[Tensor, ...]:
        """What adds up to what is averaged."""
        return (self.vector,)

    def correct(self, correction: CorrectionPlan, compressed: Sequence[slice], step: int) -> None:
        """Turn the means into what the optimizer is given."""
        correction.finish(self.mean, self.vector, compressed, step)

    def give(self, slices: list[Tensor]) -> None:
        """The means are where the gradients were."""
        pass_on(self.flag, self.mean)


@dataclass(frozen=True)
class Copied:
    """A copy of the gradients, for loss scaling, clipping and non-finite values.

    Args:
        vector: float32 ``[numel]``, what is averaged; afterwards what this rank did not send.
        mean: float32 ``[numel]``, gets the mean.
        flag: see ``Fed``.
        summands: what adds up to what is averaged: ``vector``; or two, which the exchange adds up as it encodes.
        scale: which the mean is multiplied by, or None.
    """

    vector: Tensor
    mean: Tensor
    flag: Tensor
    summands: tuple[Tensor, ...]
    scale: Tensor | None

    def correct(self, correction: CorrectionPlan, compressed: Sequence[slice], step: int) -> None:
        """Turn the mean into what the optimizer is given."""
        correction.after(self.mean, self.vector, compressed, step)

    def give(self, slices: list[Tensor]) -> None:
        """Replace the gradients by their mean, which saturates in float16, unless a GradScaler looks for infinity."""
        if self.scale is not None:
            self.mean.mul_(self.scale)
        elif slices[0].dtype == torch.float16:  # a residual can bring it above what float16 holds
            self.mean.clamp_(-_LARGEST, _LARGEST)
        spoil(self.mean, self.flag)
        torch._foreach_copy_(slices, list(self.mean.split([each.numel() for each in slices])))


def pass_on(flag: Tensor, means: Sequence[Tensor]) -> Tensor:
    """Make means NaN where the flag is, on a CPU; on a device what was averaged in place has it. Returns the flag."""
    if flag.device.type == "cpu" and float(flag) != 0.0:
        for each in means:
            each.add_(flag)
    return flag
