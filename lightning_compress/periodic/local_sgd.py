"""Local steps: ranks train alone, and average what changed, compressed, every so many steps."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_compress.codecs import Method
from lightning_compress.collectives import Collective, CountingCollective, World
from lightning_compress.collectives.coalesced import mean_of, sums_of
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.core import errors
from lightning_compress.engine import checks
from lightning_compress.engine.attach import check_setup
from lightning_compress.engine.optimizers import skip_step
from lightning_compress.periodic.fragment import Outer
from lightning_compress.periodic.fragments import Fragments
from lightning_compress.periodic.sync_schedule import Rounds, whole
from lightning_compress.periodic.synchroniser import Synchroniser
from lightning_compress.planning.decide import decide
from lightning_compress.planning.summary import run_summary
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.options import check_gone
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState


class LocalSGD(Synchroniser):
    """Ranks take local steps alone, then average what changed, compressed by any method that conserves.

    For links on which even a compressed message in every step is too slow. In a round each rank's replica of the model
    takes ``sync_every`` steps of its own optimizer; then ``anchor - replica``, what it has learned, is averaged like a
    gradient, an outer optimizer steps the anchors, which all ranks have in common, and replicas go on from there.
    Buffers follow at each round's end. The states of inner optimizers stay each rank's own.

    Args:
        sync_every: local steps in a round; with several optimizers, those of the one that steps most. A cluster's
            signals wait for the end of the round, and with ``delay`` for its last fragment: allow at least that long
            between the signal and the kill.
        outer: "average", the plain mean (local SGD); "nesterov", lr 0.7 and momentum 0.9 (DiLoCo); or a mapping with
            some of lr, momentum, nesterov, for SGD over the anchors.
        compressor: of what was learned in a round, as for ``CompressedDDPStrategy``; not signsgd, dgc, onebit_adam.
        averaged_steps: optimizer steps before the first round, with the mean of the ranks' gradients, in float32
            (post-local SGD, Lin et al., ICLR 2020, arXiv:1808.07217).
        fragments: parts of the model that are sent at different steps of a round (Streaming DiLoCo).
        delay: local steps that go on while a fragment travels; 0: the ranks wait for it.
        alpha: the share of the replica in what it goes on from, when a fragment comes back after ``delay`` steps, in
            [0, 1); the rest is the anchor. None: 0.5 with a delay, else 0.
        evaluate: what is evaluated and saved in checkpoints: "anchor", what the ranks had in common last, which costs
            some bytes a frozen tensor, to see that it is the same; or "mean", the mean of the replicas as they are,
            made once between two steps.
        buffers: "mean" or "rank0" by shell-style pattern of buffer names, such as {"*.codebook": "mean"}; the first one
            that matches counts. Others: BatchNorm's running statistics are averaged, the rest is rank 0's, as by DDP.
        on_nonfinite: what to do when a rank's numbers are not finite at the end of a round: "skip" it: all ranks go
            back to the anchors, and optimizer states that are not finite begin anew; "raise" an error that names the
            parameters; or "pass" it on to all.
        check_drift_every: rounds between checks that the anchors are the same on all ranks; 0: never.
        **options: of the compression, as for ``CompressedDDPStrategy``: ``exchange``, but for AdaGrad at the owner;
            ``error_feedback``, for which None and "auto" do not look at the optimizer (SparseLoCo: ``{"decay": 0.95}``,
            by which the residual is multiplied in each round); ``warmup_steps``, rounds in float32 before compression
            begins; ``schedule``, by rounds or epochs; ``rules``, ``min_numel``, ``seed``, ``deterministic``,
            ``on_drift``.

    Attributes:
        fragments: of the model, in a fit.
        skipped: steps by averaged gradients, before the first round, that were left out, since these were not finite.

    Raises:
        ValueError: unknown names or settings, values out of range, or what local steps cannot work with.
    """

    kind = "local steps"
    _heard: Tensor | None

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
        **options: Any,
    ) -> None:
        super().__init__(evaluate, ("anchor", "mean"), buffers)
        self.rounds = Rounds(sync_every, fragments, delay, (0.5 if delay else 0.0) if alpha is None else alpha)
        self.outer, self.averaged_steps, self.counts = Outer.of(outer), averaged_steps, sync_every
        whole("averaged_steps", averaged_steps, 0)
        check_gone(options)
        if unknown := sorted(options.keys() - {*OPTIONS}):
            raise ValueError(f"LocalSGD has no setting {unknown[0]!r}; there are also {', '.join(OPTIONS)}")
        options |= {"on_nonfinite": on_nonfinite, "check_drift_every": check_drift_every}
        self.settings = RunState.of(compressor, **options)
        _check(self.settings)
        plain = self.outer == Outer() and not self.settings.error_feedback
        self.leaps = not (plain and fragments == 1 and not delay)  # else the anchors are a mean of what was trained

    @property
    def method(self) -> str:
        """Residuals of the same compressor, momentum of the same fragments."""
        parts = self.rounds.fragments
        return f"local steps in {parts} fragment{'s' * (parts > 1)}, {self.settings.family}"

    # a fit

    def check(self, model: nn.Module, ranks: Collective, device: torch.device) -> None:
        """See ``Synchroniser``."""
        check_setup(self.settings, model, ranks, device)
        described = (self.rounds, self.outer, self.averaged_steps, self.evaluate, self.rules)
        self._compare(described, None, ranks, device)
        self.rules.check(dict(model.named_buffers()))
        trained = len(checks.trained_parameters(model))
        if self.rounds.fragments > trained:
            raise ValueError(
                f"fragments={self.rounds.fragments} must be at most {trained}, the number of trained parameters"
            )

    def _start(self) -> None:
        parts, trained = self.rounds.fragments, checks.trained_parameters(self.model)
        world = World(self.ranks, self.device, Meter(self.device))
        policy = self.settings.options.on_nonfinite
        alone = RunState.of("none", on_nonfinite=policy, check_drift_every=0)  # there is nothing to compress
        settings = self.settings if self.ranks.size > 1 else alone
        settings = decide(settings.bound(kinds_of(self.model)), trained, world)
        self._forecast = run_summary(settings, trained, world, self.rounds.sync_every)
        self._transports = [self.ranks.apart() if self.rounds.delay else self.ranks for _ in range(parts)]
        ours = self.model, self.optimizers, settings, self.rounds, self.outer
        self.fragments = Fragments(*ours, self._transports, self.rules)
        self.counted = CountingCollective(self.ranks, self.meter)
        self._some_frozen = len(trained) < len(list(self.model.parameters()))
        self._told, self._heard = 0, None
        self.skipped = 0

    def _rebase(self) -> None:
        self.fragments.rebase(self.step)

    @property
    def step(self) -> int:
        """Local steps so far."""
        return max(self.attempts - self.averaged_steps, 0)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, scaled: bool = False) -> None:
        """Take in what was unfrozen before any rank moves it; at first, average gradients."""
        if late := self.fragments.join(self.step):
            self.meeting.joined = zlib.crc32(repr(late).encode(), self.meeting.joined)
        if self.attempts >= self.averaged_steps:
            return
        if self.meeting.unsized or self._some_frozen:
            self.meeting.agree()  # before any of them waits for gradients of one that is done, or has others
        self.meter.bytes_dense += average_gradients(optimizer, self.counted)
        if not scaled:
            self.skipped += leave_out_nonfinite(optimizer, self.settings.options.on_nonfinite, self.attempts)

    def _after_step(self) -> None:
        step, local = self.attempts, self.attempts - self.averaged_steps
        if local <= 0:
            if local == 0:
                self._rebase()
            if local == 0 or step % self.rounds.sync_every == 0:
                self.meeting.agree()
            return
        if self.meeting.unsized and self.rounds.due(local):
            self.meeting.agree()  # before any of them waits for a fragment of one that is done
        fragments = self.fragments
        due = fragments.of(self.rounds.due(local)) if self.rounds.delay else []
        for number in due:
            fragments.use(number, self.rounds.alpha)
        sent = fragments.of(self.rounds.sent(local))
        said = self.meeting.ask()  # where this rank is now, and not when a thread comes to it
        for number in sent:
            fragments.send(number, local, self.epoch, lambda: self._tell(said))
            if not self.rounds.delay:
                fragments.use(number, 0.0)
        if fragments.last in (due if self.rounds.delay else sent) and self._heard is not None:
            heard, self._heard = self._heard.cpu(), None
            self.meeting.heed(heard)

    def _tell(self, said: Tensor) -> None:
        """What ranks have to say to each other travels with a round's last fragment."""
        pinned = said.pin_memory() if self.device.type == "cuda" else said  # whose copy holds up no local step
        heard = pinned.to(self.device, non_blocking=True)
        with errors.explained("telling the others of signals and batches", self.ranks.rank):
            self._transports[-1].all_reduce(heard, "max")
        if (joined := int(said[0])) != self._told:  # which is sent next
            self.meeting.check_joined(heard.cpu())
            self._told = joined
        self._heard = heard

    def abandon(self) -> None:
        """See ``Synchroniser``."""
        super().abandon()
        self.fragments.abandon()

    @torch.no_grad()
    def finish(self) -> None:
        """See ``Synchroniser``; what was learned since the last round is averaged in a shorter one."""
        step, every = self.step, self.rounds.sync_every
        self.fragments.finish(step, self.epoch) if step else self._rebase()
        self.put(self._rest(self.fragments.replicas, buffers=False))
        if 0 < step < every and self.evaluate == "anchor" and self.ranks.rank == 0:
            warnings.warn(
                f"the fit ended after {step} local steps, before a round of sync_every={every}: what was evaluated and "
                "saved in it is the model with which they began; lower sync_every, set evaluate='mean', or save by "
                "trainer.save_checkpoint() after the fit",
                stacklevel=2,
            )

    # what is evaluated, saved and told

    def _averaged(self, plain: bool) -> dict[str, Tensor]:
        """The anchors, or the mean of the replicas as they are."""
        begun = self.attempts >= self.averaged_steps
        if not self.attempts or (self._alone and not begun):
            return {}
        if self._alone:
            return self.fragments.anchors()
        if not (plain or begun):  # parameters are the same, but for frozen ones
            return self._rest(self.fragments.replicas)
        self.fragments.arrive()
        if plain or self.evaluate == "mean":
            own = self.named()
            found = mean_of({name: own[name] for name in self.fragments.replicas}, self.counted)
            healthy = self.settings.options.on_nonfinite == "pass" or all(
                bool(each.isfinite().all()) for each in found.values()
            )
            if healthy:  # on all ranks alike; buffers may hold what masks
                return found | self._rest(self.fragments.replicas)
            if self.ranks.rank == 0:
                said = "a rank's numbers are not finite: what the ranks had in common last is evaluated"
                warnings.warn(said, stacklevel=2)
        return self.fragments.anchors() | self._rest(self.fragments.replicas, buffers=False)

    def state_dict(self) -> dict[str, Any]:
        """See ``Synchroniser``; once all that travels is back."""
        state = self.fragments.state_dict()
        return {**state, "common": {**state["common"], "attempts": self.attempts}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Synchroniser``."""
        self.fragments.load_state_dict(state)
        self.attempts = state["common"]["attempts"]

    @property
    def meters(self) -> list[Meter]:
        """See ``Synchroniser``; one a fragment."""
        return [each.compression.meter for each in self.fragments.each]

    @property
    def summary(self) -> str:
        """See ``Synchroniser``."""
        rounds, outer, first = self.rounds, self.outer, self.averaged_steps
        before = f"after {first} steps with averaged gradients, " if first else ""
        parts = f", in {rounds.fragments} fragments" if rounds.fragments > 1 else ""
        late = f", used {rounds.delay} steps later" if rounds.delay else ""
        how = f"outer lr {outer.lr:g}, momentum {outer.momentum:g}; {self._forecast.summary}"
        return f"{before}{rounds.sync_every} local steps a round{parts}{late}; {how}"

    def stats(self) -> dict[str, Any]:
        """As ``Compression.stats``, over all fragments; ``bytes_dense`` is what stock DDP sends in as many steps."""
        each = [fragment.compression.stats() for fragment in self.fragments.each]
        found = {name: sum(stats[name] for stats in each) for name in each[0]}
        found["ratio"] = found["bytes_dense"] / found["bytes_sent"] if found["bytes_sent"] else 1.0
        found["residual_norm"] = sum(stats["residual_norm"] ** 2 for stats in each) ** 0.5
        found["relative_error"] /= len(each)
        found["nonfinite_steps"] += self.skipped
        return {**found, "steps": each[self.fragments.last]["steps"], "summary": self.summary}

    def close(self) -> None:
        """See ``Synchroniser``."""
        if not self._alone:
            self.fragments.arrive()
        self.fragments.close()
        for each in self._transports if self.rounds.delay and not self._alone else ():
            each.close()


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
"""Of the compression, beside those that ``LocalSGD`` names."""


def _check(settings: RunState) -> None:
    """Refuse what gives the outer optimizer anything else than a mean, or looks at the inner optimizer.

    Raises:
        ValueError: it is chosen.
    """
    if (by := settings.steps_by) is not None:
        raise ValueError(
            f"local steps cannot be combined with {by}, which does a part of the optimizer's work, or votes: the outer "
            "optimizer needs a mean of what the ranks have learned; use 'rotated', 'topk' or another compressor"
        )
    if settings.options.schedule.by_rate:
        raise ValueError(
            "local steps cannot be combined with a schedule by learning rate: the outer one does not change; give "
            "values by rounds, such as {'density': {0: 0.25, 10: 0.01}}"
        )


def average_gradients(optimizer: Optimizer, ranks: Collective) -> int:
    """Replace an optimizer's gradients by their mean, made in float32 for those in half precision; a collective call.

    A parameter that was not used on this rank counts as zeros; one that was used on none stays without a gradient, so
    that no optimizer decays or moves it.

    Returns:
        bytes that stock DDP would have sent.

    Raises:
        ExchangeError: a rank is gone or silent.
    """
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    dense = 0
    for dtype, parameters in by_dtype.items():
        used = [each.grad is not None for each in parameters]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        told = torch.tensor(used, device=gradients[0].device)
        with errors.explained(f"averaging gradients of {len(used)} parameters", ranks.rank):
            *sums, told = sums_of([*gradients, told], ranks, torch.promote_types(dtype, torch.float32))
        anywhere = used if all(used) else told.tolist()
        for parameter, gradient, total, wanted in zip(parameters, gradients, sums, anywhere, strict=True):
            if wanted:
                parameter.grad = gradient.copy_(total.div_(ranks.size))
        dense += all_reduce_bytes(sum(each.nbytes for each in gradients), ranks.size)
    return dense


def leave_out_nonfinite(optimizer: Optimizer, policy: str, step: int) -> bool:
    """Keep an optimizer from stepping by averaged gradients that are not finite, the same on all ranks.

    Args:
        optimizer: is about to step.
        policy: "skip" the step, "raise" an error, or "pass" them on.
        step: for the error.

    Returns:
        whether it is kept from it.

    Raises:
        FloatingPointError: they are not finite, and that is to be an error.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    if policy == "pass" or not parameters:
        return False
    if bool(torch.stack([each.grad.isfinite().all() for each in parameters]).all()):
        return False
    if policy == "raise":
        raise FloatingPointError(
            f"step {step}: the mean of the ranks' gradients is not finite; on_nonfinite='skip' leaves such steps out"
        )
    skip_step(optimizer)
    return True
