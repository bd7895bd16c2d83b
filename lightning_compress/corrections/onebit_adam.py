"""1-bit Adam: after a dense warm-up, Adam's variance is frozen and its momentum is averaged, compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_compress.codecs import CODECS, Codec, EFSign
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import build
from lightning_compress.core.state import State, States, StateSpec
from lightning_compress.core.vector import Vector
from lightning_compress.core.workspace import chunk_size, scratch
from lightning_compress.corrections.correction import Corrected, Correction, CorrectionPlan, zero_where_zero


@dataclass(frozen=True)
class AdamCorrection(Correction):
    """Adam's moments and its step; see ``OneBitAdam``, which checks the settings."""

    counts_steps: ClassVar[bool] = True
    beta1: float
    beta2: float
    eps: float
    freeze_steps: int

    def with_dense_steps(self, dense_steps: int) -> AdamCorrection:
        """See ``Correction.with_dense_steps``."""
        if dense_steps < 1:
            raise ValueError(
                f"warmup_steps={dense_steps}: onebit_adam needs 1 or more dense steps, to estimate its variance; "
                "give 15 to 25 % of all steps"
            )
        return replace(self, freeze_steps=dense_steps)

    def state(self, layout: Layout, compressed: Sequence[slice]) -> Mapping[str, StateSpec]:
        """Declare Adam's two moments, the same on all ranks."""
        return {"momentum": StateSpec(layout, "shared"), "variance": StateSpec(layout, "shared")}

    def plan(
        self, layout: Layout, compressed: Sequence[slice], world: World, states: States, residual: State | None
    ) -> CorrectionPlan:
        """See ``Correction.plan``."""
        return _Plan(self, layout, world.device, states)

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Check that the optimizer is SGD without momentum.

        Raises:
            ValueError: it is another optimizer, or has a momentum.
        """
        kind = type(optimizer).__name__
        momentum = next((group["momentum"] for group in optimizer.param_groups if group.get("momentum")), 0)
        if not isinstance(optimizer, SGD) or momentum:
            what = f"{kind}(momentum={momentum})" if momentum else kind
            raise ValueError(
                f"{what} (of {', '.join(names[:3])}) would apply momentum twice, because onebit_adam is Adam itself; "
                "use torch.optim.SGD(lr=..., weight_decay=...) with AdamW's lr and weight_decay, and no momentum"
            )
        return None


@dataclass(frozen=True)
class OneBitAdam(Corrected):
    """Adam with a variance that is frozen after f steps, so that its momentum can be averaged with 1 bit per element.

    f is the strategy's ``warmup_steps``. In the steps t = 1, 2, ... f, each rank's gradient g_i is averaged dense::

        m <- beta1 m + (1 - beta1) mean(g_i)
        v <- beta2 v + (1 - beta2) mean(g_i)^2

    After step f, v is frozen. Each rank's momentum is averaged instead, compressed and with error feedback::

        m <- mean(compressed(beta1 m + (1 - beta1) g_i + residual_i))

    As the gradient, the optimizer gets ``m / (1 - beta1^t) / (sqrt(v / (1 - beta2^s)) + eps)`` with ``s = min(t, f)``,
    and 0 where a frozen v is 0. So an element that had no gradient before step f does not train afterwards. The
    optimizer must be ``torch.optim.SGD`` without momentum; with its lr and weight_decay, the result is AdamW. Any other
    optimizer is refused. (DeepSpeed's implementation has no bias correction of m and v.)

    Small, 1-D and excluded parameters are treated the same, but travel as float32. ``error_feedback`` and ``exchange``
    apply to the codec. With ``two_shot``, which ``auto`` takes from 4 ranks on, both directions are compressed as in
    the paper, with one residual.

    The optimizer gets Adam's steps and not gradients, so the Trainer's ``gradient_clip_val`` is refused; clip on each
    rank with ``local_clip_norm``. A parameter that has no gradient on any rank keeps its momentum and variance. If only
    some ranks have a gradient, it counts as 0 on the others.

    Bits per element: 32 up to step f, then those of the codec, by default ``1 + 32 / block``. State: ``momentum`` and
    ``variance``, float32, the same on all ranks. Together with the residual and all second buffers, 24 bytes per
    parameter.

    Args:
        beta1: decay of m, in [0, 1).
        beta2: decay of v, in [0, 1).
        eps: added to the root of v, above 0.
        block: elements that share a magnitude; see ``EFSign``. It scales signs by the mean magnitude ``|x|_1 / block``,
            the scale with the least error. The authors' code takes ``|x|_2 / sqrt(d)``.
        quantiser: another codec for the momentum: a name, a mapping or an object.

    Raises:
        ValueError: a setting is out of range.

    Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam: Communication Efficient Large-Scale Training
    with Adam's Convergence Speed", ICML 2021, arXiv 2102.02888.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    block: int = 1024
    quantiser: Codec | Mapping[str, object] | str | None = None

    gone: ClassVar[Mapping[str, str]] = {"freeze_steps": "give warmup_steps=1000 beside the compressor"}

    def __post_init__(self) -> None:
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"OneBitAdam({name}={value!r}): {name} must be in [0, 1), as Adam's")
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)) or not self.eps > 0:
            raise ValueError(f"OneBitAdam(eps={self.eps!r}): eps must be above 0, as Adam's; 1e-8 is usual")
        EFSign(self.block)
        if self.quantiser is None:
            return
        if self.block != OneBitAdam.block:
            raise ValueError(
                f"OneBitAdam(block={self.block}, quantiser={self.quantiser!r}): block is ignored with a quantiser; "
                "give it to the quantiser"
            )
        codec = build("quantiser", self.quantiser, CODECS, (Codec,))
        object.__setattr__(self, "quantiser", codec)  # frozen; equal settings are equal, however they were given

    @property
    def codec(self) -> Codec:
        """The codec of the momentum."""
        return cast(Codec | None, self.quantiser) or EFSign(self.block)

    @property
    def correction(self) -> AdamCorrection:
        """Adam around the average."""
        return AdamCorrection(self.beta1, self.beta2, self.eps, self.dense_steps)

    @property
    def dense_steps(self) -> int:
        """Default of f, the step after which the variance is frozen."""
        return 1000


