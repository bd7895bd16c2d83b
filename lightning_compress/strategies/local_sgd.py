"""Local steps in Lightning: ranks train alone, and average what changed, compressed, every so many steps."""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.codecs import Method
from lightning_compress.collectives import TorchCollective, World
from lightning_compress.collectives.counting import CountingCollective, Meter
from lightning_compress.core import failures
from lightning_compress.engine import checks
from lightning_compress.engine.attach import check_setup
from lightning_compress.engine.compression import Compression
from lightning_compress.exchanges import Pattern
from lightning_compress.local.allowed import alone, check
from lightning_compress.local.inner import average_gradients, forget_nonfinite, leave_out_nonfinite
from lightning_compress.local.means import mean_of
from lightning_compress.local.outer import Outer
from lightning_compress.local.statistics import BufferRules
from lightning_compress.local.steps import LocalSteps
from lightning_compress.local.timetable import Rounds
from lightning_compress.planning.decide import decide
from lightning_compress.planning.summary import forecast
from lightning_compress.settings import readers
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.options import Options
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState
from lightning_compress.strategies.alike import check_alike, differing
from lightning_compress.strategies.meeting import END
from lightning_compress.strategies.names import LOCAL_STEPS, register
from lightning_compress.strategies.recount import Recount
from lightning_compress.strategies.sidecar import SavedState
from lightning_compress.strategies.unwrapped import UnwrappedMixin

if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


