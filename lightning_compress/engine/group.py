"""One group of parameters: average its gradients, and keep what was not sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import Dense
from lightning_compress.codecs.cast import dense_of
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix, name_key
from lightning_compress.core.state import States, StateSpec
from lightning_compress.core.vector import Stage, Vector, kernel_of, new_flag, poison
from lightning_compress.corrections.clipping import Clip
from lightning_compress.corrections.loco import LoCo, LoCoPlan
from lightning_compress.engine.accumulation import Kept
from lightning_compress.engine.lanes import Lane
from lightning_compress.engine.programs import Programs, ours
from lightning_compress.engine.residual import ErrorFeedback, KeptErrors
from lightning_compress.engine.unused import FusedUnused, KeptStates, Unused, plan_unused
from lightning_compress.exchanges import AllReduce, Exchange, composite
from lightning_compress.exchanges.all_reduce import average_in_place, extremes
from lightning_compress.exchanges.exchange import ExchangePlan
from lightning_compress.exchanges.message import Section
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.run_state import RunState

RESIDUAL, LOCO = "residual", "loco"
MEMORY = ("gradient", "mean")
"""Names of scratch memory that all groups share."""


class Group:
    """The plans and states of an ordered list of parameters.

    Gradients go through the stages that the settings ask for, then the exchange, then the stages in reverse order. If
    there is no stage and nothing is encoded, they are averaged in place.

    Args:
        parameters: names and shapes, in the bucket's order.
        settings: the user's settings.
        world: the ranks to average over.
        unused: parameters may be without a gradient in a step; it is then zeros.
        dtype: of the gradients.
        had_residual: these parameters may have a residual already.

    Attributes:
        settings: the user's settings.
        bucket_names: names of the parameters, in the bucket's order.
        names: the same names, in the vector's order.
        averages: whether the optimizer gets a mean of the ranks' gradients.
        states: what is kept from step to step, by name: the residual, and the states of reducers and of the correction.
        residual: what encoding did not send, or None.
        lane: what it is averaged in; ``Groups`` sets it.
        errors: moving averages of what was not sent, if these are fed back (LoCo), or None.
        nonfinite: names of parameters whose last gradients on this rank were not finite; always empty on CUDA, because
            reading them would wait for the device.
    """

    lane: Lane

    def __init__(
        self,
        parameters: Sequence[tuple[str, Shape]],
        settings: RunState,
        world: World,
        unused: bool = True,
        dtype: torch.dtype = torch.float32,
        had_residual: bool = True,
    ) -> None:
        self.settings, self._world = settings, world
        self.bucket_names = tuple(name for name, _ in parameters)
        self.order, sections = settings.rules.sections(parameters)
        self.layout = Layout.of(parameters[place] for place in self.order)
        self.names = self.layout.names
        self.nonfinite: list[str] = []
        self.averages = settings.averages
        self._segments = [segment for segment in self.layout.segments if segment.numel]
        self._key = mix(settings.options.seed, name_key(self.names))
        self._alone, self._clips = world.collective.size == 1, settings.options.local_clip_norm is not None
        self._kernels = kernel_of(world.device), kernel_of(world.device, "triton")
        self._plain_method = dense_of(dtype)
        exact = dtype == torch.float64 and all(isinstance(each.method, Dense) for each in sections)
        coarse = [each for each in sections if each.method == settings.method or each.method.contractive]
        self._compressed = [each.span for each in coarse if not isinstance(each.method, Dense)]
        self._sections = [
            replace(each, method=self._plain_method) if isinstance(each.method, Dense) else each for each in sections
        ]
        self._make_states(settings.error_feedback and (had_residual or not exact))
        self.residual = self.states.get(RESIDUAL)
        self._stages, self._dense_steps = self._plan_stages(unused), settings.dense_steps
        self._unscale = Unscale()
        self._exchange = self._plan_exchange()
        # whoever writes the means reads the heads, then, if nothing else has to know what they say; and if nothing else
        # changes what is sent, the heads are written where it is copied
        self._tells = self._kernels[1] is not None and (self._looking is None or self._looking.late)
        looking, count = self._looking, len(self._segments)
        self._rows = looking.rows_of(count) if isinstance(looking, FusedUnused) else ((-1,) * count,) * 2
        self._opens = self._tells and all(
            isinstance(each, LoCoPlan | Unused | KeptStates) or (isinstance(each, ErrorFeedback) and each.plain)
            for each in self._stages
        )
        known = ours(settings.exchange, *(each.method for each in self._sections))
        self._programs = Programs(self._stages, self.states.values(), world, known)
        self._dense: ExchangePlan | None = None
        self._own = all(isinstance(each.method, Dense) or each.codec.sum_dtype == dtype for each in self._encoded)
        self._limit = min((each.codec.limit(world.collective.size) for each in self._encoded), default=torch.inf)

    @property
    def _encoded(self) -> list[Section]:
        return composite.codec_sections(self._sections)

    def _make_states(self, fed_back: bool) -> None:
        settings, layout = self.settings, self.layout
        kept = {RESIDUAL: StateSpec(layout, dtype=settings.residual.dtype)} if fed_back else {}
        corrected = settings.correction.state(layout, self._compressed) if settings.correction else {}
        self._corrected = list(corrected)
        declared = composite.state_specs(self._sections, settings.exchange, layout)
        exchanged = [name for name in declared if name.startswith(f"{composite.EXCHANGE}.")]
        self._always = [*kept, *corrected, *exchanged]  # the states that dense steps write, too
        averaged = [each for each in self._sections if isinstance(settings.compensation(each.method), LoCo)]
        errors = {LOCO: LoCo.state([each for part in averaged for each in part.layout.segments])} if averaged else {}
        everything = {**kept, **declared, **corrected, **errors}
        self.states: States = composite.new_states(everything, self._world.device)

    def _plan_stages(self, unused: bool) -> list[Stage]:
        settings, world, residual = self.settings, self._world, self.residual
        stages: list[Stage] = []
        embeddings = settings.rules.of_kind("embedding")
        ways = {each.span.start: settings.compensation(each.method) for each in self._sections}
        coded = [each.span for each in self._sections if not isinstance(each.method, Dense)]  # others leave zeros
        noise = [span for span in coded if ways[span.start] == "none"]
        changes = residual is not None and (bool(noise) or settings.residual.dtype != torch.float32)
        late = set(self.states) <= {LOCO, RESIDUAL} and not changes and not settings.correction
        given = self.states, world, unused, late
        looking = plan_unused(self._sections, self._segments, embeddings, *given)
        self._looking, self._marks = looking, looking.marks if looking else None
        self._keeps = looking is not None and bool(looking.kept)
        if looking and self._keeps:
            stages.append(KeptStates(looking))
        # states outlive the scale of their step, and votes lack the scale that the GradScaler will divide by
        means = all(each.method.conserves for each in self._sections)
        self._unscales = bool(self.states) or settings.options.local_clip_norm is not None or not means
        if clipping := settings.options.local_clip_norm:
            stages.append(Clip(clipping, world.collective.size))
        if residual and changes:
            stages.append(KeptErrors(residual, noise, world.collective.rank))
        self._corrects = False
        if settings.correction:
            plain = settings.residual.decay == 1 and settings.residual.dtype == torch.float32
            own = {name: self.states[name] for name in self._corrected}
            added = residual if plain else None
            correction = settings.correction.plan(self.layout, self._compressed, world, own, added)
            self._corrects = not correction.idle
            stages += [correction] * self._corrects
        self.errors: LoCoPlan | None = None
        if averaging := next((way for way in ways.values() if isinstance(way, LoCo)), None):
            self.errors = LoCoPlan(averaging, self.layout, self.states[LOCO], alone=residual is None)
            stages.append(self.errors)
        if residual:
            stages.append(ErrorFeedback(residual, settings.residual.decay))
        return [*stages, looking] if looking else stages

    def _plan_exchange(self) -> ExchangePlan:
        fed = [replace(self.settings.fed(each), marks=self._marks) for each in self._sections]
        exact = self.residual is not None  # which gets zeros for what is sent as it is
        fed = [
            replace(each, fed_back=True) if self._corrects or (exact and isinstance(each.method, Dense)) else each
            for each in fed
        ]
        return composite.plan_group(fed, self.settings.exchange, self._world, self.states)

    def plan(self, step: int) -> ExchangePlan:
        """Return the exchange of a step: dense while the compression warms up."""
        if not self._is_dense(step):
            self._dense = None
            return self._exchange
        if self._dense is None:
            exchange = self.settings.exchange
            if exchange.keeper:
                assert isinstance(exchange, Exchange)
                self._dense = exchange.keeper.plan_dense(exchange, *self._kept)
            else:
                self._dense = AllReduce().plan([Section(self._plain_method, self.layout, 0)], self._world)
        return self._dense

    def _is_dense(self, step: int) -> bool:
        # one rank has nothing to compress: with a dense plan, corrections and clipping are exactly the optimizer's
        return step < self._dense_steps or (self._alone and (self._corrects or self._clips))

    @property
    def _kept(self) -> tuple[list[Section], World, States]:
        """The arguments of the exchange's keeper: sections, ranks and the exchange's states."""
        return self._encoded, self._world, composite.states_of(composite.EXCHANGE, self.states)

    def adopted(self) -> None:
        """Tell the exchange's keeper that states were copied from other groups."""
        if keeper := self.settings.exchange.keeper:
            keeper.adopted(*self._kept)

    def forget(self, kept: Kept) -> None:
        """Roll back the states of parameters whose averaged gradients were discarded."""
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
            gradients: contiguous, in the bucket's order; all NaN afterwards if any rank's are not finite.
            step: number of committed steps.
            scale: the factor of the loss (automatic mixed precision), float32 scalar, or None.
            turn: number of earlier backward passes in this step.
            left_out: names of parameters whose gradients on this rank are still the means of the pass before.

        Returns:
            float32 scalar: 0.0, or NaN if any rank's gradients are not finite.
        """
        self.nonfinite = []
        if not self._programs.able:
            return self._reduce(gradients, step, scale, turn, left_out, step)
        mode = self._programs.mode(gradients, self._is_dense(step), step, scale, turn, left_out)
        return self._programs.run(mode, step, partial(self._reduce, gradients, step, scale, turn, left_out))

    def _reduce(
        self,
        gradients: Sequence[Tensor],
        step: int,
        scale: Tensor | None,
        turn: int,
        left_out: Collection[str],
        drawn: int,
    ) -> Tensor:
        """Do the work of ``reduce``; random numbers follow from ``drawn``, the step as a program knows it."""
        pieces = [each for place in self.order if len(each := gradients[place].view(-1))]
        plan = self.plan(step)
        if not pieces:
            return torch.zeros((), dtype=torch.float32, device=self._world.device)
        if (flag := self._averaged_in_place(pieces, plan, scale)) is not None:
            return flag
        draws = (self._key, drawn, turn) if turn else (self._key, drawn)
        vector = self._vector(pieces, plan, step, scale, draws, left_out)
        stages = self._stages if vector.scale is vector.factor else [self._unscale, *self._stages]
        for stage in stages:
            stage.before(vector)
        if vector.source is None:
            vector.send()
        self._exchange_vector(vector, plan)
        self.nonfinite = [self._segments[number].name for number in vector.nonfinite]
        for stage in reversed(stages):
            stage.after(vector)
        for name in self._always if plan is self._dense else self.states:
            self.states[name].touch()
        vector.give()
        return vector.flag

    def _vector(
        self,
        pieces: list[Tensor],
        plan: ExchangePlan,
        step: int,
        scale: Tensor | None,
        draws: tuple[int, ...],
        left_out: Collection[str],
    ) -> Vector:
        limit = torch.inf if scale is None or self._unscales else self._limit  # larger values saturate the message
        limit = min(limit, kernels.LARGEST) if self.states else limit
        dense = [slice(0, self.layout.numel)] if plan is self._dense else plan.dense_spans
        scale = scale if self._unscales else None
        vector = Vector(
            pieces, step, scale, draws, left_out, limit, dense, plan.in_place is not None, plan.marked, *self._kernels
        )
        changed = (self._keeps and left_out) or (self.residual and self.residual.touched)  # and not as the heads tell
        if self._opens and vector.bucket and not changed:
            vector.opening, vector.marks, vector.factor = plan.opening, self._rows, scale
            vector.looked = self.residual.committed if self.residual else None
        return vector

    def _averaged_in_place(self, pieces: list[Tensor], plan: ExchangePlan, scale: Tensor | None) -> Tensor | None:
        """Average gradients in their own memory and return the flag; return None if more has to be done."""
        if self._corrects or self._clips or plan.in_place is None:
            return None
        if not self.states and (self._own or plan is self._dense):  # all ranks average as DistributedDataParallel does
            if self.settings.options.on_nonfinite == "raise":  # the error names the parameters
                self._note((extremes(pieces) * 0.0).sum(), pieces)
            return average_in_place(pieces, self._world.collective)
        if not self._nothing_else(pieces, scale):
            return None
        if self._kernels[1]:  # they find what is not finite while they cast
            flag = new_flag(self._world.device)
            plan.in_place.mean(pieces, flag)
            return flag
        bounds = extremes(pieces)
        on_cpu = self._world.device.type == "cpu"
        if on_cpu and float(bounds.abs().max()) > self._limit:  # a value would saturate
            return None
        flag = self._note((bounds * 0.0).sum(), pieces)
        plan.in_place.mean(pieces, flag)
        if on_cpu:  # on an accelerator the means are non-finite already
            poison(pieces, flag)
        return flag

    def _nothing_else(self, pieces: Sequence[Tensor], scale: Tensor | None) -> bool:
        """Whether gradients are sent unchanged: nothing is added to them, and no residual is kept."""
        bounded = bool(self.states) or self._limit < kernels.LARGEST
        if bounded and self._world.device.type != "cpu":  # a check would wait for the device
            return False
        if (scale is not None and self._unscales) or pieces[0].dtype != torch.float32:
            return False
        return not self._keeps and (self.residual is None or self.residual.empty)

    def _exchange_vector(self, vector: Vector, plan: ExchangePlan) -> None:
        """Average the vector over the ranks; what was not sent stays in it."""
        meter, rest, source = self._world.meter, vector.rest, vector.source
        assert source
        plan.opened = vector.opening is not None
        plan.tells = self._tells and vector.bucket is not None and (plan.opened or not self._keeps)
        if not meter.sampling:
            plan.mean(rest, vector.out(), mix(*vector.draws), vector.flag, source)
            vector.told = plan.told
            return
        before = source.into(rest).norm()
        plan.mean(rest, vector.out(), mix(*vector.draws), vector.flag)
        vector.told = plan.told
        meter.add_error(before, rest.norm())

    def _note(self, flag: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Record which parameters have non-finite gradients, and return the flag. CPU only: reading is free there."""
        if flag.device.type == "cpu" and not self._kernels[1] and float(flag) != 0.0:
            pairs = zip(self._segments, pieces, strict=True)
            self.nonfinite = [segment.name for segment, piece in pairs if not piece.abs().max() <= kernels.LARGEST]
        return flag


class Unscale(Stage):
    """Divide gradients by the loss scale, because states outlive the scale of their step."""

    def __init__(self) -> None:
        self._inverse: Tensor | None = None

    def before(self, vector: Vector) -> None:
        """See ``Stage``."""
        assert vector.scale is not None
        if self._inverse is None:
            self._inverse = torch.empty_like(vector.scale)
        vector.whole().mul_(torch.reciprocal(vector.scale, out=self._inverse))

    def after(self, vector: Vector) -> None:
        """See ``Stage``."""
        assert vector.scale is not None
        torch._foreach_mul_(vector.means, vector.scale)
