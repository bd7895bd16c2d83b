"""The specification of what turns a gradient into something else before it is averaged, and the mean after.

Momentum correction averages a velocity, 1-bit Adam averages a momentum: such a method wraps a codec, keeps state, and
takes over a part of the optimizer's work, so that it has a say on the optimizer.
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
    """Segments that no codec takes care of."""
    return [each for each in layout.segments if not any(part.start <= each.offset < part.stop for part in compressed)]


def zero_where_zero(target: Tensor, source: Tensor) -> None:
    """``target`` becomes 0 where ``source`` is; both float32, of one length, no longer than a piece of a vector."""
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
    """A correction made ready for the vectors of one group.

    ``before`` turns gradients into what is averaged, to which the residual is added afterwards, unless it does that in
    the same pass and says so by ``Vector.sent``; ``after`` turns the means into what the optimizer is given, the same
    on all ranks. Both work in place.

    State is read from ``committed`` and written to ``pending``; the caller marks it as touched. A second backward of
    one step begins from ``committed`` again, with the gradients of both.

    Attributes:
        idle: gradients and means stay as they are, so that it need not be called.
    """

    idle: bool = False


class Correction(ABC):
    """What a corrected method does beside compressing; a frozen dataclass of its settings."""

    optimizes: ClassVar[bool] = True

    @abstractmethod
    def state(self, layout: Layout, compressed: Sequence[slice]) -> Mapping[str, StateSpec]:
        """What is kept from step to step, by a name of it.

        Args:
            layout: of the vectors. State that differs from rank to rank is laid out alike.
            compressed: the stretches that a codec takes care of, but for dense steps.
        """

    @abstractmethod
    def plan(
        self, layout: Layout, compressed: Sequence[slice], world: World, states: States, residual: State | None
    ) -> CorrectionPlan:
        """Make ready for vectors of this layout.

        Args:
            layout: of the vectors.
            compressed: as in ``state``.
            world: the ranks.
            states: what ``state`` declared.
            residual: what encoding left behind, where it is added as it is, as float32; else None.
        """

    counts_steps: ClassVar[bool] = False
    """It goes by the number of steps, which is that of all optimizers together: there may be one only."""

    replaces_residual: ClassVar[bool] = False
    """It looks itself after what encoding left, of which no residual is kept."""

    @property
    def masks(self) -> bool:
        """It takes what has left a rank's residual for applied, which no exchange may leave in that of another rank."""
        return False

    def begun(self, dense_steps: int) -> Correction:
        """The same where so many steps at the beginning are dense.

        Raises:
            ValueError: it cannot begin so.
        """
        return self

    def give_back(self, state: dict[str, Any]) -> None:  # noqa: B027  # most take nothing away
        """Put into an optimizer's ``state_dict`` what ``take_over`` took: another method may go on from it."""

    @abstractmethod
    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """See that the optimizer does not do the same work again; called before training and before every step.

        Args:
            optimizer: owns compressed parameters.
            names: of these parameters.

        Returns:
            what was changed about the optimizer, for the log.

        Raises:
            ValueError: it does something that the correction cannot go with; the message says what to use.
        """


class Corrected(ABC):
    """A compressor that is a codec and a correction; a frozen dataclass of its settings."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """What compresses."""

    @property
    @abstractmethod
    def correction(self) -> Correction:
        """What is done before and after."""

    @property
    def schedule(self) -> str | None:
        """The preset by which its settings change while training, where the user gives no ``schedule``."""
        return None

    @property
    def dense_steps(self) -> int:
        """Steps at the beginning that are dense, where the user gives no ``warmup_steps``."""
        return 0
