"""The compression of one model, step by step: gradients are taken over; what is kept is committed or rolled back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_compress.collectives import Collective, CountingCollective, OrderedCollective, World, consensus
from lightning_compress.collectives.counting import Meter
from lightning_compress.core import errors, state_dict
from lightning_compress.core.registry import describe
from lightning_compress.core.state_dict import StateDict
from lightning_compress.core.workspace import Workspace
from lightning_compress.engine import checks
from lightning_compress.engine.accumulation import FiniteGuard, Passes
from lightning_compress.engine.drift import DriftGuard
from lightning_compress.engine.group import RESIDUAL, Group
from lightning_compress.engine.groups import Groups
from lightning_compress.engine.optimizers import Optimizers, unwatch, watch
from lightning_compress.planning.summary import RunSummary
from lightning_compress.settings.compensation import kind_of
from lightning_compress.settings.parsing import COMPRESSORS, CompressorLike
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState, coming, kept_of, resumed
from lightning_compress.settings.schedule import Progress

log = logging.getLogger(__name__)

ScaleSource = Callable[[], Tensor | None]


class Compression:
    """The compression of one model's gradients, from ``attach`` to ``close``.

    A step begins with the first bucket after an optimizer stepped, and ends when an optimizer that owns any of the
    model's parameters has really stepped: then the residuals of its parameters are committed. The others' wait as long
    as ``grad`` holds what was averaged, and are rolled back where it is gone, or was not finite; see ``Passes``.

    Args:
        module: the model.
        settings: what the user chose, equal on all ranks.
        collective: the ranks to average over.
        scale: returns what the loss is multiplied by (a GradScaler's scale), or None.
        ignored: names of parameters that are not averaged.
        unused: parameters may be without a gradient in a step; see ``Group``.
        accumulates: passes that synchronise may add up, also for methods whose output is no mean, which else refuse it.
        caps: see ``Groups``.
        kinds: of the parameters, where ``module`` is not what owns them in the model; see ``kinds_of``.

    Attributes:
        active: it does the averaging; otherwise DistributedDataParallel does.
        family: what the run began with, which state is of.
        settings: what runs now.
        next_settings: what the next step begins with.
        step: optimizer steps so far.
        epoch: the current one; the training loop sets it, where a schedule counts epochs.
        meter: counts.
        forecast: what runs, and what it sends, once it was computed.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: RunState,
        collective: Collective,
        scale: ScaleSource = lambda: None,
        ignored: Collection[str] = (),
        unused: bool = True,
        accumulates: bool = True,
        caps: tuple[int, int] | None = None,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        parameters = checks.trained_parameters(module, ignored)
        self.settings = self.next_settings = settings.bound(kinds_of(module) if kinds is None else kinds)
        self._scheduled: dict[str, object] = {}  # what the schedule said last, as primitives
        self.family, self._keeper = settings.family, settings.optimizing
        self.device = parameters[0][1].device
        self.meter = Meter(self.device)
        self.step = self.epoch = 0
        collective = OrderedCollective(collective) if settings.options.deterministic else collective
        self._collective = CountingCollective(collective, self.meter)
        self._scale = scale
        self._names = {id(parameter): name for name, parameter in parameters}
        self._optimizers = Optimizers(self._names, checks.frozen_parameters(module, ignored, collective))
        self.groups = Groups(parameters, World(self._collective, self.device, self.meter), unused, caps)
        self._workspace = Workspace()  # other models of the process average at the same time
        self._finite = FiniteGuard(self.device, settings)
        self._passes = Passes(parameters, accumulates, self._optimizers.all_owned)
        self._last_state: StateDict | None = None
        self._last_norm: float | None = None
        self._stepped, self.active = True, False
        self.forecast = RunSummary()
        self._at_close: list[Callable[[], None]] = [self._passes.close]
        self._at_load: list[Callable[[], None]] = []
        same = lambda: [*self._optimizers.kept(), *self.groups.shared()]  # noqa: E731
        self._drift = DriftGuard(parameters, same, self._collective, settings)
        watch(self)

    def reduce(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their mean over the ranks; a collective call, with equal parameters in equal order.

        Args:
            parameters: of the model, in any order and number; those that come together once do so in every step.
            gradients: of each, contiguous, of one floating-point dtype.
        """
        with self._workspace.used():
            names = [self._names[id(each)] for each in parameters]
            if not self._stepped and self._passes.again(names):
                self._begin_pass(names)
            if self._stepped:
                self._begin_step()
            bucket = tuple(map(id, parameters))
            sent_by_ddp, parts = self.groups.by_bucket.get(bucket) or self.groups.of(bucket, self.settings)
            self.meter.bytes_dense += sent_by_ddp
            for group, places in parts:
                self._average(group, [gradients[place] for place in places])

    def _average(self, group: Group, gradients: Sequence[Tensor]) -> None:
        kept, left_out, adds_up = self._passes.arrive(group.given, group.averages)
        if kept:
            group.forget(kept)
        turn, missing = self._passes.number, left_out
        if adds_up:  # of all gradients of this step, from where it began
            self._passes.add_up(group.given, gradients, kept, left_out)
            turn, missing = 0, frozenset()
            for state in group.states.values():
                state.roll_back()
        try:
            flag = group.reduce(gradients, self.step, self._scale(), turn, missing)
        except Exception as error:
            errors.explain(error, f"step {self.step}, averaging {group.given[0]} and on", self._collective.rank)
        if left_out or self._passes.patience:
            self._passes.made(group.given, gradients, left_out)
        self._finite.add(flag, group.names)
        if self._drift.every and (self.step + 1) % self._drift.every == 0:
            self._drift.note(group.given, gradients)

    def beside(self, names: Iterable[str], sent: int, dense: int, flag: Tensor) -> None:
        """These parameters were averaged in this backward by something else; to be called at its end.

        Args:
            names: of the model's parameters.
            sent: bytes that this rank sent for them.
            dense: bytes that stock DDP would have sent.
            flag: float32 scalar, 0.0, or NaN if a rank's gradient is not finite.
        """
        if self._stepped:
            self._begin_step()
        self.meter.bytes_sent += sent
        self.meter.bytes_dense += dense
        self._finite.add(flag, names)

    def count(self, sent: int) -> None:
        """DistributedDataParallel averages in this backward, with so many bytes."""
        if self._stepped:
            self._begin_step()
        self.meter.bytes_sent += sent
        self.meter.bytes_dense += sent

    def _begin_step(self) -> None:
        """The first bucket of a step."""
        self._stepped = False
        if self._passes.open:
            self.groups.reject(self._finite.found)
        if self._finite.flags:
            self._finite.begin_step()
        if self.settings.options.error_feedback.residual.follows_lr:
            self.groups.scale_residuals(self._optimizers.changes())
        if self.next_settings.options.schedule.courses:
            self._follow_schedule()
        if self.next_settings is not self.settings:
            self.settings = self.next_settings
            self.groups.look_again()  # groups are rebuilt, and take over their states by name
        self.meter.begin_step()

    def _follow_schedule(self) -> None:
        """Retune where the schedule's values change; in between, ``retune`` decides."""
        rate = self._optimizers.rate() if self.settings.options.schedule.by_rate else None
        values = self.next_settings.options.schedule.values(Progress(self.step, self.epoch, rate))
        described = {
            name: describe(value, COMPRESSORS) if is_dataclass(value) else value for name, value in values.items()
        }
        if described != self._scheduled:
            self._scheduled = described
            self.next_settings = self.next_settings.retuned(None, values)

    def _begin_pass(self, names: Sequence[str]) -> None:
        """Another backward begins, and no optimizer stepped: its gradients add up, or the step was skipped."""
        self.groups.reject(self._finite.found)
        self._finite.note()
        self._finite.begin_step()
        # ranks draw alike, whatever one of them throws away
        (goes_on,) = consensus.anywhere([self._passes.goes_on(names)], self._collective, self.device)
        self._stepped = not goes_on
        self._passes.next(goes_on)

    def state_dict(self) -> StateDict:
        """What the optimizer steps have committed so far, on this rank: tensors and primitives.

        Every rank has its own. It refers to memory that later steps replace or reuse: save or copy it at once.
        """
        if self._last_state is not None:
            return self._last_state
        running = kept_of(self.settings, self.next_settings, self._scheduled)
        return self.groups.save(self.family, self.step, self._optimizers.rates, running)

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from a ``state_dict``, in its groups; parameters that it does not know begin anew.

        All ranks must call it.

        Raises:
            ValueError: it is none, or of another method, and nothing changed; or parts of it have no place here, and
                everything begins anew.
        """
        state_dict.check(state)
        if state["method"] not in self.settings.families:
            raise ValueError(f"the state is of {state['method']}; this run compresses with {self.family}")
        self.reset()
        before = self.settings, self.next_settings, self._scheduled
        try:
            self.settings, self.next_settings, self._scheduled = resumed(self.settings, state["running"])
            if self.active or not self.settings.plain:
                with self._workspace.used():
                    self.groups.restore(state, self.settings)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:  # nothing of it stays
            self.settings, self.next_settings, self._scheduled = before
            self.reset()
            raise ValueError(str(error)) from error
        self._optimizers.rates.update(state["rates"])
        self.step = state["step"]
        theirs, ours = coming(state["running"])["compressor"], self.next_settings.running()["compressor"]
        if theirs != ours and self._collective.rank == 0:
            log.warning("the checkpoint was trained with %s; this run goes on with %s", theirs, ours)
        for callback in self._at_load:
            callback()

    def stepped_by(self, optimizers: Sequence[Optimizer]) -> None:
        """These are the model's optimizers, on which ``error_feedback="auto"`` depends; before the first step."""
        self._optimizers.complete = bool(optimizers)
        if len(self.groups) or not self.active:
            return
        self.settings = self.next_settings = self.settings.stepped_by(kind_of(optimizers))
        for callback in self._at_load:
            callback()

    def take_over(self, optimizer: Optimizer) -> None:
        """Let a method that takes over a part of the optimizer's work check that the optimizer does not repeat it.

        Raises:
            ValueError: the method cannot work with this optimizer.
        """
        self._optimizers.see(optimizer)
        workers = [each for each in (self.settings.correction, self._keeper) if each]
        for said in self._optimizers.take_over(optimizer, workers) if self.active else ():
            if self._collective.rank == 0:
                log.info(said)

    @property
    def looks(self) -> bool:
        """Whether something is done about gradients that are not finite."""
        return self.active and self._finite.looks and self._scale() is None  # a GradScaler skips such steps itself

    def before_step(self, optimizer: Optimizer) -> None:
        """Keep the optimizer from stepping with gradients that are not finite.

        Raises:
            FloatingPointError: they are not, and that is to be an error; on all ranks.
        """
        if self._optimizers.owned(optimizer):
            names = [name for group in self.groups for name in group.nonfinite]
            where = f"on rank {self._collective.rank}, of {', '.join(names[:3])}" if names else "on another rank"
            self._finite.before_step(optimizer, f"step {self.step}: gradients are not finite {where}")

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer stepped: the residuals of its parameters are committed, unless a gradient was not finite."""
        if not (names := self._optimizers.owned(optimizer)) or self._finite.refused:
            return
        first = not self._stepped  # of several optimizers, or an optimizer inside another one
        rejected = self._finite.rejected(optimizer, names, first)
        follows, ended = self.settings.options.error_feedback.residual.follows_lr, self._passes.end(names, first)
        moved = names - self._optimizers.stepped(optimizer) if follows else names
        for group in self.groups.all:
            for kind, state in group.states.items():
                state.commit(rejected, moved if kind == RESIDUAL else names, ended)
        if first:
            self._stepped = True
            self.step += 1
            self.meter.end_step()

    def before_forward(self) -> None:
        """The model is about to be trained; see ``DriftGuard.look``."""
        if self._stepped:
            self._drift.look(self.step)

    def before_backward(self) -> None:
        """A backward pass may follow."""
        self._passes.watch()

    def roll_back(self) -> None:
        """Throw away what was averaged since an optimizer stepped, as ``zero_grad`` before the next backward does."""
        if not self._stepped:
            self._finite.note()
            self._passes.drop()
            for state in self.groups.states():
                state.roll_back()
            self._stepped = True

    def retune(self, compressor: CompressorLike | None = None, **changes: object) -> None:
        """Compress otherwise from the next step on: ``retune(density=0.01)``, ``retune("onebit")``.

        A collective call, in the same step, with the same arguments: else ranks cannot read each other's messages.
        States stay; a residual that the new method does not use is sent with the next gradient. On one rank only the
        settings change.

        Args:
            compressor: as in ``attach``; None: the one that runs.
            **changes: of its settings.

        Raises:
            ValueError: there is no such setting, a value is out of range, the exchange cannot carry the method, another
                part of the optimizer's work would be taken over, or the run began with ``none``, which has no hook.
        """
        if not self.active and self._collective.size > 1:
            began = (
                "compressor='auto', which chose float32 here and"
                if self.settings.chosen
                else "compressor='none', which"
            )
            raise ValueError(
                f"the run began with {began} leaves the average to DistributedDataParallel for good; "
                "begin with a compressor whose settings lose nothing, such as {'name': 'topk', 'density': 1.0}"
            )
        self.next_settings = self.next_settings.retuned(compressor, changes)

    def follow(self, before: Compression) -> None:
        """Go on from where another one of this run is, with what it was retuned to, and without any residual."""
        self.step, self.epoch, kinds = before.step, before.epoch, self.settings.rules.kinds
        self.settings = self.next_settings = before.next_settings.bound(kinds)
        self._scheduled = before._scheduled
        self.meter.follow(before.meter)
        self._finite.count.copy_(before._finite.count)

    def reset(self) -> None:
        """Begin again: no residuals, no steps."""
        for state in self.groups.states():
            state.reset()
        self._optimizers.forget()
        self._finite.forget()
        self._passes.drop()
        self._stepped = True
        self.step = 0

    def stats(self) -> dict[str, float]:
        """Traffic of the last step and in total, time and error of the last sampled step; waits for the device.

        Returns:
            ``bytes_sent``, ``bytes_dense`` (what stock DDP sends), ``ratio`` of the last step; ``encode_ms``,
            ``exchange_ms``, ``decode_ms``, ``relative_error`` (norm of what was not sent over that of gradient plus
            residual) of the last of the steps that are sampled: the first, and each ``meter.sample_every``-th;
            ``residual_norm`` now, in which errors that LoCo keeps count too; ``total_bytes_sent``,
            ``total_bytes_dense``, ``steps``, ``nonfinite_steps``.
        """
        norm = self.groups.residual_norm() if self._last_norm is None else self._last_norm
        nonfinite = self._finite.count if self._stepped else self._finite.count + self._finite.found()
        return self.meter.read() | {"residual_norm": norm, "nonfinite_steps": float(nonfinite)}

    @property
    def summary(self) -> str:
        """What runs, in a line, as it was said at the start."""
        return self.forecast.summary

    def at_load(self, callback: Callable[[], None]) -> None:
        """Have it called after each ``load_state_dict``."""
        self._at_load.append(callback)

    def at_close(self, callback: Callable[[], None]) -> None:
        """Have it called by ``close``."""
        self._at_close.append(callback)

    def close(self) -> None:
        """Stop watching the optimizers and give memory back, when the model will not be trained any more.

        ``state_dict`` keeps returning the last state, held on the CPU, and ``stats`` the last figures.
        """
        if self.active and self._last_state is None:
            self._last_state = state_dict.moved(self.state_dict(), torch.device("cpu"))
            self._last_norm = self.groups.residual_norm()
        unwatch(self)
        for callback in self._at_close:
            callback()
        self._at_close.clear()
        self._at_load.clear()
        self.groups.clear()
        self._workspace.release()
