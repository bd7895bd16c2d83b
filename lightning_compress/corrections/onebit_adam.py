"""1-bit Adam: once the variance has settled, the momentum is what is averaged, compressed."""

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
    """Adam around an average; see ``OneBitAdam``, which checks the settings."""

    counts_steps: ClassVar[bool] = True
    beta1: float
    beta2: float
    eps: float
    freeze_steps: int

    def begun(self, dense_steps: int) -> AdamCorrection:
        """See ``Correction.begun``."""
        if dense_steps < 1:
            raise ValueError(
                f"warmup_steps={dense_steps}: onebit_adam needs dense steps, from which its variance comes, 1 or more; "
                "15 to 25 % of all steps are usual"
            )
        return replace(self, freeze_steps=dense_steps)

    def state(self, layout: Layout, compressed: Sequence[slice]) -> Mapping[str, StateSpec]:
        """Adam's two moments, the same on all ranks."""
        return {"momentum": StateSpec(layout, "shared"), "variance": StateSpec(layout, "shared")}

    def plan(
        self, layout: Layout, compressed: Sequence[slice], world: World, states: States, residual: State | None
    ) -> CorrectionPlan:
        """See ``Correction.plan``."""
        return _Plan(self, layout, world.device, states)

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Refuse anything but SGD without momentum.

        Raises:
            ValueError: it is something else.
        """
        kind = type(optimizer).__name__
        momentum = next((group["momentum"] for group in optimizer.param_groups if group.get("momentum")), 0)
        if not isinstance(optimizer, SGD) or momentum:
            what = f"{kind}(momentum={momentum})" if momentum else kind
            raise ValueError(
                f"{what} (which has {', '.join(names[:3])}) does the work a second time: onebit_adam is Adam itself: "
                "give it torch.optim.SGD(lr=..., weight_decay=...), with AdamW's lr and weight_decay and no momentum"
            )
        return None


@dataclass(frozen=True)
class OneBitAdam(Corrected):
    """Adam whose variance stands still after a while, so that its momentum can be averaged in one bit an element.

    In step t = 1, 2, ... up to f, the strategy's ``warmup_steps``, the gradient g_i of each rank is averaged as it is::

        m <- beta1 m + (1 - beta1) mean(g_i)
        v <- beta2 v + (1 - beta2) mean(g_i)^2

    and afterwards v stays, and what is averaged, compressed and with error feedback, is every rank's momentum::

        m <- mean(compressed(beta1 m + (1 - beta1) g_i + residual_i))

    The optimizer is given ``m / (1 - beta1^t) / (sqrt(v / (1 - beta2^s)) + eps)`` with ``s = min(t, f)`` as
    the gradient, 0 where a frozen v is 0 (an element that was not used before v froze does not train afterwards). It
    has to be ``torch.optim.SGD`` without momentum, which with its lr and weight_decay then is AdamW; any other one is
    refused. (DeepSpeed's implementation corrects neither m nor v for their beginning at 0.) Small, 1-D and excluded
    parameters go the same way, but travel as float32. ``error_feedback`` and ``exchange`` are those of the codec: with
    two_shot, as ``auto`` takes from 4 ranks on, both directions are compressed, as in the paper, with one residual.

    The optimizer is given steps of Adam, not gradients, so that a Trainer's ``gradient_clip_val`` is refused: clip on
    each rank with ``local_clip_norm``. A parameter without a gradient on any rank keeps momentum and variance; without
    one on some ranks it has one of 0 there.

    Bits per element: 32 up to step f, then those of the codec, by default ``1 + 32 / block``. State:
    ``momentum`` and ``variance``, float32, the same on all ranks, beside the residual: with their second buffers 24
    bytes per parameter.

    Args:
        beta1: decay of m, in [0, 1).
        beta2: decay of v, in [0, 1).
        eps: added to the root of v, above 0.
        block: elements that share a magnitude, see ``EFSign``, which scales signs by the mean magnitude
            ``|x|_1 / block``, the closest of all scales, where the authors' code takes ``|x|_2 / sqrt(d)``.
        quantiser: another codec for the momentum, by name, mapping or object.

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
                f"OneBitAdam(block={self.block}, quantiser={self.quantiser!r}): block is that of the signs which a "
                "quantiser stands in for; give it to the quantiser"
            )
        codec = build("quantiser", self.quantiser, CODECS, (Codec,))
        object.__setattr__(self, "quantiser", codec)  # frozen; equal settings are equal, however they were given

    @property
    def codec(self) -> Codec:
        """What the momentum is compressed by."""
        return cast(Codec | None, self.quantiser) or EFSign(self.block)

    @property
    def correction(self) -> AdamCorrection:
        """The optimizer."""
        return AdamCorrection(self.beta1, self.beta2, self.eps, self.dense_steps)

    @property
    def dense_steps(self) -> int:
        """Until the variance freezes."""
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
        # not base(): a step has one momentum, however many backwards it takes to come to it
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
        """What Adam steps along, in the order of rounding of torch's."""
        settings = self._settings
        root = torch.sqrt(variance, out=self._root[: len(variance)])
        root.div_((1 - settings.beta2 ** min(step + 1, settings.freeze_steps)) ** 0.5).add_(settings.eps)
        torch.div(momentum, root, out=out).div_(1 - settings.beta1 ** (step + 1))