class LocalSGDMixin(UnwrappedMixin):
    """Turns a ``DDPStrategy`` into one of local steps; see ``LocalSGDStrategy``."""

    def __init__(
        self,
        sync_every: int = 16,
        outer: Outer | str | dict[str, Any] = "average",
        compressor: Method | Automatic | str | dict[str, Any] = "auto",
        exchange: Pattern | str | dict[str, Any] = "auto",
        averaged_steps: int = 0,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        evaluate: Literal["anchor", "mean"] = "anchor",
        buffers: dict[str, Literal["mean", "rank0"]] | None = None,
        error_feedback: bool | str | dict[str, Any] | None = None,
        warmup_steps: int | None = None,
        min_numel: int = 1024,
        seed: int = 0,
        state: SavedState = "sidecar",
        strict_state: bool = False,
        schedule: str | dict[str, Any] | None = None,
        rules: Sequence[dict[str, Any]] | None = (),
        deterministic: bool = False,
        on_nonfinite: Literal["pass", "skip", "raise"] = "skip",
        on_drift: Literal["error", "resync"] = "error",
        check_drift_every: int = 1,
        **kwargs: Any,
    ) -> None:
        given = locals()
        super().__init__(state=state, strict_state=strict_state, **kwargs)
        blend = (0.5 if delay else 0.0) if alpha is None else alpha
        self._rounds = Rounds(sync_every, fragments, delay, blend)
        self._outer = Outer.of(outer)
        readers.whole("averaged_steps", averaged_steps)
        self._averaged_steps = averaged_steps
        if evaluate not in ("anchor", "mean"):
            raise ValueError(f"evaluate={evaluate!r} must be 'anchor' or 'mean'")
        self._evaluate, self._rules = evaluate, BufferRules({} if buffers is None else buffers)
        self._settings = RunState.of(**{name: given[name] for name in _SETTINGS})
        check(self._settings)
        self._local: LocalSteps | None = None

    @property
    def method(self) -> str:
        """What a checkpoint has to be of: residuals of the same compressor, momentum of the same fragments."""
        parts = self._rounds.fragments
        return f"local steps in {parts} fragment{'s' * (parts > 1)}, {self._settings.family}"

    # a fit

    def prepare(self, trainer: Any) -> None:
        """Refuse what cannot work, and settings that differ over the ranks."""
        assert self.lightning_module is not None
        check_setup(self._settings, self.lightning_module, TorchCollective(), self.root_device)
        described = repr((self._rounds, self._outer, self._averaged_steps, self._evaluate, self._rules))
        check_alike("local steps", described, self.root_device)
        self._rules.check(dict(self.lightning_module.named_buffers()))
        trained = len(checks.trained_parameters(self.lightning_module))
        if self._rounds.fragments > trained:
            raise ValueError(
                f"fragments={self._rounds.fragments} must be at most {trained}, the number of trained parameters"
            )

    def begin(self, trainer: Any) -> None:
        """Have the anchors where all ranks begin."""
        module, size = self.lightning_module, TorchCollective().size
        assert module is not None
        apart, count = self._rounds.delay > 0, self._rounds.fragments
        self._transports = [TorchCollective().apart() if apart else TorchCollective() for _ in range(count)]
        parameters = checks.trained_parameters(module)
        world = World(TorchCollective(), self.root_device, Meter(self.root_device))
        settings = self._settings if size > 1 else alone(self._settings)
        settings = decide(settings.bound(kinds_of(module)), parameters, world)
        self._forecast = forecast(settings, parameters, world, self._rounds.sync_every)
        self._local = LocalSteps(module, settings, self._rounds, self._outer, self._transports, self._rules)
        self._recount = Recount(module, self._rules, wanted=not self._local.averages)
        self._local.on_left_out = lambda: forget_nonfinite(self.optimizers)
        self._said: Tensor | None = None
        self._joined = 0
        self._frozen = len(parameters) < len(list(module.parameters()))

    def begin_after(self, step: int) -> None:
        """Have the anchors where the model is; the first round of a run that goes on is shorter."""
        self.local.rebase()
        self.local.begin_after(max(step - self._averaged_steps, 0))

    def on_train_start(self) -> None:
        """Say what runs."""
        super().on_train_start()
        rounds, sent = self._rounds, self._forecast.summary
        first = f"after {self._averaged_steps} steps with averaged gradients, " if self._averaged_steps else ""
        parts = f", in {rounds.fragments} fragments" if rounds.fragments > 1 else ""
        late = f", used {rounds.delay} steps later" if rounds.delay else ""
        rank_zero_info(
            f"lightning_compress: {first}{rounds.sync_every} local steps a round{parts}{late}; outer lr "
            f"{self._outer.lr:g}, momentum {self._outer.momentum:g}; {sent}"
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the schedules which epoch it is."""
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self.local.epoch = self.lightning_module.current_epoch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's, and keep the batch for BatchNorm's statistics."""
        self._recount.keep(args, kwargs)
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step; in the first ``averaged_steps`` with the mean of the ranks' gradients."""

        def before() -> Any:
            result = closure()
            if not self._trainer.fit_loop._skip_backward:
                with torch.no_grad():
                    self._join()
                    if self.attempts < self._averaged_steps:
                        self._average_gradients(optimizer)
            return result

        return super().optimizer_step(optimizer, before, model, **kwargs)

    def _join(self) -> None:
        """What was unfrozen is averaged from now on, before any rank moves it."""
        if late := self.local.join(max(self.attempts - self._averaged_steps, 0)):
            self.meeting.joined = zlib.crc32(repr(late).encode(), self.meeting.joined)
            names = f"{', '.join(late[:3])}{', ...' * (len(late) > 3)}"
            rank_zero_info(f"lightning_compress: {names}: trained from now on, and averaged at the end of each round")

    def _average_gradients(self, optimizer: Optimizer) -> None:
        if self.meeting.unsized or self._frozen:
            self.meeting.agree()  # before any of them waits for gradients of one that is done, or has others
        sent, dense = average_gradients(optimizer, TorchCollective())
        self.compression.meter.bytes_sent += sent
        self.compression.meter.bytes_dense += dense
        if getattr(self.precision_plugin, "scaler", None) is None:  # which skips such steps by itself
            self.local.skipped += leave_out_nonfinite(optimizer, self._settings.options.on_nonfinite, self.attempts)

    def after_attempt(self, step: int) -> None:
        """Do what is due in the round."""
        local = step - self._averaged_steps
        if local <= 0:
            if local == 0:
                self.local.rebase()
            if local == 0 or step % self._rounds.sync_every == 0:
                self.meeting.agree()
            return
        if self.meeting.unsized and self._rounds.due(local):
            self.meeting.agree()  # before any of them waits for a fragment of one that is done
        said = self.meeting.ask()  # where this rank is now, and not when a thread comes to it
        if self.local.after(local, lambda: self._tell(said)) and self._said is not None:
            said, self._said = self._said, None
            self.meeting.heed(said.cpu())

    def _tell(self, said: Tensor) -> None:
        """What ranks have to say to each other travels with a round's last fragment."""
        pinned = said.pin_memory() if self.root_device.type == "cuda" else said  # whose copy holds up no local step
        there = pinned.to(self.root_device, non_blocking=True)
        with failures.explained("telling the others of signals and batches", self.global_rank):
            self._transports[-1].all_reduce_max(there)
        if (joined := int(said[3])) != self._joined:  # which is sent next
            self.meeting.check_joined(there.cpu())
            self._joined = joined
        self._said = there

    def finish(self) -> None:
        """Synchronise what was learned since the last round."""
        self.meeting.agree(END)
        local = self.attempts - self._averaged_steps
        self.local.finish(local) if local > 0 else self.local.rebase()
        self._put(self._followers())
        counted = self._recounted({}) if local > 0 else {}
        self._put(counted)
        self.local.buffers.common |= counted  # of which a run that goes on from here begins
        if 0 < local < self._rounds.sync_every and self._evaluate == "anchor":
            rank_zero_warn(
                f"the fit ended after {local} local steps, before a round of sync_every={self._rounds.sync_every}: "
                "what was evaluated and saved in it is the model with which they began; lower sync_every, set "
                "evaluate='mean', or save by trainer.save_checkpoint() after the fit"
            )

    def _followers(self) -> dict[str, Tensor]:
        """Means of frozen parameters that differ by rank, as those that follow trained ones; a collective call."""
        assert self.lightning_module is not None
        own, named = self.replica(), self.lightning_module.named_parameters()
        known = {name for each in self.local.fragments for name in each.anchors}
        frozen = {name: own[name] for name, each in named if each.is_floating_point() and name not in known}
        names = differing(frozen, self._counted(), self.root_device)
        return mean_of({name: frozen[name] for name in names}, self._counted())

    def _counted(self) -> CountingCollective:
        return CountingCollective(TorchCollective(), self.compression.meter)

    def average_model(self) -> None:
        """Leave the plain mean."""
        self._put(self.local.mean(self._named(), TorchCollective()) | self._followers())

    def close(self) -> None:
        """Stop; figures and states stay readable."""
        if self._local is not None:
            if not self.gives_up:
                self._local.arrive()
            self._local.close()
            for each in self._transports if self._rounds.delay and not self.gives_up else ():
                each.close()

    # what is evaluated, saved and said

    def evaluated(self) -> Mapping[str, Tensor]:
        """The anchors, or the mean of the replicas as they are."""
        if not self.attempts:  # the same on all ranks
            return {}
        if self.attempts < self._averaged_steps:  # but what follows it, and buffers
            return {} if self.gives_up else self.local.mean_buffers(self.replica(), self._counted()) | self._followers()
        if self.gives_up:
            self.local.abandon()
        if (self._evaluate == "mean" or self._swa) and not self.gives_up:
            found = self.local.mean(self.replica(), self._counted())
            if self._settings.options.on_nonfinite != "pass" and not self.local.finite(found):  # on all ranks alike
                rank_zero_warn("a rank's numbers are not finite: what the ranks had in common last is evaluated")
                found = self.local.anchors()
        else:
            found = self.local.anchors()
        if not self.gives_up:
            found |= self._followers()
        own = self._named()
        found = {name: each.to(own[name].dtype) for name, each in found.items()}
        return found if self.gives_up or self._swa else found | self._recounted(found)

    def _recounted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """BatchNorm's statistics under these weights, where they are not those of the ranks' own models."""
        return self._recount.count(weights, super().training_step, self._counted(), self.root_device)

    def own_state(self) -> dict[str, Any]:
        """Fragments, once all that travels is back."""
        if self.gives_up:
            self.local.abandon()
        state = self.local.state_dict()
        state["common"]["counted"] = self._recount.last
        return state

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from them."""
        self.local.load_state_dict(state)
        self._recount.last = dict(state["common"].get("counted", {}))

    @property
    def local(self) -> LocalSteps:
        """The local steps of the fit under way.

        Raises:
            RuntimeError: there are none.
        """
        if self._local is None:
            raise RuntimeError("there are no local steps in this process: they begin with trainer.fit()")
        return self._local

    @property
    def compression(self) -> Compression:
        """The compression of the model, or of its first fragment.

        Raises:
            RuntimeError: there is no fit under way.
        """
        return self.local.fragments[0].compression

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of the last round and in total; ``bytes_dense`` is what stock DDP sends in as many steps.

        As ``Compression.stats``, over all fragments; ``summary``: what runs, in a line.
        """
        return self.local.stats() | {"summary": self._forecast.summary}

    def measure_every(self, steps: int) -> None:
        """Have time and error measured of a round in so many steps, or of each one where rounds are longer."""
        for each in self.local.fragments:
            each.compression.meter.sample_every = max(1, steps // self._rounds.sync_every)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the presets, and the variants of each."""
        register(strategy_registry, cls, "Local steps", LOCAL_STEPS)


_OURS = set(inspect.signature(LocalSGDMixin.__init__).parameters)
_SETTINGS = sorted(
    _OURS & {*inspect.signature(Options.of).parameters, *(each.name for each in dataclasses.fields(Options))}
)


class LocalSGDStrategy(LocalSGDMixin, DDPStrategy):
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
        exchange: the pattern in which messages travel, as there; no AdaGrad at the owner.
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
        error_feedback: as there, but None and "auto" do not look at the optimizer: on for biased methods, else off.
            SparseLoCo: ``{"decay": 0.95}``, by which the residual is multiplied in each round.
        warmup_steps: rounds in float32 before compression begins.
        min_numel: see ``CompressedDDPStrategy``.
        seed: likewise.
        state: how checkpoints hold what a rank has of its own: "sidecar", a file a rank beside the checkpoint, from
            which a run goes on bit for bit, also in the middle of a round; or "none". At another world size, or
            without these files, all ranks begin from the checkpoint's model.
        strict_state: state that cannot be restored stops the run, instead of a warning.
        schedule: settings of the compressor that change, by rounds or epochs; see ``CompressedDDPStrategy``.
        rules: see ``CompressedDDPStrategy``.
        deterministic: likewise.
        on_nonfinite: what to do when a rank's numbers are not finite at the end of a round: "skip" it: all ranks go
            back to the anchors, and optimizer states that are not finite begin anew; "raise" an error that names the
            parameters; or "pass" it on to all.
        on_drift: what to do when the anchors are not the same on all ranks any more; see ``CompressedDDPStrategy``.
        check_drift_every: rounds between these checks; 0: never.
        **kwargs: of Lightning's ``DDPStrategy``, none of DistributedDataParallel's: ``start_method``, ``timeout``, ...

    Raises:
        ValueError: unknown names or settings, values out of range, or what local steps cannot work with.
    """


LocalSGDStrategy.register_strategies(StrategyRegistry)
