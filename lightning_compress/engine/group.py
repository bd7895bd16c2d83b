"""One group of parameters: gradients in, mean out, what was not sent kept.

In each backward pass the group takes the first of three kinds of vectors that will do: the gradients where they are, if
there is nothing but to average them; ``Fed``, gradients added in one pass to what was kept; or ``Copied``, with
everything that may happen to a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import Dense
from lightning_compress.codecs.cast import StochasticRounding, dense_of
from lightning_compress.collectives import World
from lightning_compress.core.buffers import scratch
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix, name_key
from lightning_compress.core.state import Declared, State, States, place_of
from lightning_compress.corrections.clipping import clip_each
from lightning_compress.corrections.loco import LoCo, LoCoPlan
from lightning_compress.engine.accumulation import Kept
from lightning_compress.engine.gradients import add_gradients, clean, copy_gradients
from lightning_compress.engine.unused import Unused, plan_unused
from lightning_compress.engine.vectors import Copied, Fed, Pass, pass_on
from lightning_compress.exchanges import AllReduce, composite
from lightning_compress.exchanges.base import ExchangePlan
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.straight import average_in_place, side_by_side
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.settings import Settings

RESIDUAL, LOCO = "residual", "loco"
GRADIENT, MEAN = "group gradient", "group mean"
"""Scratch that groups share."""


class Group:
    """The plans and the state of an ordered list of parameters.

    Args:
        parameters: names and shapes, in the bucket's order.
        settings: what the user chose.
        world: the ranks to average over.
        unused: parameters may be without a gradient in a step, and have zeros there.
        dtype: of the gradients.
        had_residual: these parameters may have a residual already.

    Attributes:
        settings: what the user chose.
        given: names of the parameters, in the bucket's order.
        names: the same, in the vector's order.
        averages: the optimizer is given a mean of the ranks' gradients.
        states: what is kept from step to step: the residual, and what reducers and the correction declare.
        errors: averages of what was not sent, where these are fed back (LoCo), or None.
        nonfinite: names of parameters whose gradients on this rank were not finite last time; on CUDA always empty,
            since reading them would wait.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Shape]],
        settings: Settings,
        world: World,
        unused: bool = True,
        dtype: torch.dtype = torch.float32,
        had_residual: bool = True,
    ) -> None:
        collective, device, meter = world
        self.given = tuple(name for name, _ in parameters)
        self.order, sections = settings.rules.sections(parameters)
        self.layout = Layout.of(parameters[place] for place in self.order)
        self.names = self.layout.names
        self._segments = [segment for segment in self.layout.segments if segment.numel]
        self.nonfinite: list[str] = []
        self.settings = settings
        self._world, self._collective, self._device, self._meter = world, collective, device, meter
        self._key = mix(settings.seed, name_key(self.names))
        self.averages = settings.averages
        coarse = [each for each in sections if each.method == settings.method or each.method.contractive]
        self._compressed = [each.span for each in coarse if not isinstance(each.method, Dense)]
        self._plain_method = dense_of(dtype)
        sections = tuple(
            replace(each, method=self._plain_method) if isinstance(each.method, Dense) else each for each in sections
        )
        exact = dtype == torch.float64 and all(isinstance(each.method, Dense) for each in sections)
        corrected = self._make_states(sections, settings.error_feedback and (had_residual or not exact))
        self.errors = self._plan_loco(sections)
        self._fused = kernels.compiler(device) == "triton"
        embeddings = settings.rules.of_kind("embedding")
        self._unused = plan_unused(sections, self._segments, embeddings, self.states, self.residual, world, unused)
        self._correction = settings.correction and settings.correction.plan(
            self.layout, self._compressed, collective.size, device, corrected
        )
        if self._correction and self._correction.idle:
            self._correction = None
        fed = [settings.fed(each) for each in sections]
        fed = [replace(each, fed_back=True) for each in fed] if self._correction else fed
        self._exchange = composite.plan_group(fed, settings.exchange, self._world, self.states)
        self._dense: ExchangePlan | None = None
        self._unfed = [each.span for each in sections if settings.compensation(each.method) == "none"]
        self._loco_fed = [each.span for each in sections if isinstance(settings.compensation(each.method), LoCo)]
        # State outlives the scale of its step, and what is no average of gradients (a vote) has no scale of its own.
        means = all(each.method.conserves for each in sections)
        self._unscales = bool(self.states) or settings.local_clip_norm is not None or not means
        self._sections = composite.encoded(sections)
        halved = self.residual is not None and settings.residual_dtype != torch.float32
        special = settings.local_clip_norm is not None or halved
        one = (self.residual is None) != (self.errors is None)
        self._plain = one and not special and device.type == "cpu" and not self._fused
        self._fuses = self._fused and not halved
        self._rounding = StochasticRounding(self.layout.numel, device) if halved else None
        self._limit = min((each.codec.limit(collective.size) for each in self._sections), default=torch.inf)

    def _make_states(self, sections: Sequence[Section], fed_back: bool) -> States:
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
            for name, each in {**kept, **composite.declared(sections), **corrected, **exchanged}.items()
        }
        self._always = [self.states[name] for name in (*kept, *corrected, *exchanged)]
        return {name: self.states[name] for name in corrected}

    def _plan_loco(self, sections: Sequence[Section]) -> LoCoPlan | None:
        """The errors of those sections that have any, of which settings there is one."""
        ways = [(each, self.settings.compensation(each.method)) for each in sections]
        found = [(section, way) for section, way in ways if isinstance(way, LoCo)]
        if not found:
            return None
        made = LoCo.state([each for section, _ in found for each in section.layout.segments])
        self.states[LOCO] = State(made.layout, self._device, dtype=made.dtype)
        return LoCoPlan(found[0][1], self.layout, self.states[LOCO])

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

    def forget(self, kept: Kept) -> None:
        """Roll back what is kept of parameters whose averaged gradients were thrown away."""
        gone = [name for name, counts in kept.items() if counts is False]
        for state in self.states.values():
            state.discard(gone)
            for name, counts in kept.items():
                if isinstance(counts, Tensor):
                    state.reject(~counts, [name])

    def reduce(
        self,
        gradients: Sequence[Tensor],
        step: int,
        scale: Tensor | None,
        turn: int = 0,
        left_out: Collection[str] = frozenset(),
    ) -> Tensor:
        """Replace gradients by their mean over the ranks.

        Args:
            gradients: contiguous, in the bucket's order; NaN everywhere afterwards if any rank's are not finite.
            step: how many steps were committed.
            scale: what the loss was multiplied by (automatic mixed precision), or None.
            turn: how many backward passes of this step came before.
            left_out: parameters whose gradients on this rank are the means of the pass before.

        Returns:
            float32 scalar: 0.0, or NaN if any rank's gradients are not finite.
        """
        draws = (self._key, step, turn) if turn else (self._key, step)
        slices = [gradients[place].view(-1) for place in self.order]
        given = Pass(slices, [each for each in slices if each.numel()], self.plan(step), step, scale, draws, left_out)
        self.nonfinite = []
        if not given.pieces:
            return torch.zeros((), device=self._device)
        if (flag := self._averaged_in_place(given)) is not None:
            return flag
        vector = self._fed(given) or self._copied(given)
        unused, compressed = self._unused_of(given.plan), self._lossy(given.plan)
        if unused:
            unused.begin(*vector.summands)
        self._exchange_vector(vector, given)
        if unused:
            unused.clear(vector.vector, vector.mean)
        if self._correction:
            vector.correct(self._correction, compressed, step)
        for place in self._unfed if self.residual is not None else ():  # what an unbiased method leaves is noise
            vector.vector[place].zero_()
        if self.errors and given.plan is not self._dense:
            self.errors.keep(vector.vector, self._sent_dense(given.plan), step)
            for place in self._loco_fed if self.residual is not None else ():
                vector.vector[place].zero_()
        if unused:
            unused.restore(vector.vector)
        if self._rounding and self.residual is not None:
            self._rounding.round(vector.vector, self.residual.pending, mix(*draws, self._collective.rank))
        for state in self._always if given.plan is self._dense else self.states.values():
            state.touch()
        vector.give(slices)
        return vector.flag

    def _averaged_in_place(self, given: Pass) -> Tensor | None:
        """Average gradients where they are; returns the flag, or None where there is more to do than that."""
        straight, pieces = given.plan.straight, given.pieces
        if straight is None or not pieces or self._correction or self.settings.local_clip_norm is not None:
            return None
        if not self.states and straight.is_own(pieces[0].dtype):  # what DistributedDataParallel does, on all ranks
            if self.settings.on_nonfinite == "raise":  # and names the parameters
                self._note((_extremes(pieces) * 0.0).sum(), pieces)
            return average_in_place(pieces, self._collective)
        if not self._goes_straight(given, pieces):
            return None
        extremes = _extremes(pieces)
        if self._device.type == "cpu" and float(extremes.abs().max()) > self._limit:  # a number would be cut off
            return None
        flag = self._note((extremes * 0.0).sum(), pieces)
        straight.mean(pieces, flag)
        return pass_on(flag, pieces)

    def _goes_straight(self, given: Pass, pieces: Sequence[Tensor]) -> bool:
        """Whether what is sent is all there is: nothing is added to the gradients, and nothing of them is kept."""
        bounded = bool(self.states) or self._limit < kernels.LARGEST
        if bounded and self._device.type != "cpu":  # looking would wait for the device
            return False
        if (given.scale is not None and self._unscales) or any(each.dtype != torch.float32 for each in pieces):
            return False
        return not (self._unused and self._unused.keeps) and (self.residual is None or self.residual.empty)

    def _fed(self, given: Pass) -> Fed | None:
        """Gradient and residual added up in one pass: the usual case on a CPU; None where it is another."""
        residual, decay = self.residual, self.settings.residual_decay
        if not self._plain or given.scale is not None or given.left_out or (residual and residual.touched):
            return None
        if self.errors:
            vector = self._take(MEAN)
            added = self.errors.feed(given.pieces, vector, self._sent_dense(given.plan), given.step)
        else:
            assert residual is not None
            vector = residual.pending
            if self._correction:
                added = decay == 1 and self._correction.feed(given.pieces, residual)
            else:
                added = add_gradients(given.pieces, residual, decay)
        if not added:
            return None
        if unused := self._unused_of(given.plan):
            unused.look(None)
        whole = None if given.plan.in_pieces else self._take(GRADIENT)
        return Fed(vector, given.pieces, torch.zeros((), device=self._device), whole)

    def _copied(self, given: Pass) -> Copied:
        """Gradients copied, cleaned, unscaled, clipped and corrected, and the residual added."""
        gradient, scale = self._take(GRADIENT), given.scale if self._unscales else None
        if given.scale is None and copy_gradients(given.slices, gradient):
            flag = torch.zeros((), device=self._device)
        else:
            # where the message saturates, the scaler must see a non-finite value
            limit = torch.inf if given.scale is None or self._unscales else self._limit
            limit = min(limit, kernels.LARGEST) if self.states else limit
            flag = self._note(clean(torch.cat(given.slices, out=gradient), limit), given.pieces)
        if scale is not None:
            gradient.mul_(1.0 / scale)
        if self.settings.local_clip_norm is not None:
            parts = [gradient[place_of(segment)] for segment in self._segments]
            clip_each(parts, self.settings.local_clip_norm, self._collective.size, self.settings.local_clip_by)
        if unused := self._unused_of(given.plan):
            unused.look(gradient, given.left_out)
        if self._correction:
            self._correction.before(gradient, self._lossy(given.plan), given.step)
        if self.errors:
            self.errors.add(gradient, self._sent_dense(given.plan), given.step)
        if self.residual is None:
            return Copied(gradient, self._take(MEAN), flag, (gradient,), scale)
        again, decay = bool(self.residual.touched), self.settings.residual_decay
        if again and decay != 1:  # once a step, which some of the parameters may begin
            self.residual.decay(decay)
            decay = 1.0
        if self._fuses and not again and decay == 1:
            return Copied(self.residual.pending, gradient, flag, (gradient, self.residual.committed), scale)
        out = self._take(MEAN) if self._rounding else self.residual.pending
        vector = torch.add(gradient, self.residual.base(), alpha=decay, out=out)
        return Copied(vector, gradient, flag, (vector,), scale)

    def _exchange_vector(self, vector: Fed | Copied, given: Pass) -> None:
        """Average a vector over the ranks; what was not sent stays in it."""
        before = reduce(torch.add, vector.summands).norm() if self._meter.sampling else None
        _average(vector, given.plan, mix(*given.draws))
        if before is not None:
            self._meter.add_error(before, vector.vector.norm())

    def _take(self, name: str) -> Tensor:
        """Memory for a vector, shared with other groups."""
        return scratch(name, self.layout.numel, torch.float32, self._device)

    def _unused_of(self, plan: ExchangePlan) -> Unused | None:
        """What finds unused parameters, on all ranks alike; None where some ranks may average in place."""
        keeps = self._unused is not None and self._unused.keeps
        return self._unused if keeps or plan.straight is None else None

    def _sent_dense(self, plan: ExchangePlan) -> Sequence[slice]:
        """What is sent as it is, and no error with it."""
        return [slice(0, self.layout.numel)] if plan is self._dense else plan.dense_spans

    def _lossy(self, plan: ExchangePlan) -> list[slice]:
        """The sections of which something stays behind."""
        return [place for place in self._compressed if not plan.is_dense(place)]

    def _note(self, flag: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Note parameters with non-finite gradients, on the CPU only, where it costs no wait. Returns the flag."""
        if flag.device.type == "cpu" and float(flag) != 0.0:
            named = zip(self._segments, pieces, strict=True)
            self.nonfinite = [segment.name for segment, each in named if not each.abs().max() <= kernels.LARGEST]
        return flag


def _average(vector: Fed | Copied, plan: ExchangePlan, key: int) -> None:
    """Exchange messages; the mean is in ``vector.mean``."""
    if isinstance(vector, Copied):
        if len(vector.summands) == 2:
            plan.mean_of_sum(*vector.summands, vector.vector, vector.mean, key, vector.flag)
        else:
            plan.mean(vector.vector, vector.mean, key, vector.flag)
    elif vector.whole is None:
        plan.mean_pieces(vector.vector, vector.mean, key, vector.flag)
    else:
        plan.mean(vector.vector, vector.whole, key, vector.flag)
        torch._foreach_copy_(vector.mean, list(vector.whole.split([each.numel() for each in vector.mean])))


def _extremes(slices: Sequence[Tensor]) -> Tensor:
    """The least and the largest number of each, or of all; NaN where there is one."""
    if not slices[0].is_cpu and (flat := side_by_side(slices)) is not None:  # there a launch costs more than a pass
        slices = [flat]
    return torch.cat([torch.stack(torch.aminmax(each)) for each in slices])
