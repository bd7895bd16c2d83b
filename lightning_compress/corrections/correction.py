"""The contract of corrections: methods that average something else than the gradient.

Momentum correction averages a velocity, 1-bit Adam averages a momentum. Such a method wraps a codec, keeps state, and
does part of the optimizer's work, so it also restricts which optimizer is allowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress import kernels
from lightning_compress.codecs import Codec
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.core.state import State, States, StateSpec
from lightning_compress.core.vector import Stage
from lightning_compress.core.workspace import scratch


def dense_segments(layout: Layout, compressed: Sequence[slice]) -> list[Segment]:
    """Return the segments that no codec compresses."""
    return [s for s in layout.segments if not any(part.start <= s.offset < part.stop for part in compressed)]


def zero_where_zero(target: Tensor, source: Tensor) -> None:
    """Set ``target`` to 0 where ``source`` is 0.

    Args:
        target: float32 ``[n]``, contiguous, at most ``chunk_size`` elements.
        source: float32 ``[n]``, contiguous.
    """
    if fast := kernels.backend(__name__, source.device, "numba"):
        fast.zero_where_zero(target.numpy(), source.numpy())
        return
    if fused := kernels.backend(__name__, source.device, "triton"):
        fused.zero_where_zero(target, source)
        return
    zeros = scratch("zeros", len(source), torch.bool, source.device)
    if source.device.type == "cpu":  # five times as fast as torch's comparison into booleans
        np.equal(source.numpy(), 0, out=zeros.numpy())
        np.copyto(target.numpy(), 0, where=zeros.numpy())
    else:
        target.masked_fill_(torch.eq(source, 0, out=zeros), 0)


class CorrectionPlan(Stage):
    """A correction prepared for the vectors of one group.

    ``before`` turns gradients into what is averaged. The residual is added to that afterwards, unless ``before`` adds
    it in the same pass and sets ``Vector.sent``. ``after`` turns the means into what the optimizer gets, the same on
    all ranks. Both work in place.

    State is read from ``committed`` and written to ``pending``; the caller marks it as touched. A second backward pass
    in one step starts from ``committed`` again, with the gradients of both passes.

    Attributes:
        idle: gradients and means are left unchanged, so the plan need not be called.
    """

    idle: bool = False


class Correction(ABC):
    """Base of corrections. A subclass is a frozen dataclass of its settings.

    Attributes:
        counts_steps: it depends on the number of steps of all optimizers together, so only one optimizer is allowed.
        replaces_residual: it keeps what encoding left out itself, so the group keeps no residual.
    """

    counts_steps: ClassVar[bool] = False
    replaces_residual: ClassVar[bool] = False

    @abstractmethod
    def state(self, layout: Layout, compressed: Sequence[slice]) -> Mapping[str, StateSpec]:
        """Declare the state that is kept from step to step, by name.

        Args:
            layout: layout of the vectors. Per-rank state has the same layout on all ranks.
            compressed: slices of the vector that a codec compresses, except in dense steps.
        """

    @abstractmethod
    def plan(
        self, layout: Layout, compressed: Sequence[slice], world: World, states: States, residual: State | None
    ) -> CorrectionPlan:
        """Return a plan for vectors of this layout.

        Args:
            layout: layout of the vectors.
            compressed: as in ``state``.
            world: the ranks.
            states: the states that ``state`` declared.
            residual: the residual, if it is float32 and added unchanged; otherwise None.
        """

    @property
    def masks(self) -> bool:
        """True if it treats what left a rank's residual as applied. Then no exchange may move it to another rank's."""
        return False

    def with_dense_steps(self, dense_steps: int) -> Correction:
        """Return the correction for a run whose first ``dense_steps`` steps are not compressed.

        Raises:
            ValueError: the method does not work with this number.
        """
        return self

    def restore_optimizer(self, state: dict[str, Any]) -> None:  # noqa: B027  # most change nothing
        """Undo ``take_over`` in an optimizer's ``state_dict``, so that another method can continue from it."""

    @abstractmethod
    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Stop the optimizer from doing the same work again. Called before training and before every step.

        Args:
            optimizer: owns compressed parameters.
            names: names of these parameters.

        Returns:
            A sentence for the log about what was changed in the optimizer; None if nothing was.

        Raises:
            ValueError: the optimizer does not fit the correction. The message says what to use.
        """


class Corrected(ABC):
    """Base of compressors that join a codec and a correction. A subclass is a frozen dataclass of its settings."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """The codec that compresses."""

    @property
    @abstractmethod
    def correction(self) -> Correction:
        """The correction around the codec."""

    @property
    def schedule(self) -> str | None:
        """Name of the schedule that is used if the user gives none; None for no schedule."""
        return None

    @property
    def dense_steps(self) -> int:
        """Default number of dense steps at the beginning, used if the user gives no ``warmup_steps``."""
        return 0
