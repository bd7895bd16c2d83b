"""Local SGD: each rank trains alone for some steps, then the ranks average their compressed changes."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_compress.codecs import Method
from lightning_compress.collectives import Collective, CountingCollective, World
from lightning_compress.collectives.coalesced import mean_of
from lightning_compress.collectives.counting import Meter
from lightning_compress.core import errors
from lightning_compress.engine import checks
from lightning_compress.engine.attach import check_setup
from lightning_compress.engine.drift import DriftGuard
from lightning_compress.engine.optimizers import Trained
from lightning_compress.periodic.averaged_gradients import (
    AveragedGradients,
    average_gradients,
    skip_nonfinite,
    trained_by,
)
from lightning_compress.periodic.fragment import Outer
from lightning_compress.periodic.streaming import Fragments
from lightning_compress.periodic.sync_schedule import Rounds, check_integer, split
from lightning_compress.periodic.synchroniser import Synchroniser
from lightning_compress.planning.decide import decide
from lightning_compress.planning.summary import run_summary
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.options import check_gone
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState


class LocalSGD(Synchroniser):
    """Ranks take local steps alone, then average their changes, compressed by any method that keeps what it loses.

    Use it on links where even one compressed message a step is too slow. In a round, each rank's replica of the model
    takes ``sync_every`` steps of its own optimizer. Then ``anchor - replica``, what the rank has learned, is averaged
    over the ranks like a gradient. An outer optimizer steps the anchors, which all ranks share, and the replicas
    continue from there. Buffers are synchronised at the end of each round. The states of the inner optimizers stay
    per-rank.

    Args:
        sync_every: local steps in a round; with several optimizers, steps of the one that steps most. Signals of a
            cluster wait for the end of the round, and with ``delay`` for its last fragment, so allow at least that long
            between the signal and the kill.
        outer: "average", the plain mean (local SGD); "nesterov", lr 0.7 and momentum 0.9 (DiLoCo); or a mapping with
            some of lr, momentum, nesterov, for SGD on the anchors.
        compressor: of the changes, as for ``CompressedDDPStrategy``; not signsgd, dgc, onebit_adam.
        averaged_steps: optimizer steps before the first round; they average the ranks' gradients in float32 (post-local
            SGD, Lin et al., ICLR 2020, arXiv:1808.07217).
        average_gradients: parameters whose gradients are averaged in float32 in each step, while the others train
            locally: a shell-style pattern of names, ``{"match": patterns, "kind": kind}`` as in ``rules``, or a list of
            these. Give what AdamW steps beside Muon. Not with ``averaged_steps``.
        fragments: parts of the model that are sent at different steps of a round (Streaming DiLoCo).
        delay: local steps that continue while a fragment travels; with 0, the ranks wait for it.
        alpha: weight of the replica when a fragment is used after ``delay`` steps, in [0, 1); the anchor has the rest.
            None: 0.5 with a delay, else 0.
        evaluate: the model that is evaluated and saved in checkpoints. "anchor": what the ranks last had in common, and
            before the first round ends, as "mean"; it sends a few bytes for each frozen tensor, to check that it is
            equal. "mean": the mean of the current replicas, computed once between two steps.
        buffers: "mean" or "rank0" by shell-style pattern of buffer names, such as {"*.codebook": "mean"}; the first
            pattern that matches counts. For all others, BatchNorm's running statistics are averaged and the rest is
            copied from rank 0, as DDP does.
        on_nonfinite: what to do if a rank's numbers are not finite at the end of a round. "skip": all ranks go back to
            the anchors, and optimizer states that are not finite are reset. "raise": an error that names the
            parameters. "pass": send them to all ranks.
        check_drift_every: rounds between two checks that the anchors, and parameters whose gradients are averaged, are
            equal on all ranks; 0: never.
        **options: of the compression, as for ``CompressedDDPStrategy``. ``exchange``: all but AdaGrad at the owner.
            ``error_feedback``: None and "auto" ignore the optimizer; SparseLoCo multiplies the residual in each round,
            ``{"decay": 0.95}``. ``warmup_steps``: rounds in float32 before compression begins. ``schedule``: by rounds
            or epochs. Also ``rules``, ``min_numel``, ``seed``, ``deterministic``, ``on_drift``.

    Attributes:
        fragments: of the model, during a fit.
        skipped: steps that were skipped because averaged gradients were not finite.

    Raises:
        ValueError: a name or setting is unknown, a value is out of range, or local steps cannot work with it.
    """

    kind = "local steps"
    _received: Tensor | None

    def __init__(
        self,
        sync_every: int = 16,
        outer: Outer | str | dict[str, Any] = "average",
        compressor: Method | Automatic | str | dict[str, Any] = "auto",
        averaged_steps: int = 0,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        evaluate: Literal["anchor", "mean"] = "anchor",
        buffers: dict[str, Literal["mean", "rank0"]] | None = None,
        on_nonfinite: Literal["pass", "skip", "raise"] = "skip",
        check_drift_every: int = 1,
        average_gradients: object = (),
        **options: Any,
    ) -> None:
        super().__init__(evaluate, ("anchor", "mean"), buffers)
        self.rounds = Rounds(sync_every, fragments, delay, (0.5 if delay else 0.0) if alpha is None else alpha)
        self.outer, self.averaged_steps, self.steps_per_count = Outer.of(outer), averaged_steps, sync_every
        check_integer("averaged_steps", averaged_steps, 0)
        self.averaged = AveragedGradients(average_gradients)
        if averaged_steps and self.averaged.rules:
            raise ValueError(
                f"averaged_steps={averaged_steps} cannot be combined with average_gradients={average_gradients!r}: the "
                "one averages all gradients at first, the other some of them in each step. Leave one of them out"
            )
        check_gone(options)
        if unknown := sorted(options.keys() - {*OPTIONS}):
            raise ValueError(f"LocalSGD has no setting {unknown[0]!r}; its other settings are {', '.join(OPTIONS)}")
        options |= {"on_nonfinite": on_nonfinite, "check_drift_every": check_drift_every}
        self.settings = RunState.of(compressor, **options)
        _check(self.settings)
        plain = self.outer == Outer() and not self.settings.error_feedback
        self.needs_recount = not (plain and fragments == 1 and not delay)  # else anchors are a mean of trained models

    @property
    def method(self) -> str:
        """See ``Synchroniser``: residuals need the same compressor, momenta the same fragments."""
        parts, averaged = self.rounds.fragments, f", gradients of {self.averaged} averaged" * bool(self.averaged.rules)
        return f"local steps in {parts} fragment{'s' * (parts > 1)}, {self.settings.family}{averaged}"

    # a fit

    def check(self, model: nn.Module, ranks: Collective, device: torch.device) -> None:
        """See ``Synchroniser``."""
        check_setup(self.settings, model, ranks, device)
        described = (self.rounds, self.outer, self.averaged_steps, self.evaluate, self.rules, self.averaged.rules)
        self._compare(described, None, ranks, device)
        self.rules.check(dict(model.named_buffers()))
        self.averaged.check(model, self.may_unfreeze)
        split([each.numel() for _, each in self._local(model)], self.rounds.fragments)

    def _local(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters that are in fragments, by name."""
        return [each for each in checks.trained_parameters(model) if not self.averaged.takes(each[0])]

    def _start(self) -> None:
        self.averaged.start(self.model)
        if (self.averaged.rules or self.averaged_steps) and any(isinstance(each, LBFGS) for each in self.optimizers):
            raise ValueError(
                "LBFGS cannot be combined with averaged_steps or average_gradients: it computes gradients several "
                "times in a step, and not equally often on all ranks. Use another optimizer, or leave them out"
            )
        parts, trained = self.rounds.fragments, self._local(self.model)
        world = World(self.ranks, self.device, Meter(self.device))
        policy = self.settings.options.on_nonfinite
        alone = RunState.of("none", on_nonfinite=policy, check_drift_every=0)  # one rank sends nothing
        settings = self.settings if self.ranks.size > 1 else alone
        settings = decide(settings.bound(kinds_of(self.model)), trained, world)
        self.averaging = None if self.averaged.rules or self.averaged_steps else settings
        self._forecast = run_summary(settings, trained, world, self.rounds.sync_every)
        self._transports = [self.ranks.apart() if self.rounds.delay else self.ranks for _ in range(parts)]
        ours = self.model, self.optimizers, settings, self.rounds, self.outer
        self.fragments = Fragments(*ours, self._transports, self.rules, self.averaged.takes)
        averaged = [Trained(*each) for each in self.averaged.trained(self.model).items()]
        self._drift = DriftGuard(averaged, (), self.ranks, settings)
        # of its own if gradients are averaged: a fragment may travel meanwhile, and count its bytes
        self._meter = Meter(self.device) if self.averaged.rules else self.fragments.parts[0].compression.meter
        self.counted = CountingCollective(self.ranks, self._meter)
        self._some_frozen = any(not each.requires_grad for each in self.model.parameters())
        self._joined, self._received = 0, None
        self.skipped = 0

    def _rebase(self) -> None:
        self.fragments.rebase(self.step)

    @property
    def step(self) -> int:
        """Number of local steps so far."""
        return max(self.attempts - self.averaged_steps, 0)

    @property
    def averages_gradients(self) -> bool:
        """Whether the next step averages gradients of some parameters, or of all."""
        return bool(self.averaged.rules) or self.attempts < self.averaged_steps

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, scale: Tensor | None = None) -> None:
        """See ``Synchroniser``: add unfrozen parameters; average the gradients that are not left to local steps.

        With a GradScaler, call it before ``scaler.unscale_``, which looks for infinities, also those of other ranks.
        """
        if late := [*self.fragments.join(self.step), *self.averaged.join(self.model)]:
            self.meeting.joined = zlib.crc32(repr(late).encode(), self.meeting.joined)
        if self.attempts < self.averaged_steps:
            parameters = trained_by(optimizer)
        else:
            parameters = self.averaged.of(optimizer, self.model, scale is not None)
        unlike = self._some_frozen and self.averages_gradients  # ranks may have unfrozen other parameters
        if not (parameters or unlike):
            return
        if self.meeting.unsized or unlike:
            self.meeting.agree()  # before a rank waits for gradients of one that has ended, or has other parameters
        if not parameters:
            return
        self._meter.bytes_dense += average_gradients(parameters, self.counted, scale)
        if scale is None:
            policy = self.settings.options.on_nonfinite
            self.skipped += skip_nonfinite(optimizer, parameters, policy, self.attempts)

    def _after_step(self) -> None:
        step, local = self.attempts, self.attempts - self.averaged_steps
        if local <= 0:
            if local == 0:
                self._rebase()
            if local == 0 or step % self.rounds.sync_every == 0:
                self.meeting.agree()
            return
        if self.meeting.unsized and (self.rounds.due(local) or self.rounds.sent(local)):
            self.meeting.agree()  # before a rank waits for a fragment of one that has ended
        fragments = self.fragments
        due = fragments.of(self.rounds.due(local)) if self.rounds.delay else []
        for number in due:
            fragments.use(number, self.rounds.alpha)
        sent = fragments.of(self.rounds.sent(local))
        votes = self.meeting.vote()  # now: the thread may run some steps later
        for number in sent:
            fragments.send(number, local, self.epoch, lambda: self._send_votes(votes))
            if not self.rounds.delay:
                fragments.use(number, 0.0)
        if fragments.last in sent and self.averaged.rules:
            self._drift.compare(local // self.rounds.sync_every)
            self._meter.end_step()
            self._meter.begin_step()
        if fragments.last in (due if self.rounds.delay else sent) and self._received is not None:
            received, self._received = self._received.cpu(), None
            self.meeting.apply_votes(received)

    def _send_votes(self, votes: Tensor) -> None:
        """Exchange the ranks' votes, right after the last fragment of a round."""
        pinned = votes.pin_memory() if self.device.type == "cuda" else votes  # so that the copy delays no local step
        received = pinned.to(self.device, non_blocking=True)
        with errors.explained("telling the others of signals and batches", self.ranks.rank):
            self._transports[-1].all_reduce(received, "max")
        if (joined := int(votes[0])) != self._joined:  # fragments that joined are sent next
            self.meeting.check_joined(received.cpu())
            self._joined = joined
        self._received = received

    def abandon(self) -> None:
        """See ``Synchroniser``."""
        super().abandon()
        self.fragments.abandon()

    @torch.no_grad()
    def finish(self) -> None:
        """See ``Synchroniser``: the steps since the last round are averaged in a shorter one."""
        self.fragments.finish(self.step, self.epoch) if self.step else self._rebase()
        self.put(self._rest(self.fragments.replicas, buffers=False))

    # what is evaluated, saved and reported

    def _averaged(self, plain: bool) -> dict[str, Tensor]:
        """Return the anchors, or the mean of the current replicas; in the first round, anchors are untrained."""
        begun = self.attempts >= self.averaged_steps
        if not self.attempts or (self._alone and not begun):
            return {}
        if self._alone:
            return self.fragments.anchors()
        if not (plain or begun):  # only frozen parameters can differ
            return self._rest(self.fragments.replicas)
        self.fragments.arrive()
        if plain or self.evaluate == "mean" or self.step < self.rounds.sync_every:
            own, rest = self.named(), self._rest(self.fragments.replicas)  # refuses models that are not alike
            means = mean_of({name: own[name] for name in self.fragments.replicas}, self.counted)
            passes = self.settings.options.on_nonfinite == "pass"
            if passes or all(bool(mean.isfinite().all()) for mean in means.values()):  # the same on all ranks
                return means | rest
            if self.ranks.rank == 0:
                text = "a rank's parameters are not finite, so the anchors are evaluated instead of the mean"
                warnings.warn(text, stacklevel=2)
        return self.fragments.anchors() | self._rest(self.fragments.replicas, buffers=False)

    def state_dict(self) -> dict[str, Any]:
        """See ``Synchroniser``; waits for all fragments that travel."""
        state = self.fragments.state_dict()
        return {**state, "common": {**state["common"], "attempts": self.attempts}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Synchroniser``."""
        self.fragments.load_state_dict(state)
        self.attempts = state["common"]["attempts"]

    @property
    def meters(self) -> list[Meter]:
        """See ``Synchroniser``; one for each fragment, and one for gradients that are averaged beside them."""
        own = [self._meter] if self.averaged.rules else []
        return [*(fragment.compression.meter for fragment in self.fragments.parts), *own]

    @property
    def summary(self) -> str:
        """See ``Synchroniser``."""
        rounds, outer, first = self.rounds, self.outer, self.averaged_steps
        before = f"after {first} steps with averaged gradients, " if first else ""
        if self.averaged.rules:
            taken, trained = self.averaged.trained(self.model), checks.trained_parameters(self.model)
            share = sum(each.numel() for each in taken.values()) / sum(each.numel() for _, each in trained)
            before = f"gradients of {len(taken)} parameters ({100 * share:.1f} %) averaged in each step; the others: "
        parts = f", in {rounds.fragments} fragments" if rounds.fragments > 1 else ""
        late = f", used {rounds.delay} steps later" if rounds.delay else ""
        how = f"outer lr {outer.lr:g}, momentum {outer.momentum:g}; {self._forecast.summary}"
        return f"{before}{rounds.sync_every} local steps a round{parts}{late}; {how}"

    def stats(self) -> dict[str, Any]:
        """Return ``Compression.stats`` over all fragments. ``bytes_dense``: what stock DDP sends in as many steps."""
        by_part = [fragment.compression.stats() for fragment in self.fragments.parts]
        total = {name: sum(stats[name] for stats in by_part) for name in by_part[0]}
        if self.averaged.rules:
            own = self._meter.read()
            total |= {name: total[name] + own[name] for name in total if "bytes" in name}
        total["ratio"] = total["bytes_dense"] / total["bytes_sent"] if total["bytes_sent"] else 1.0
        total["residual_norm"] = sum(stats["residual_norm"] ** 2 for stats in by_part) ** 0.5
        total["relative_error"] /= len(by_part)
        total["nonfinite_steps"] += self.skipped
        return {**total, "steps": by_part[self.fragments.last]["steps"], "summary": self.summary}

    def close(self) -> None:
        """See ``Synchroniser``."""
        if not self._alone:
            self.fragments.arrive()
        self.fragments.close()
        for transport in self._transports if self.rounds.delay and not self._alone else ():
            transport.close()


OPTIONS = (
    "exchange",
    "error_feedback",
    "warmup_steps",
    "min_numel",
    "seed",
    "schedule",
    "rules",
    "deterministic",
    "on_drift",
)
"""Settings of the compression that ``LocalSGD`` accepts besides its own."""


def _check(settings: RunState) -> None:
    """Raise ValueError if the compressor returns no mean for the outer optimizer, or follows the inner optimizer."""
    if (by := settings.steps_by) is not None:
        raise ValueError(
            f"local steps cannot be combined with {by}, which votes or does a part of the optimizer's work: the outer "
            "optimizer needs the mean of the ranks' changes. Use 'rotated', 'topk' or another compressor"
        )
    if settings.options.schedule.by_rate:
        raise ValueError(
            "local steps cannot be combined with a schedule by learning rate: the outer learning rate is constant. "
            "Give values by rounds, such as {'density': {0: 0.25, 10: 0.01}}"
        )