class _Plan(CorrectionPlan):
    def __init__(self, settings: AdamCorrection, layout: Layout, device: torch.device, states: States) -> None:
        self._settings = settings
        self._momentum, self._variance = states["momentum"], states["variance"]
        self._chunk = min(chunk_size(device), layout.numel)
        self._root = scratch("adam root", self._chunk, torch.float32, device)

    def before(self, vector: Vector) -> None:
        if vector.step >= self._settings.freeze_steps:
            vector.whole().lerp_(self._momentum.committed, self._settings.beta1)

    def after(self, vector: Vector) -> None:
        frozen = vector.step >= self._settings.freeze_steps
        # not base(): a step has one momentum, even with several backward passes
        old_momentum, old_variance = self._momentum.committed, self._variance.committed
        for piece, out in vector.stretches(self._chunk):
            momentum, variance = self._momentum.pending[piece], self._variance.pending[piece]
            if frozen:
                momentum.copy_(out)
                variance.copy_(old_variance[piece])
            else:
                torch.lerp(old_momentum[piece], out, 1 - self._settings.beta1, out=momentum)
                torch.mul(old_variance[piece], self._settings.beta2, out=variance)
                variance.addcmul_(out, out, value=1 - self._settings.beta2)
            self._direction(momentum, variance, out, vector.step)
            if frozen:
                zero_where_zero(out, variance)

    def _direction(self, momentum: Tensor, variance: Tensor, out: Tensor, step: int) -> None:
        """Write Adam's step to ``out``, rounded in the order of ``torch.optim.Adam``."""
        settings = self._settings
        root = torch.sqrt(variance, out=self._root[: len(variance)])
        root.div_((1 - settings.beta2 ** min(step + 1, settings.freeze_steps)) ** 0.5).add_(settings.eps)
        torch.div(momentum, root, out=out).div_(1 - settings.beta1 ** (step + 1))
