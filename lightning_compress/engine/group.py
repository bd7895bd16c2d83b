"""One group of parameters: average its gradients, and keep what was not sent."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.collectives import World
from lightning_compress.core.random import mix
from lightning_compress.core.source import Memory, Source
from lightning_compress.core.state import States
from lightning_compress.core.vector import Stage, Vector, kernel_of, new_flag, poison
from lightning_compress.core.workspace import Workspace, here
from lightning_compress.engine.accumulation import Kept
from lightning_compress.engine.group_plan import RESIDUAL, plan_of
from lightning_compress.engine.programs import Programs, ours
from lightning_compress.exchanges import AllReduce, Exchange, composite
from lightning_compress.exchanges.all_reduce import average_in_place, extremes
from lightning_compress.exchanges.exchange import ExchangePlan
from lightning_compress.exchanges.message import Section
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.run_state import RunState

MEMORY = ("gradient", "mean")
"""Names of scratch memory that all groups share."""


@dataclass
class Lane:
    """What one group at a time uses to be averaged: a context, in which its workspace is this thread's.

    Attributes:
        world: the ranks, over a transport of the lane's own.
        turn: held by this thread, which computes, and given to others while it waits for the lane.
        workspace: the scratch memory of the plans of its groups.
        free: held while a group is averaged.
    """

    world: World
    turn: threading.RLock
    workspace: Workspace = field(default_factory=Workspace)
    free: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> None:
        if not self.free.acquire(blocking=False):
            self.turn.release()
            self.free.acquire()
            self.turn.acquire()
        self._before, here.workspace = here.workspace, self.workspace

    def __exit__(self, *_: object) -> None:
        here.workspace = self._before
        self.free.release()


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
        layout: of the vector.
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
        self._plan = plan = plan_of(parameters, settings, world, unused, dtype, had_residual)
        self.layout, self.names = plan.layout, plan.layout.names
        self.bucket_names = tuple(name for name, _ in parameters)
        self.states, self.residual, self.errors = plan.states, plan.states.get(RESIDUAL), plan.errors
        self.averages = settings.averages
        self.nonfinite: list[str] = []
        self._dense: ExchangePlan | None = None
        self._unscale = Unscale()
        self._fast, self._fused = kernel_of(world.device) is not None, kernel_of(world.device, "triton")
        self._memory: tuple[object, Memory | None] = (None, None)
        stages = [*plan.stages, *([plan.looking] if plan.looking else [])]
        known = ours(settings.exchange, *(each.method for each in plan.sections))
        self._programs = Programs(stages, self.states.values(), world, known)

    def plan(self, step: int) -> ExchangePlan:
        """Return the exchange of a step: dense while the compression warms up."""
        if step >= self._plan.dense_steps:
            self._dense = None
            return self._plan.exchange
        if self._dense is None:
            exchange = self.settings.exchange
            if exchange.keeper:
                assert isinstance(exchange, Exchange)
                self._dense = exchange.keeper.plan_dense(exchange, *self._kept)
            else:
                self._dense = AllReduce().plan([Section(self._plan.dense, self._plan.layout, 0)], self._world)
        return self._dense

    @property
    def _kept(self) -> tuple[list[Section], World, States]:
        """The arguments of the exchange's keeper: sections, ranks and the exchange's states."""
        return (
            composite.codec_sections(self._plan.sections),
            self._world,
            composite.states_of(composite.EXCHANGE, self.states),
        )

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
        mode = self._programs.mode(gradients, step < self._plan.dense_steps, step, scale, turn, left_out)
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
        decided = self._plan
        if not decided.segments:
            return torch.zeros((), dtype=torch.float32, device=self._world.device)
        plan, memory = self.plan(step), self._memory_of(gradients)
        if plan.in_place is not None and (flag := self._averaged_in_place(memory.pieces, plan, scale)) is not None:
            return flag
        vector = self._vector(memory, plan, step, scale, left_out)
        vector.draws = (decided.key, drawn, turn) if turn else (decided.key, drawn)
        stages = decided.stages if vector.scale is vector.factor else [self._unscale, *decided.stages]
        for stage in stages:
            stage.before(vector)
        if vector.source is None:  # else a correction has added the residual
            self._add_residual(vector)
        if decided.looking:
            decided.looking.before(vector)
        self._exchange_vector(vector, plan)
        if vector.nonfinite:
            self.nonfinite = [decided.segments[number].name for number in vector.nonfinite]
        if decided.looking:
            decided.looking.after(vector)
        for stage in reversed(stages):
            stage.after(vector)
        for name in decided.always if plan is self._dense else self.states:
            self.states[name].touch()
        vector.give()
        return vector.flag

    def _memory_of(self, gradients: Sequence[Tensor]) -> Memory:
        """Return where gradients lie. A bucket that stays where it was is looked at once."""
        addresses = (gradients[0].dtype, *map(Tensor.data_ptr, gradients))
        found = self._memory[1] if addresses == self._memory[0] else None
        if found is None:
            pieces = [gradients[place].view(-1) for place in self._plan.order if gradients[place].numel()]
            found = Memory(pieces, self._fast)
            if found.place is not None:  # a bucket; memory that is kept here cannot be freed
                self._memory = addresses, found
        return found

    def _vector(
        self, memory: Memory, plan: ExchangePlan, step: int, scale: Tensor | None, left_out: Collection[str]
    ) -> Vector:
        decided = self._plan
        limit = decided.most if scale is None or decided.unscales else min(decided.most, decided.limit)
        dense = [slice(0, decided.layout.numel)] if plan is self._dense else plan.dense_spans
        scale, in_place = scale if decided.unscales else None, plan.in_place is not None
        vector = Vector(memory, step, scale, left_out, limit, dense, in_place, plan.marked, self._fused)
        residual = self.residual
        changed = (decided.keeps and left_out) or (residual and residual.touched)  # and not as the heads tell
        if decided.opens and memory.bucket and not changed:
            vector.opening, vector.marks, vector.factor = plan.opening, decided.marks, scale
            vector.looked = residual.committed if residual else None
        return vector

    def _add_residual(self, vector: Vector) -> None:
        """Have gradients and residual averaged; what is not sent becomes the next residual, in the same memory."""
        residual, decay = self.residual, self._plan.decay
        if residual is None:
            vector.send()
            return
        if residual.touched and decay != 1:  # a later pass: decay only the parameters whose step begins with it
            residual.decay(decay)
            decay = 1.0
        halved = residual.committed.dtype != torch.float32
        rest = vector.take("mean") if halved else residual.pending
        if halved or residual.touched or decay != 1:
            torch.add(vector.whole(), residual.base(), alpha=decay, out=rest)
            vector.source, vector.rest = Source(rest), rest
        else:
            vector.send(rest, residual.committed)

    def _averaged_in_place(self, pieces: list[Tensor], plan: ExchangePlan, scale: Tensor | None) -> Tensor | None:
        """Average gradients in their own memory and return the flag; return None if more has to be done."""
        if self._plan.changes or plan.in_place is None:
            return None
        # all ranks average as DistributedDataParallel does
        if not self.states and (self._plan.own or plan is self._dense):
            if self.settings.options.on_nonfinite == "raise":  # the error names the parameters
                self._note((extremes(pieces) * 0.0).sum(), pieces)
            return average_in_place(pieces, self._world.collective)
        if not self._nothing_else(pieces, scale):
            return None
        if self._fused:  # they find what is not finite while they cast
            flag = new_flag(self._world.device)
            plan.in_place.mean(pieces, flag)
            return flag
        bounds = extremes(pieces)
        on_cpu = self._world.device.type == "cpu"
        if on_cpu and float(bounds.abs().max()) > self._plan.limit:  # a value would saturate
            return None
        flag = self._note((bounds * 0.0).sum(), pieces)
        plan.in_place.mean(pieces, flag)
        if on_cpu:  # on an accelerator the means are non-finite already
            poison(pieces, flag)
        return flag

    def _nothing_else(self, pieces: Sequence[Tensor], scale: Tensor | None) -> bool:
        """Whether gradients are sent unchanged: nothing is added to them, and no residual is kept."""
        bounded = bool(self.states) or self._plan.limit < kernels.LARGEST
        if bounded and self._world.device.type != "cpu":  # a check would wait for the device
            return False
        if (scale is not None and self._plan.unscales) or pieces[0].dtype != torch.float32:
            return False
        return not self._plan.keeps and (self.residual is None or self.residual.empty)

    def _exchange_vector(self, vector: Vector, plan: ExchangePlan) -> None:
        """Average the vector over the ranks; what was not sent stays in it."""
        meter, rest, source, flag = self._world.meter, vector.rest, vector.source, vector.flag
        assert source
        before = source.into(rest).norm() if meter.sampling else None
        plan.opened, bucket = vector.opening is not None, vector.memory.bucket is not None
        plan.tells = bucket and self._plan.tells and (plan.opened or not self._plan.keeps)
        plan.mean(rest, vector.out(), mix(*vector.draws), flag, source if before is None else None)
        vector.told = plan.told
        if before is not None:
            meter.add_error(before, rest.norm())

    def _note(self, flag: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Record which parameters have non-finite gradients, and return the flag. CPU only: reading is free there."""
        if flag.device.type == "cpu" and not self._fused and float(flag) != 0.0:
            pairs = zip(self._plan.segments, pieces, strict=True)
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
