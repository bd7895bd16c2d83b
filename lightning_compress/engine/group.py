"""One group of parameters: gradients in, mean out, what was not sent kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import Dense
from lightning_compress.codecs.cast import StochasticRounding, dense_of
from lightning_compress.collectives import World
from lightning_compress.core.buffers import Scratch
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix, name_key
from lightning_compress.core.state import Declared, State, States, place_of
from lightning_compress.corrections.clipping import clip_each
from lightning_compress.engine import composite
from lightning_compress.engine.gradients import add_gradients, clean, copy_gradients, spoil
from lightning_compress.engine.unused import Unused, plan_unused
from lightning_compress.exchanges import AllReduce
from lightning_compress.exchanges.base import ExchangePlan
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.straight import average_in_place
from lightning_compress.kernels import Summands
from lightning_compress.settings.rules import Shape, Stretch
from lightning_compress.settings.settings import Settings

RESIDUAL = "residual"
_LARGE = 1e30
"""Magnitudes beyond it are those of a run that is lost."""


class Group:
    """The plans and the state of an ordered list of parameters.

    Args:
        parameters: names and shapes, in the bucket's order.
        settings: what the user chose.
        world: the ranks to average over.
        scratch: shared with other groups.
        unused: parameters may be without a gradient in a step, and have zeros there.
        dtype: of the gradients.
        owed: there may be a residual of these parameters already.

    Attributes:
        settings: what the user chose.
        given: names of the parameters, in the bucket's order.
        names: the same, in the vector's order.
        averages: the optimizer is given a mean of the ranks' gradients.
        states: what is kept from step to step: the residual, and what reducers and the correction declare.
        nonfinite: names of parameters whose gradients on this rank were not finite last time; on CUDA always none,
            which nobody has to wait for.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Shape]],
        settings: Settings,
        world: World,
        scratch: Scratch,
        unused: bool = True,
        dtype: torch.dtype = torch.float32,
        owed: bool = True,
    ) -> None:
        collective, device, meter = world
        self.given = tuple(name for name, _ in parameters)
        self.order, stretches = settings.rules.stretches(parameters)
        self.layout = Layout.of(parameters[place] for place in self.order)
        self.names = self.layout.names
        self._segments = [segment for segment in self.layout.segments if segment.numel]
        self.nonfinite: list[str] = []
        self.settings = settings
        self._world, self._collective, self._device, self._meter = world, collective, device, meter
        self._scratch = scratch
        self._key = mix(settings.seed, name_key(self.names))
        self._drawn: tuple[int, ...] = ()  # what this pass draws its random numbers from
        self.averages = settings.averages
        coarse = [each for each in stretches if each.method == settings.method or each.method.contractive]
        self._compressed = [each.place for each in coarse if not isinstance(each.method, Dense)]
        self._plain_method = dense_of(dtype)
        stretches = tuple(
            replace(each, method=self._plain_method) if isinstance(each.method, Dense) else each for each in stretches
        )
        exact = dtype == torch.float64 and all(isinstance(each.method, Dense) for each in stretches)
        corrected = self._make_states(stretches, settings.error_feedback and (owed or not exact))
        self._fused = kernels.compiler(device) == "triton"
        embeddings = settings.rules.of_kind("embedding")
        self._unused = plan_unused(stretches, self._segments, embeddings, self.states, self.residual, world, unused)
        self._correction = settings.correction and settings.correction.plan(
            self.layout, self._compressed, collective.size, device, corrected
        )
        if self._correction and self._correction.idle:
            self._correction = None
        fed_back = composite.everything if self._correction else settings.feeds_back
        self._exchange = composite.plan_group(stretches, settings.exchange, self._world, self.states, fed_back)
        self._dense: ExchangePlan | None = None
        self._unfed = [each.place for each in stretches if not settings.feeds_back(each.method)]
        # State outlives the scale of its step, and what is no average of gradients (a vote) has no scale of its own.
        means = all(each.method.conserves for each in stretches)
        self._unscales = bool(self.states) or settings.local_clip_norm is not None or not means
        self._sections = composite.sections_of(stretches)
        halved = self.residual is not None and settings.residual_dtype != torch.float32
        special = settings.local_clip_norm is not None or halved
        self._plain = self.residual is not None and not special and device.type == "cpu" and not self._fused
        self._fuses = self._fused and not halved
        self._rounding = StochasticRounding(self.layout.numel, device) if halved else None
        self._limit = min((each.codec.limit(collective.size) for each in self._sections), default=torch.inf)

    def _make_states(self, stretches: Sequence[Stretch], fed_back: bool) -> States:
        """Make all that is kept; returns what the correction declares."""
        settings, corrected = self.settings, {}
        kept = {RESIDUAL: Declared(self.layout, dtype=settings.residual_dtype)} if fed_back else {}
        exchanged = {
            f"{composite.EXCHANGE}.{name}": each for name, each in settings.exchange.state(self.layout).items()
        }
        if settings.correction is not None:
            corrected = dict(settings.correction.state(self.layout, self._compressed))
        self.states: States = {
            name: State(each.layout, self._device, each.initial, each.holder, each.dtype)
            for name, each in {**kept, **composite.declared(stretches), **corrected, **exchanged}.items()
        }
        self._always = [self.states[name] for name in (*kept, *corrected, *exchanged)]
        return {name: self.states[name] for name in corrected}

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
            whole = [Section(self._plain_method, self.layout, 0)]
            kept = composite.states_of(composite.EXCHANGE, self.states)
            special = self.settings.exchange.plan_dense(self._sections, self._world, kept)
            self._dense = special or AllReduce().plan(whole, self._world)
        return self._dense

    def adopted(self) -> None:
        """State was taken over from other groups."""
        self._exchange.adopted()

    def reduce(self, gradients: Sequence[Tensor], step: int, scale: Tensor | None, turn: int = 0) -> Tensor:
        """Replace gradients by their mean over the ranks.

        Args:
            gradients: contiguous, in the bucket's order; NaN everywhere afterwards if any rank's are not finite.
            step: how many steps were committed.
            scale: what the loss was multiplied by (automatic mixed precision), or None.
            turn: how many backward passes of this step came before.

        Returns:
            float32 scalar: 0.0, or NaN if any rank's gradients are not finite.
        """
        self._drawn = (self._key, step, turn) if turn else (self._key, step)
        slices = [gradients[place].view(-1) for place in self.order]
        pieces = [each for each in slices if each.numel()]
        if pieces and self._is_stock(pieces[0].dtype, step):
            return self._as_stock(pieces)
        flag = self._straight(pieces, step) if self._goes_straight(pieces, step, scale) else None
        if flag is None and scale is None and self._plain and self._fed(pieces):
            flag = self._in_place(pieces, step)
        elif flag is None:
            flag, mean = self._long_way(slices, step, scale)
            spoil(mean, flag)
            torch._foreach_copy_(slices, list(mean.split([segment.numel for segment in self.layout.segments])))
            return flag
        if self._device.type != "cpu":  # a cast passes it on where it is
            return flag
        if not self._known_zero(flag):
            for each in pieces:
                each.add_(flag)
        return flag

    def _is_stock(self, dtype: torch.dtype, step: int) -> bool:
        """Whether all is sent as it is, and nothing is kept, on all ranks alike."""
        if self.states or self._correction or self.settings.local_clip_norm is not None:
            return False
        straight = self.plan(step).straight
        return straight is not None and straight.is_own(dtype)

    def _as_stock(self, slices: list[Tensor]) -> Tensor:
        """What DistributedDataParallel does; returns the flag."""
        if self.settings.guards.on_nonfinite == "raise":  # and names the parameters
            self._note((_extremes(slices) * 0.0).sum(), slices)
        return average_in_place(slices, self._collective)

    def _goes_straight(self, slices: list[Tensor], step: int, scale: Tensor | None) -> bool:
        """Whether there is nothing to do but to average: what is sent is all there is, and nothing is owed."""
        if not slices or self._correction or self.settings.local_clip_norm is not None:
            return False
        if self._device.type != "cpu" and (self.states or self._limit < _LARGE):  # a device is not asked for numbers
            return False
        usual = scale is None or not self._unscales
        plain = usual and self.plan(step).straight and all(each.dtype == torch.float32 for each in slices)
        if self._unused and self._unused.keeps:
            return False
        return bool(plain) and (self.residual is None or self.residual.empty)

    def _unused_in(self, step: int) -> Unused | None:
        """Who looks for what no rank uses, on all ranks alike: nobody where some may average straight."""
        keeps = self._unused is not None and self._unused.keeps
        return self._unused if keeps or self.plan(step).straight is None else None

    def _straight(self, slices: list[Tensor], step: int) -> Tensor | None:
        """Average where the gradients are; returns the flag, or None where a number would have to be cut off."""
        straight = self.plan(step).straight
        assert straight is not None
        extremes = _extremes(slices)
        if self._device.type == "cpu" and float(extremes.abs().max()) > self._limit:
            return None
        flag = self._note((extremes * 0.0).sum(), slices)
        straight.mean(slices, flag)
        return flag

    def _fed(self, slices: list[Tensor]) -> bool:
        """The usual case in one pass: the residual and the gradients are in the pending numbers."""
        assert self.residual is not None
        self.nonfinite = []
        decay = self.settings.residual_decay
        if self.residual.touched or (self._correction and decay != 1):
            return False
        if self._correction:
            return self._correction.feed(slices, self.residual)
        return add_gradients(slices, self.residual, decay)

    def _in_place(self, slices: list[Tensor], step: int) -> Tensor:
        """Replace gradients, which were fed, by their mean; returns the flag."""
        assert self.residual is not None
        flag, plan, vector = torch.zeros((), device=self._device), self.plan(step), self.residual.pending
        unused = self._unused_in(step)
        if unused:
            unused.look(None)
            unused.begin(vector)
        if plan.in_pieces:
            self._exchanged(vector, slices, step, flag)
        else:
            mean = self._scratch.take("gradient", self.layout.numel)
            self._exchanged(vector, mean, step, flag)
            torch._foreach_copy_(slices, list(mean.split([each.numel() for each in slices])))
        if unused:
            unused.clear(vector, slices)
        if self._correction:
            self._correction.finish(slices, vector, self._lossy(step), step)
        self._touch(step)
        return flag

    def _lossy(self, step: int) -> list[slice]:
        """The stretches of which something stays behind."""
        plan = self.plan(step)
        return [place for place in self._compressed if not plan.is_dense(place)]

    def _long_way(self, slices: list[Tensor], step: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """With everything that may happen to a gradient; returns the flag and the mean."""
        gradient = self._scratch.take("gradient", self.layout.numel)
        if scale is None and copy_gradients(slices, gradient):
            self.nonfinite, flag = [], torch.zeros((), device=self._device)
        else:
            # where the message saturates, the scaler has to hear of it
            limit = torch.inf if scale is None or self._unscales else self._limit
            flag = self._note(clean(torch.cat(slices, out=gradient), limit), slices)
        if scale is not None and self._unscales:
            gradient.mul_(1.0 / scale)
        if self.settings.local_clip_norm is not None:
            parts = [gradient[place_of(segment)] for segment in self._segments]
            clip_each(parts, self.settings.local_clip_norm, self._collective.size, self.settings.local_clip_by)
        mean = self._mean(gradient, step, flag)
        if scale is not None and self._unscales:
            mean.mul_(scale)
        return flag, mean

    def _note(self, flag: Tensor, slices: Sequence[Tensor]) -> Tensor:
        """Remember whose gradients are not finite; nobody waits for a device to tell. Returns the flag."""
        looks = self._device.type == "cpu" and not self._known_zero(flag)
        pieces = zip(self._segments, (each for each in slices if each.numel()), strict=True)
        self.nonfinite = [segment.name for segment, each in pieces if looks and not each.isfinite().all()]
        return flag

    def _mean(self, gradient: Tensor, step: int, flag: Tensor) -> Tensor:
        """The mean; the states advance. ``gradient`` is used up."""
        compressed, unused = self._lossy(step), self._unused_in(step)
        if unused:
            unused.look(gradient)
        if self._correction:
            self._correction.before(gradient, compressed, step)
        again = self.residual is not None and bool(self.residual.touched)
        decay = 1.0 if again else self.settings.residual_decay  # once a step
        summands: Summands = None
        if self._fuses and self.residual is not None and not again and decay == 1:
            vector, mean, summands = self.residual.pending, gradient, (gradient, self.residual.committed)
        elif self.residual is None:
            vector, mean = gradient, self._scratch.take("mean", self.layout.numel)
        else:
            out = self._scratch.take("mean", self.layout.numel) if self._rounding else self.residual.pending
            vector, mean = torch.add(gradient, self.residual.base(), alpha=decay, out=out), gradient
        if unused:
            unused.begin(*(summands or [vector]))
        self._exchanged(vector, mean, step, flag, summands)
        if unused:
            unused.clear(vector, mean)
        if self._correction:
            self._correction.after(mean, vector, compressed, step)
        if unused:
            unused.restore(vector)
        if self._rounding and self.residual is not None:
            self._rounding.round(vector, self.residual.pending, mix(*self._drawn, self._collective.rank))
        self._touch(step)
        return mean

    def _exchanged(
        self, vector: Tensor, mean: Tensor | list[Tensor], step: int, flag: Tensor, summands: Summands = None
    ) -> None:
        """Write the mean of all ranks' vectors, in one tensor or in pieces; what is owed stays in ``vector``.

        ``summands``, if any, are what the vector is the sum of, which an accelerator's codecs add up by themselves.
        """
        before = (vector if summands is None else summands[0] + summands[1]).norm() if self._meter.sampling else None
        if summands is not None and isinstance(mean, Tensor):
            self.plan(step).mean_of_sum(*summands, vector, mean, mix(*self._drawn), flag)
        elif isinstance(mean, Tensor):
            self.plan(step).mean(vector, mean, mix(*self._drawn), flag)
        else:
            self.plan(step).mean_pieces(vector, mean, mix(*self._drawn), flag)
        if before is not None:
            self._meter.add_error(before, vector.norm())
        if self.residual is not None:
            for place in self._unfed:  # what an unbiased method leaves is noise
                vector[place].zero_()

    def _touch(self, step: int) -> None:
        for state in self._always if self.plan(step) is self._dense else self.states.values():
            state.touch()

    def _known_zero(self, flag: Tensor) -> bool:
        """Whether the flag is 0.0, where looking costs no wait for the device."""
        return self._device.type == "cpu" and float(flag) == 0.0


def _extremes(slices: Sequence[Tensor]) -> Tensor:
    """The least and the largest number of each; NaN where there is one."""
    return torch.cat([torch.stack(torch.aminmax(each)) for each in slices])
