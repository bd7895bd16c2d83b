"""The compression of one model: average gradients in every step, then commit or roll back the states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.collectives import Collective, consensus
from lightning_compress.collectives.counting import Meter
from lightning_compress.core import errors, state_dict
from lightning_compress.core.state_dict import StateDict
from lightning_compress.engine import checks
from lightning_compress.engine.accumulation import FiniteGuard, Passes
from lightning_compress.engine.drift import DriftGuard
from lightning_compress.engine.group import Group
from lightning_compress.engine.group_plan import RESIDUAL
from lightning_compress.engine.groups import Groups, Lanes
from lightning_compress.engine.optimizers import Optimizers, Trained, unwatch, watch
from lightning_compress.planning.summary import RunSummary
from lightning_compress.settings.compensation import kind_of
from lightning_compress.settings.parsing import CompressorLike, as_primitives
from lightning_compress.settings.run_state import RunState, coming, kept_of, resumed
from lightning_compress.settings.schedule import Progress

log = logging.getLogger(__name__)

ScaleSource = Callable[[], Tensor | None]


class Compression:
    """Compress the gradients of one model, from ``attach`` to ``close``.

    A step begins with the first bucket after an optimizer stepped. It ends when an optimizer that owns any of the
    model's parameters has really stepped. Then the residuals of its parameters are committed. The residuals of other
    parameters stay pending as long as ``grad`` holds their averaged gradient. They are rolled back if that gradient is
    gone or was not finite; see ``Passes``.

    Args:
        trained: the model's parameters that are averaged.
        settings: the user's settings, bound to the model, equal on all ranks.
        collective: the ranks to average over.
        scale: returns the factor of the loss (a GradScaler's scale), float32 scalar, or None.
        frozen: see ``Optimizers``.
        unused: parameters may be without a gradient in a step; see ``Group``.
        accumulates: allow several synchronising passes in a step for methods whose output is not a mean. They raise
            otherwise.
        caps: see ``Groups``.
        beside: the same ranks over other transports, each for one more thread that calls ``reduce``.
        everyone: see ``FiniteGuard``.

    Attributes:
        active: whether compression averages the gradients; otherwise DistributedDataParallel does.
        family: what the run began with, as text; it is saved with the states.
        settings: the settings of the current step.
        next_settings: the settings of the next step.
        step: optimizer steps so far.
        epoch: the current epoch; the training loop sets it, for schedules that count epochs.
        optimizers: those that step the model's parameters.
        meter: counters of bytes, time and error.
        names: of the parameters, by their ``id``.
        finite: whether the current step's gradients are finite, and how many steps' were not.
        run_summary: what runs and what it sends, once it was computed.
        closing: what ``close`` calls.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        settings: RunState,
        collective: Collective,
        scale: ScaleSource = lambda: None,
        frozen: Mapping[int, str] | None = None,
        unused: bool = True,
        accumulates: bool = True,
        caps: tuple[int, int] | None = None,
        beside: Sequence[Collective] = (),
        everyone: Collective | None = None,
    ) -> None:
        self.settings = self.next_settings = settings
        self._scheduled: dict[str, object] = {}  # the schedule's last values, as primitives
        self.family, self._keeper = settings.family, settings.optimizing
        self.device = trained[0].held().device
        self.meter = Meter(self.device)
        self.step = self.epoch = 0
        self.lanes = Lanes([collective, *beside], self.meter, settings.options.deterministic)
        self._collective, self._scale = self.lanes.all[0].world.collective, scale
        self._everyone = everyone or self._collective
        self.names = {id(each.parameter()): each.name for each in trained}
        self.optimizers = Optimizers(trained, frozen or {})
        self.groups = Groups(trained, self.lanes, unused, caps)
        self.finite = FiniteGuard(self.device, settings, everyone)
        self._passes = Passes(trained, accumulates, self.optimizers.all_owned)
        self._last: tuple[StateDict, float] | None = None  # at the end: the state, and the norm of the residuals
        self._stepped, self.active, self.run_summary = True, False, RunSummary()
        self.closing = ExitStack()  # the last one first, and all of them if one raises
        self.closing.callback(self._passes.close)
        self._at_load: list[Callable[[], None]] = []
        same = self.optimizers.kept, self.groups.shared
        self._drift = DriftGuard(trained, same, self._collective, settings, everyone)
        watch(self)

    def reduce(
        self, names: tuple[str, ...], gradients: Sequence[Tensor], started: Callable[[], object] = lambda: None
    ) -> None:
        """Replace gradients by their mean over the ranks.

        Collective: all ranks call it with the same names in the same order.

        Args:
            names: of parameters, any number in any order; those of one call come together in every step.
            gradients: one per name, contiguous, of one floating-point dtype.
            started: called as soon as another thread may call ``reduce`` for the next bucket.
        """
        with self.lanes.turn:
            if not self._stepped and self._passes.again(names):
                self._begin_pass(names)
            if self._stepped:
                self._begin_step()
            sent_by_ddp, parts = self.groups.by_bucket.get(names) or self.groups.of(names, self.settings)
            self.meter.bytes_dense += sent_by_ddp
            for group, places in parts:
                with group.lane:
                    if group is parts[-1][0]:
                        started()
                    self._average(group, list(map(gradients.__getitem__, places)))

    def _average(self, group: Group, gradients: Sequence[Tensor]) -> None:
        arrived = self._passes.arrive(group.bucket_names, group.averages)
        if arrived.kept:
            group.forget(arrived.kept)
        turn, left_out = self._passes.number, arrived.left_out
        if arrived.adds_up:  # average the sum of this step's gradients, from the state at its start
            self._passes.add_up(group.bucket_names, gradients, arrived.kept, arrived.left_out)
            turn, left_out = 0, frozenset()
            for state in group.states.values():
                state.roll_back()
        try:
            flag = group.reduce(gradients, self.step, self._scale(), turn, left_out)
        except Exception as error:
            where = f"step {self.step}, averaging the group that begins with {group.bucket_names[0]}"
            errors.explain(error, where, self._everyone.rank)
        if arrived.left_out or self._passes.patience:
            self._passes.made(group.bucket_names, gradients, arrived.left_out)
        self.finite.flags.append((flag, group.names))
        if self._drift.every and (self.step + 1) % self._drift.every == 0:
            self._drift.record(group.bucket_names, gradients)

    def count(self, sent: int, dense: int, flag: Tensor | None = None, names: Collection[str] = ()) -> None:
        """Count what something else averaged in this backward pass.

        Args:
            sent: bytes that this rank sent.
            dense: bytes that stock DistributedDataParallel would have sent.
            flag: float32 scalar, 0.0, or NaN if any rank's gradient is not finite; None: not known.
            names: of the parameters that the flag is about.
        """
        if self._stepped:
            self._begin_step()
        self.meter.bytes_sent += sent
        self.meter.bytes_dense += dense
        if flag is not None:
            self.finite.flags.append((flag, names))

    def _begin_step(self) -> None:
        """Prepare a step, at its first bucket."""
        self._stepped = False
        if self._passes.open:
            self.groups.reject(self.finite.found)
        if self.finite.flags:
            self.finite.begin_step()
        if self.settings.options.error_feedback.residual.follows_lr:
            self.groups.scale_residuals(self.optimizers.changes())
        if self.next_settings.options.schedule.courses:
            self._follow_schedule()
        if self.next_settings is not self.settings:
            self.settings = self.next_settings
            self.groups.by_bucket.clear()  # each bucket rebuilds its groups, which copy their states by name
        self.meter.begin_step()

    def _follow_schedule(self) -> None:
        """Retune if the schedule's values changed; between two changes, ``retune`` decides."""
        values = self.next_settings.options.schedule.values(self._progress())
        if (described := as_primitives(values)) != self._scheduled:
            self._scheduled = described
            self.next_settings = self.next_settings.retuned(None, values)

    def _progress(self) -> Progress:
        rate = self.optimizers.rate() if self.settings.options.schedule.by_rate else None
        return Progress(self.step, self.epoch, rate)

    def _begin_pass(self, names: Sequence[str]) -> None:
        """Begin another backward pass without an optimizer step: its gradients add up, or the step was skipped."""
        self.groups.reject(self.finite.found)
        self.finite.note()
        self.finite.begin_step()
        # all ranks have to draw the same random numbers, even if only one of them discards its gradients
        (goes_on,) = consensus.anywhere([self._passes.goes_on(names)], self._collective, self.device)
        self._stepped = not goes_on
        self._passes.next(goes_on)

    def state_dict(self) -> StateDict:
        """Return this rank's state as committed by the last optimizer step: tensors and primitives.

        Each rank saves its own to its own file. Later steps reuse the tensors' memory: save or copy it at once.
        """
        if self._last is not None:
            return self._last[0]
        running = kept_of(self.settings, self.next_settings, self._scheduled)
        states = [(group.bucket_names, group.states) for group in self.groups.all]
        rates, rank = self.optimizers.rates, self._collective.rank
        return state_dict.build(self.family, self.step, rates, running, states, self.groups.orders, rank)

    @errors.called_by_all("compression.load_state_dict()")
    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a ``state_dict`` and its groups; parameters that it lacks begin with initial states.

        Collective: all ranks must call it.

        Raises:
            ValueError: it is not a state, or of another method or rank; then nothing changed. Or parts of it do not
                fit; then all states are reset.
        """
        checks.check_state(state, self._collective.uncounted, self.device)
        if state["method"] not in self.settings.families:
            raise ValueError(f"the state is of {state['method']}; this run compresses with {self.family}")
        self.reset()
        before = self.settings, self.next_settings, self._scheduled
        try:
            self.settings, self.next_settings, self._scheduled = resumed(self.settings, state["running"])
            if self.active or not self.settings.plain:
                self.groups.restore(state, self.settings)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:  # keep nothing of it
            self.settings, self.next_settings, self._scheduled = before
            self.reset()
            raise ValueError(str(error)) from error
        self.optimizers.rates.update(state["rates"])
        self.step = state["step"]
        saved, chosen = coming(state["running"])["compressor"], self.next_settings.running()["compressor"]
        if saved != chosen and self._collective.rank == 0:
            log.warning("the checkpoint was trained with %s; this run continues with %s", saved, chosen)
        if state_dict.IN_FLIGHT in state and not self.settings.options.delay and self._collective.rank == 0:
            log.warning("the checkpoint's last average is lost: this run has delay=0. Resume with delay=1 to apply it")
        for callback in self._at_load:
            callback()

    def stepped_by(self, optimizers: Sequence[Optimizer]) -> None:
        """Set all optimizers of the model, on which ``error_feedback="auto"`` depends. Collective; before a step.

        Raises:
            ValueError: the ranks' optimizers differ, on every rank; or see ``take_over``.
        """
        checks.check_optimizers_agree(optimizers, self._everyone, self.device)
        self.optimizers.complete = bool(optimizers)
        if self.active and not len(self.groups):
            self.settings = self.next_settings = self.settings.stepped_by(kind_of(optimizers))
            for callback in self._at_load:
                callback()
        for optimizer in optimizers:
            self.take_over(optimizer)

    def take_over(self, optimizer: Optimizer) -> bool:
        """Let a method that does part of the optimizer's work check that the optimizer does not repeat it.

        Returns:
            whether ``before_step`` has to see the gradients before the optimizer uses them.

        Raises:
            ValueError: the method cannot work with this optimizer.
        """
        self.optimizers.see(optimizer)
        workers = [worker for worker in (self.settings.correction, self._keeper) if worker]
        for line in self.optimizers.take_over(optimizer, workers) if self.active else ():
            if self._collective.rank == 0:
                log.info(line)
        return self.active and self.finite.checks and self._scale() is None  # a GradScaler skips such steps itself

    def before_step(self, optimizer: Optimizer) -> None:
        """Keep the optimizer from stepping with non-finite gradients.

        Raises:
            FloatingPointError: a gradient is not finite and ``on_nonfinite="raise"``; on all ranks.
        """
        if self.optimizers.owned(optimizer):
            self.finite.before_step(optimizer, f"step {self.step}: {self.groups.nonfinite(self._everyone.rank)}")

    def after_step(self, optimizer: Optimizer) -> None:
        """Commit the residuals of the optimizer's parameters, unless a gradient was not finite."""
        names = self.optimizers.stepping.pop(optimizer, None) or self.optimizers.owned(optimizer)
        if not names or self.finite.refused:
            return
        first = not self._stepped  # a step may have several optimizers, or an optimizer inside another one
        rejected = self.finite.rejected(optimizer, names, first)
        follows, ended = self.settings.options.error_feedback.residual.follows_lr, self._passes.end(names, first)
        moved = names - self.optimizers.stepped(optimizer) if follows else names
        for group in self.groups.all:
            for kind, state in group.states.items():
                state.commit(rejected, moved if kind == RESIDUAL else names, ended)
        if first:
            self._stepped = True
            self.step += 1
            self.meter.end_step()

    def compare_ranks(self, now: bool = False) -> None:
        """Compare the ranks if it is due, or now, between two steps. Collective; see ``DriftGuard.compare``."""
        if self.active and (self._stepped or now):
            self._drift.compare(self.step, now)

    def before_backward(self) -> None:
        """Prepare for a backward pass."""
        self._passes.watch()

    def roll_back(self) -> None:
        """Discard what was averaged since an optimizer stepped, as ``zero_grad`` before the next backward does."""
        if not self._stepped:
            self.finite.note()
            self._passes.drop()
            for state in self.groups.states():
                state.roll_back()
            self._stepped = True

    def retune(self, compressor: CompressorLike | None = None, **changes: object) -> None:
        """Change the compression from the next step on: ``retune(density=0.01)``, ``retune("onebit")``.

        Collective: all ranks must call it, in the same step. States stay. If the new method has no residual, the old
        one is sent with the next gradient.

        Args:
            compressor: as in ``attach``; None keeps the current one.
            **changes: new values of its settings.

        Raises:
            ValueError: a setting does not exist or is out of range, the exchange cannot carry the method, the method
                would take over another part of the optimizer's work, the run began with ``none``, which has no hook, or
                ranks gave different arguments.
        """
        if not self.active and self._collective.size > 1:
            checks.refuse_retuning(self.settings)
        checks.check_retuning(compressor, changes, self._everyone.uncounted, self.device)
        self.next_settings = self.next_settings.retuned(compressor, changes)

    def follow(self, before: Compression) -> None:
        """Continue the run of another compression: its steps, counters and retuned settings, but not its residuals."""
        self.step, self.epoch, rules = before.step, before.epoch, self.settings.rules
        self.settings = self.next_settings = before.next_settings.bound(rules.kinds, rules.whole)
        self._scheduled = before._scheduled
        self.meter.follow(before.meter)
        self.finite.count.copy_(before.finite.count)

    def reset(self) -> None:
        """Start from step 0 with empty states."""
        for state in self.groups.states():
            state.reset()
        self.optimizers.rates.clear()
        self.finite.begin_step()
        self._passes.drop()
        self._stepped, self.step = True, 0

    def stats(self) -> dict[str, float]:
        """Return traffic of the last step and in total, time and error of the last sampled step.

        Waits for the device. Sampled steps are the first one and every ``meter.sample_every``-th.

        Returns:
            of the last step: ``bytes_sent``, ``bytes_dense`` (what stock DistributedDataParallel sends), ``ratio``. Of
            the last sampled step: ``encode_ms``, ``exchange_ms``, ``decode_ms``, ``wait_ms`` (how long backward's end
            waited for averages; 0 on CUDA), and ``relative_error``: the norm of what was not sent over the norm of
            gradient plus residual. Now: ``residual_norm``, including the errors that LoCo keeps. In total:
            ``total_bytes_sent``, ``total_bytes_dense``, ``steps``, ``nonfinite_steps``.
        """
        norm = self.groups.residual_norm() if self._last is None else self._last[1]
        nonfinite = self.finite.count if self._stepped else self.finite.count + self.finite.found()
        return self.meter.read() | {"residual_norm": norm, "nonfinite_steps": float(nonfinite)}

    @property
    def summary(self) -> str:
        """One line that says what runs, as logged at the start."""
        return self.run_summary.summary

    def at_load(self, callback: Callable[[], None]) -> None:
        """Register a callback for after each ``load_state_dict``."""
        self._at_load.append(callback)

    def close(self) -> None:
        """Stop watching the optimizers and free the memory; call it on every rank when training is over.

        Afterwards ``state_dict`` returns the last state, on the CPU, and ``stats`` the last figures.
        """
        if self.active and self._last is None:
            self._last = state_dict.moved(self.state_dict(), torch.device("cpu")), self.groups.residual_norm()
        unwatch(self)
        self.closing.close()
        for each in (self._at_load, self.groups, self.lanes):
            each.clear()
