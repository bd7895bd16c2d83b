"""One group of parameters: gradients in, mean out, what was not sent kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress import bridge
from lightning_compress.codecs import Dense
from lightning_compress.codecs.bfloat16 import StochasticRounding
from lightning_compress.collectives import Collective
from lightning_compress.corrections.clipping import clip_each
from lightning_compress.exchanges import AllReduce
from lightning_compress.exchanges.base import ExchangePlan
from lightning_compress.feedback import add_gradients, copy_gradients
from lightning_compress.keys import mix, name_key
from lightning_compress.layout import Layout, Segment
from lightning_compress.message import Section
from lightning_compress.meter import Meter
from lightning_compress.reducers import Reducer
from lightning_compress.rules import Shape
from lightning_compress.scratch import Scratch
from lightning_compress.settings import Settings
from lightning_compress.state import Declared, State, States, place_of

RESIDUAL = "residual"


class Group:
    """The plans and the state of an ordered list of parameters.

    Args:
        parameters: names and shapes, in the bucket's order.
        settings: what the user chose.
        collective: the ranks to average over.
        device: where gradients are.
        meter: counts.
        scratch: shared with other groups.

    Attributes:
        settings: what the user chose.
        given: names of the parameters, in the bucket's order.
        names: the same, in the vector's order.
        states: what is kept from step to step: the residual, and what reducers and the correction declare.
        nonfinite: names of parameters whose gradients on this rank were not finite last time; on CUDA always none,
            which nobody has to wait for.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Shape]],
        settings: Settings,
        collective: Collective,
        device: torch.device,
        meter: Meter,
        scratch: Scratch,
    ) -> None:
        self.given = tuple(name for name, _ in parameters)
        self.order, stretches = settings.rules.stretches(parameters)
        self.layout = Layout.of(parameters[place] for place in self.order)
        self.names = self.layout.names
        self._segments = [segment for segment in self.layout.segments if segment.numel]
        self._starts = torch.tensor([segment.offset for segment in self._segments], device=device)
        self.nonfinite: list[str] = []
        self.settings = settings
        self._collective = collective
        self._device = device
        self._meter = meter
        self._scratch = scratch
        self._key = mix(settings.seed, name_key(self.names))
        coarse = [each for each in stretches if each.method == settings.method or each.method.contractive]
        self._compressed = [each.place for each in coarse if not isinstance(each.method, Dense)]
        kept = {RESIDUAL: Declared(self.layout, dtype=settings.residual_dtype)} if settings.error_feedback else {}
        theirs, corrected = bridge.declared(stretches), {}
        exchanged = {f"{bridge.EXCHANGE}.{name}": each for name, each in settings.exchange.state(self.layout).items()}
        if settings.correction is not None:
            corrected = dict(settings.correction.state(self.layout, self._compressed))
        self.states: States = {
            name: State(each.layout, device, each.initial, each.holder, each.dtype)
            for name, each in {**kept, **theirs, **corrected, **exchanged}.items()
        }
        self._always = [self.states[name] for name in (*kept, *corrected, *exchanged)]
        self._held = [state for state in self._always if state.holder == "rank"]
        # what a correction makes of a gradient of zero is the others' too, if it comes from what all have
        self._sends_shared = bool(corrected) and all(self.states[name].holder == "shared" for name in corrected)
        self._correction = settings.correction and settings.correction.plan(
            self.layout, self._compressed, collective.size, device, {name: self.states[name] for name in corrected}
        )
        if self._correction and self._correction.idle:
            self._correction = None
        fed_back = bridge.everything if self._correction else settings.feeds_back
        self._exchange = bridge.plan_group(
            stretches, settings.exchange, collective, device, meter, self.states, fed_back
        )
        self._dense: ExchangePlan | None = None
        self._unfed = [each.place for each in stretches if not settings.feeds_back(each.method)]
        # State outlives the scale of its step, and what is no average of gradients (a vote) has no scale of its own.
        self._unscales = (
            bool(self.states)
            or settings.local_clip_norm is not None
            or any(isinstance(each.method, Reducer) and not each.method.conserves for each in stretches)
        )
        self._sections = bridge.sections_of(stretches)
        halved = self.residual is not None and settings.residual_dtype != torch.float32
        special = self._correction or settings.local_clip_norm is not None or halved
        self._plain = self.residual is not None and not special and device.type == "cpu"
        self._rounding = StochasticRounding(self.layout.numel, device) if halved else None
        self._limit = min((each.codec.limit(collective.size) for each in self._sections), default=torch.inf)

    @property
    def residual(self) -> State | None:
        """What encoding left behind."""
        return self.states.get(RESIDUAL)

    def plan(self, step: int) -> ExchangePlan:
        """The exchange of a step: dense while the compression warms up."""
        # on one rank they are the optimizer exactly, and nothing has to be compressed
        local = self._correction is not None or self.settings.local_clip_norm is not None
        alone = self._collective.size == 1 and local
        if step >= self.settings.dense_steps and not alone:
            self._dense = None
            return self._exchange
        if self._dense is None:
            whole = [Section(Dense(), self.layout, 0)]
            world = (self._collective, self._device, self._meter)
            kept = bridge.states_of(bridge.EXCHANGE, self.states)
            special = self.settings.exchange.plan_dense(self._sections, *world, kept)
            self._dense = special or AllReduce().plan(whole, *world)
        return self._dense

    def adopted(self) -> None:
        """State was taken over from other groups."""
        self._exchange.adopted()

    def reduce(self, gradients: Sequence[Tensor], step: int, scale: Tensor | None) -> Tensor:
        """Replace gradients by their mean over the ranks.

        Args:
            gradients: contiguous, in the bucket's order; NaN everywhere afterwards if any rank's are not finite.
            step: how many steps were committed.
            scale: what the loss was multiplied by (automatic mixed precision), or None.

        Returns:
            float32 scalar: 0.0, or NaN if any rank's gradients are not finite.
        """
        slices = [gradients[place].view(-1) for place in self.order]
        if scale is None and self._plain and self._fed(slices, step):
            assert self.residual is not None
            flag, mean = torch.zeros((), device=self._device), self._scratch.take("gradient", self.layout.numel)
            self._exchanged(self.residual.pending, mean, step, flag)
            self._touch(step)
        else:
            flag, mean = self._long_way(slices, step, scale)
        if not self._known_zero(flag):
            mean.add_(flag)
        torch._foreach_copy_(slices, list(mean.split([segment.numel for segment in self.layout.segments])))
        return flag

    def _fed(self, slices: list[Tensor], step: int) -> bool:
        """The usual case in one pass: the residual and the gradients are in the pending numbers."""
        assert self.residual is not None
        slices = [each for each in slices if each.numel()]
        self.nonfinite = []
        untouched = not self.residual.touched
        return untouched and add_gradients(slices, self.residual, self.settings.residual_decay)

    def _long_way(self, slices: list[Tensor], step: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """With everything that may happen to a gradient; returns the flag and the mean."""
        gradient = self._scratch.take("gradient", self.layout.numel)
        if scale is None and copy_gradients(slices, gradient):
            self.nonfinite, flag = [], torch.zeros((), device=self._device)
        else:
            flag = self._flag(torch.cat(slices, out=gradient), scale)
        if scale is not None and self._unscales:
            gradient.mul_(1.0 / scale)
        if self.settings.local_clip_norm is not None:
            parts = [gradient[place_of(segment)] for segment in self._segments]
            clip_each(parts, self.settings.local_clip_norm, self._collective.size)
        mean = self._mean(gradient, step, flag)
        if scale is not None and self._unscales:
            mean.mul_(scale)
        return flag, mean

    def _flag(self, gradient: Tensor, scale: Tensor | None) -> Tensor:
        """0.0, or NaN where a gradient is not finite: codecs are given zeros then, and the flag carries the news."""
        lowest, highest = torch.aminmax(gradient)
        flag = (lowest + highest) * 0.0
        if scale is not None and not self._unscales:  # where the message saturates, the scaler has to hear of it
            flag.masked_fill_(torch.maximum(-lowest, highest) > self._limit, torch.nan)
        self.nonfinite = []
        if self._known_zero(flag):
            return flag
        if self._device.type == "cpu":
            self.nonfinite = [each.name for each in self._segments if not gradient[place_of(each)].isfinite().all()]
        gradient.masked_fill_(flag.isnan(), 0.0)
        return flag

    def _mean(self, gradient: Tensor, step: int, flag: Tensor) -> Tensor:
        """The mean; the states advance. ``gradient`` is used up."""
        plan = self.plan(step)
        compressed = [place for place in self._compressed if not plan.is_dense(place)]
        held = self._hold_unused(gradient) if self._held else []
        if self._correction:
            self._correction.before(gradient, compressed, step)
        again = self.residual is not None and bool(self.residual.touched)
        decay = 1.0 if again else self.settings.residual_decay  # once a step
        if self.residual is None:
            vector, mean = gradient, self._scratch.take("mean", self.layout.numel)
        else:
            out = self._scratch.take("mean", self.layout.numel) if self._rounding else self.residual.pending
            vector, mean = torch.add(gradient, self.residual.base(), alpha=decay, out=out), gradient
        for place, mask, kept in held:
            if self._sends_shared:
                torch.addcmul(gradient[place], kept[0], mask, value=decay, out=vector[place])
            else:
                vector[place].mul_(mask)
        self._exchanged(vector, mean, step, flag)
        if self._correction:
            self._correction.after(mean, vector, compressed, step)
        for place, mask, kept in held:
            for state, numbers in zip(self._held, kept, strict=True):
                if state is self.residual:  # which also owes what encoding took of the zeros it was given
                    vector[place].addcmul_(numbers, 1 - mask)
                else:
                    state.pending[place].mul_(mask).addcmul_(numbers, 1 - mask)
        if self._rounding and self.residual is not None:
            self._rounding.round(vector, self.residual.pending, mix(self._key, step, self._collective.rank))
        self._touch(step)
        return mean

    def _exchanged(self, vector: Tensor, mean: Tensor, step: int, flag: Tensor) -> None:
        """Write the mean of all ranks' vectors; what is owed stays in ``vector``."""
        before = vector.norm() if self._meter.sampling else None
        self.plan(step).mean(vector, mean, mix(self._key, step), flag)
        if before is not None:
            self._meter.add_error(before, vector.norm())
        if self.residual is not None:
            for place in self._unfed:  # what an unbiased method leaves is noise
                vector[place].zero_()

    def _touch(self, step: int) -> None:
        for state in self._always if self.plan(step) is self._dense else self.states.values():
            state.touch()

    def _hold_unused(self, gradient: Tensor) -> list[tuple[slice, Tensor, list[Tensor]]]:
        """States of parameters without a gradient on this rank: DDP may throw their mean away, so they stay home.

        Returns:
            where, 0.0 or 1.0 by which what is sent is multiplied, and each state's numbers.
        """
        if self._device.type == "cpu":
            suspects = (gradient[self._starts] == 0).nonzero().flatten().tolist()
            segments = [self._segments[place] for place in suspects]
            segments = [segment for segment in segments if not gradient[place_of(segment)].any()]
            masks = gradient.new_zeros(len(segments)).unbind()
        else:
            segments = self._segments
            slices = [gradient[place_of(segment)] for segment in segments]
            masks = (torch.stack(torch._foreach_norm(slices, torch.inf)) != 0).float().unbind()
        return [self._hold(segment, mask) for segment, mask in zip(segments, masks, strict=True)]

    def _hold(self, segment: Segment, mask: Tensor) -> tuple[slice, Tensor, list[Tensor]]:
        place = place_of(segment)
        return place, mask, [state.base()[place].to(torch.float32, copy=True) for state in self._held]

    def _known_zero(self, flag: Tensor) -> bool:
        """Whether the flag is 0.0, where looking costs no wait for the device."""
        return self._device.type == "cpu" and float(flag) == 0.0
