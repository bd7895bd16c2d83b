"""What of a group's steps is decided once: its sections, its states, its stages and its exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lightning_compress import kernels
from lightning_compress.codecs import Codec, Dense
from lightning_compress.codecs.cast import StochasticRounding, dense_of
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.core.random import mix, name_key
from lightning_compress.core.state import State, States, StateSpec
from lightning_compress.core.vector import Stage, Vector
from lightning_compress.corrections.clipping import Clip
from lightning_compress.corrections.correction import CorrectionPlan
from lightning_compress.corrections.loco import LoCo, LoCoPlan
from lightning_compress.engine.unused import FusedUnused, KeptStates, Unused, plan_unused
from lightning_compress.exchanges import composite
from lightning_compress.exchanges.exchange import ExchangePlan
from lightning_compress.exchanges.message import Section
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.run_state import RunState

RESIDUAL, LOCO = "residual", "loco"


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """What a group does in each step.

    Attributes:
        settings: the user's.
        world: the ranks to average over.
        dtype: of the gradients.
        order: for each parameter in the vector, its place in the bucket.
        layout: of the vector.
        segments: those that are not empty.
        sections: of the vector, by method.
        compressed: slices that a codec compresses, except in dense steps.
        states: what is kept from step to step, by name.
        always: names of the states that dense steps write, too.
        stages: before the residual is added, and after the exchange in reverse order.
        looking: finds what is unused, after the residual was added; or None.
        exchange: of steps that are compressed.
    """

    settings: RunState
    world: World
    dtype: torch.dtype
    order: Sequence[int]
    layout: Layout
    segments: Sequence[Segment]
    sections: Sequence[Section]
    compressed: Sequence[slice]
    states: States
    always: Sequence[str]
    stages: Sequence[Stage]
    looking: Unused | None
    exchange: ExchangePlan

    @cached_property
    def decay(self) -> float:
        """Factor of the residual, once per step."""
        return self.settings.residual.decay

    @cached_property
    def key(self) -> int:
        """Of the group's random numbers."""
        return mix(self.settings.options.seed, name_key(self.layout.names))

    @cached_property
    def errors(self) -> LoCoPlan | None:
        """Moving averages of what was not sent, if these are fed back (LoCo)."""
        return next((each for each in self.stages if isinstance(each, LoCoPlan)), None)

    @cached_property
    def dense(self) -> Codec:
        """The codec of steps that are not compressed."""
        return dense_of(self.dtype)

    @cached_property
    def dense_steps(self) -> float:
        """How many steps are dense in the beginning."""
        # one rank has nothing to compress: with a dense plan, corrections and clipping are exactly the optimizer's
        return math.inf if self.world.collective.size == 1 and self.changes else self.settings.dense_steps

    @cached_property
    def unscales(self) -> bool:
        """Gradients are divided by the loss scale before the first stage."""
        # states outlive the scale of their step, and votes lack the scale that the GradScaler will divide by
        kept = bool(self.states or self.settings.options.local_clip_norm)
        return kept or not all(each.method.conserves for each in self.sections)

    @cached_property
    def changes(self) -> bool:
        """A correction or clipping changes gradients, so that they cannot be averaged in place."""
        return any(isinstance(each, CorrectionPlan | Clip) for each in self.stages)

    @cached_property
    def keeps(self) -> bool:
        """Parameters without a gradient keep their states."""
        return any(isinstance(each, KeptStates) for each in self.stages)

    @cached_property
    def _codecs(self) -> list[Codec]:
        return [each.codec for each in composite.codec_sections(self.sections)]

    @cached_property
    def own(self) -> bool:
        """What is sent has the gradients' dtype."""
        return all(isinstance(codec, Dense) or codec.sum_dtype == self.dtype for codec in self._codecs)

    @cached_property
    def limit(self) -> float:
        """A larger magnitude would saturate a message."""
        return min((codec.limit(self.world.collective.size) for codec in self._codecs), default=math.inf)

    @cached_property
    def most(self) -> float:
        """A larger magnitude counts as not finite, whatever is sent."""
        return kernels.LARGEST if self.states else math.inf

    @cached_property
    def tells(self) -> bool:
        """Whoever writes the means reads the heads of messages, because nothing else has to know what they say."""
        return kernels.compiler(self.world.device) == "triton" and (self.looking is None or self.looking.late)

    @cached_property
    def opens(self) -> bool:
        """Heads are written where gradients are copied, because nothing else changes what is sent."""
        untouched = RESIDUAL not in self.states or self.settings.residual.plain
        return self.tells and untouched and all(isinstance(each, LoCoPlan | KeptStates) for each in self.stages)

    @cached_property
    def marks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each segment, its row of the mask of what is used, or -1: if it is kept, and if it is mixed."""
        count = len(self.segments)
        return self.looking.rows_of(count) if isinstance(self.looking, FusedUnused) else ((-1,) * count,) * 2


def plan_of(
    parameters: Sequence[tuple[str, Shape]],
    settings: RunState,
    world: World,
    unused: bool,
    dtype: torch.dtype,
    had_residual: bool,
) -> GroupPlan:
    """Return the plan of a group, with new states; see ``Group``."""
    order, given = settings.rules.sections(parameters)
    layout, plain = Layout.of(parameters[place] for place in order), dense_of(dtype)
    segments = [segment for segment in layout.segments if segment.numel]
    coarse = [each for each in given if each.method == settings.method or each.method.contractive]
    compressed = [each.span for each in coarse if not isinstance(each.method, Dense)]
    sections = [replace(each, method=plain) if isinstance(each.method, Dense) else each for each in given]
    exact = dtype == torch.float64 and all(isinstance(each.method, Dense) for each in given)
    fed_back = settings.error_feedback and (had_residual or not exact)
    specs, always = _specs(settings, layout, sections, compressed, fed_back)
    states = composite.new_states(specs, world.device)
    reducing = _reducing(settings, sections, states, world)
    late = set(states) <= {LOCO, RESIDUAL} and not reducing and not settings.correction
    embeddings = settings.rules.of_kind("embedding")
    looking = plan_unused(sections, segments, embeddings, states, world, unused, late)
    keeping = [KeptStates(looking)] if looking and looking.kept else []
    stages = [*keeping, *_stages(settings, layout, sections, compressed, states, world, reducing)]
    corrected = any(isinstance(each, CorrectionPlan) for each in stages)
    fed = [replace(settings.fed(each), marks=looking.marks if looking else None) for each in sections]
    for place, each in enumerate(fed):  # a residual gets zeros for what is sent as it is
        if corrected or (RESIDUAL in states and isinstance(each.method, Dense)):
            fed[place] = replace(each, fed_back=True)
    exchange = composite.plan_group(fed, settings.exchange, world, states)
    return GroupPlan(
        settings, world, dtype, order, layout, segments, sections, compressed, states, always, stages, looking, exchange
    )


def _reducing(settings: RunState, sections: Sequence[Section], states: States, world: World) -> list[Stage]:
    """Return the stage that reduces the residual, if there is anything to reduce."""
    if RESIDUAL not in states:
        return []
    coded = [each for each in sections if not isinstance(each.method, Dense)]  # others leave no error
    noise = [each.span for each in coded if settings.compensation(each.method) == "none"]
    if not noise and settings.residual.dtype == torch.float32:
        return []
    return [KeptErrors(states[RESIDUAL], noise, world.collective.rank)]


def _specs(
    settings: RunState, layout: Layout, sections: Sequence[Section], compressed: Sequence[slice], fed_back: bool
) -> tuple[dict[str, StateSpec], list[str]]:
    """Return what is kept from step to step, and the names of what dense steps write, too."""
    kept = {RESIDUAL: StateSpec(layout, dtype=settings.residual.dtype)} if fed_back else {}
    corrected = settings.correction.state(layout, compressed) if settings.correction else {}
    declared = composite.state_specs(sections, settings.exchange, layout)
    exchanged = [name for name in declared if name.startswith(f"{composite.EXCHANGE}.")]
    averaged = [each for each in sections if isinstance(settings.compensation(each.method), LoCo)]
    errors = {LOCO: LoCo.state([each for part in averaged for each in part.layout.segments])} if averaged else {}
    return {**kept, **declared, **corrected, **errors}, [*kept, *corrected, *exchanged]


def _stages(
    settings: RunState,
    layout: Layout,
    sections: Sequence[Section],
    compressed: Sequence[slice],
    states: States,
    world: World,
    reducing: Sequence[Stage],
) -> list[Stage]:
    """Return what changes gradients, or what is kept of them, in order."""
    residual, stages = states.get(RESIDUAL), list[Stage]()
    if clipping := settings.options.local_clip_norm:
        stages.append(Clip(clipping, world.collective.size))
    ways = [settings.compensation(each.method) for each in sections]
    stages += reducing
    if settings.correction:
        own = {name: states[name] for name in settings.correction.state(layout, compressed)}
        added = residual if settings.residual.plain else None
        plan = settings.correction.plan(layout, compressed, world, own, added)
        stages += [plan] * (not plan.idle)
    if averaging := next((way for way in ways if isinstance(way, LoCo)), None):
        stages.append(LoCoPlan(averaging, layout, states[LOCO], alone=residual is None))
    return stages


class KeptErrors(Stage):
    """Reduce the residual: round it to its dtype, or drop the part that is noise.

    Args:
        residual: the state that holds it; if it is not float32, values are rounded to it stochastically.
        noise: slices without a residual, because an unbiased method's error is noise.
        rank: of this process.
    """

    def __init__(self, residual: State, noise: Sequence[slice], rank: int) -> None:
        self._residual, self._noise, self._rank = residual, noise, rank
        device, halved = residual.committed.device, residual.committed.dtype != torch.float32
        self._rounding = StochasticRounding(residual.layout.numel, device) if halved else None

    def phase(self, step: int) -> tuple[()]:
        """See ``Stage``."""
        return ()

    def after(self, vector: Vector) -> None:
        """See ``Stage``."""
        for place in self._noise:
            vector.rest[place].zero_()
        if self._rounding:
            self._rounding.round(vector.rest, self._residual.pending, mix(*vector.draws, self._rank))
