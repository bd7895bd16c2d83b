"""Where compression meets DistributedDataParallel: its buckets in, our groups out."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_compress import checks, failures, snapshot
from lightning_compress.collectives import Collective, CountingCollective
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.courses import Progress
from lightning_compress.groups import Groups
from lightning_compress.kinds import kinds_of
from lightning_compress.meter import Meter
from lightning_compress.optimizers import Optimizers, unwatch, watch
from lightning_compress.settings import CompressorLike, Settings

# No `from __future__ import annotations` here: DistributedDataParallel looks at the hook's annotations.

log = logging.getLogger(__name__)

ScaleSource = Callable[[], Tensor | None]


class Compression:
    """The compression of one DistributedDataParallel model, from ``attach`` to ``close``.

    A step begins with the first bucket after an optimizer stepped, and ends when an optimizer that owns any of the
    model's parameters has really stepped: then the residuals of its parameters are committed. A step that an optimizer
    skipped is rolled back by ``roll_back``, or by itself where a rank's gradient was not finite.

    Args:
        ddp: the model.
        settings: what the user chose, equal on all ranks.
        collective: the ranks to average over.
        scale: returns what the loss is multiplied by (a GradScaler's scale), or None.

    Attributes:
        active: it does the averaging; otherwise DistributedDataParallel does.
        settings: what runs now.
        family: what the run began with, which state is of.
        step: optimizer steps so far.
        epoch: which one it is; whoever trains sets it, where a schedule goes by epochs.
        meter: counts.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        settings: Settings,
        collective: Collective,
        scale: ScaleSource = lambda: None,
    ) -> None:
        parameters = checks.trained_parameters(ddp.module, ddp.parameters_to_ignore)
        self.settings = settings.bound(kinds_of(ddp.module))
        self.family = settings.family
        self.device = parameters[0][1].device
        self.meter = Meter(self.device)
        self.step = 0
        self.epoch = 0
        self._collective = CountingCollective(collective, self.meter)
        self._scale = scale
        self._names = {id(parameter): name for name, parameter in parameters}
        self._optimizers = Optimizers(self._names)
        self._next_settings: Settings | None = None
        self._scheduled: dict[str, object] = {}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self.groups = Groups(self._names, self._shapes, self._collective, self.device, self.meter)
        self._flag = torch.zeros((), device=self.device)
        self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._reduced: set[int] = set()
        self._last_state: snapshot.Snapshot | None = None
        self._stepped = True
        self.active = False
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self._handles: list[Any] = []
        watch(self)

    def register(self, ddp: DistributedDataParallel) -> None:
        """Take the averaging over from ``ddp``."""
        self.active = True
        self._handles.append(ddp.register_forward_pre_hook(lambda module, _: checks.check_running(module)))
        ddp.register_comm_hook(None, self.hook)

    def leave_to(self, ddp: DistributedDataParallel) -> None:
        """Let ``ddp`` average by itself, and only count what it sends."""
        parameters = checks.trained_parameters(ddp.module, ddp.parameters_to_ignore)
        size = sum(parameter.numel() * parameter.element_size() for _, parameter in parameters)
        sent = all_reduce_bytes(size, self._collective.size)

        def count(module: nn.Module, _: object) -> None:
            if self._stepped and module.training and torch.is_grad_enabled():
                self._begin_step()
                self.meter.bytes_sent += sent
                self.meter.bytes_dense += sent

        self._handles.append(ddp.register_forward_pre_hook(count))

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Replace a bucket's gradients by their mean; synchronous, in the order of DistributedDataParallel."""
        buffer = bucket.buffer()
        if self._stream is None:
            self._reduce(bucket)
            future: Future[Tensor] = Future()
            future.set_result(buffer)
            return future
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._reduce(bucket)
            buffer.record_stream(self._stream)
            future = Future(devices=[self.device])
            future.set_result(buffer)
        return future

    def _reduce(self, bucket: Any) -> None:
        buffer = bucket.buffer()
        if self._stepped:
            self._begin_step()
        parts = self.groups.of(bucket.parameters(), self.settings)
        if any(id(group) in self._reduced for group, _ in parts):  # a second backward in the same step
            self._drop_unsound()
        self._reduced.update(id(group) for group, _ in parts)
        self.meter.bytes_dense += all_reduce_bytes(buffer.numel() * buffer.element_size(), self._collective.size)
        gradients = bucket.gradients()
        for group, places in parts:
            with failures.explained(f"step {self.step}, averaging {group.given[0]} and on", self._collective.rank):
                self._flag.add_(group.reduce([gradients[place] for place in places], self.step, self._scale()))

    def _begin_step(self) -> None:
        """The first bucket of a step: what no optimizer made true in the last one was thrown away."""
        self._stepped = False
        self._reduced.clear()
        self._flag.zero_()
        for state in self.groups.states():
            state.roll_back()
        if self.settings.residual_follows_lr:
            factors = self._optimizers.changes()
            for residual in self.groups.residuals() if factors else ():
                residual.scale(factors)
        self._follow_schedule()
        if self._next_settings is not None:  # groups are made anew, and take their states over by name
            self.settings, self._next_settings = self._next_settings, None
            self.groups.look_again()
        self.meter.begin_step()

    def _follow_schedule(self) -> None:
        """Retune where the schedule's values are others than in the last step; in between ``retune`` has the say."""
        schedule = self.settings.schedule
        rate = self._optimizers.rate() if schedule.by_rate else None
        values = schedule.values(Progress(self.step, self.epoch, rate))
        if values != self._scheduled:
            self._scheduled = values
            self._next_settings = self.next_settings.retuned(None, values)

    def _drop_unsound(self) -> None:
        """Forget a backward that was not finite, which a GradScaler skipped."""
        rejected = self._flag.isnan()
        self._nonfinite_steps.add_(rejected)
        for state in self.groups.states():
            state.reject(rejected)
        self._flag.zero_()
        self._reduced.clear()

    def state_dict(self) -> snapshot.Snapshot:
        """What the optimizer steps have made true so far, on this rank: tensors and primitives.

        Every rank has its own. It refers to memory that later steps replace or reuse: save or copy it at once.
        """
        if self._last_state is not None:
            return self._last_state
        groups = [(group.given, group.states) for group in self.groups]
        running = self.next_settings.running() | {"scheduled": dict(self._scheduled)}
        return snapshot.take(self.family, self.step, self._optimizers.rates, running, groups)

    def load_state_dict(self, state: snapshot.Snapshot) -> None:
        """Go on from a ``state_dict``, in its groups; parameters that it does not know begin anew. All ranks must come.

        Raises:
            ValueError: it is none, or of another method.
        """
        snapshot.check(state)
        if state["method"] != self.family:
            raise ValueError(f"the state is of {state['method']}; this run compresses with {self.family}")
        self.reset()
        self._scheduled = dict(state["running"]["scheduled"])
        self.settings = self.settings.resumed(state["running"]).bound(self.settings.rules.kinds)
        for saved in state["groups"]:
            if names := [name for name in saved["names"] if name in self._shapes]:
                group = self.groups.add(names, self.settings)
                snapshot.fill(group.states, saved, names)
                group.adopted()
        self._optimizers.rates.update(state["rates"])
        self.step = state["step"]

    def take_over(self, optimizer: Optimizer) -> None:
        """Let a method that does a part of the optimizer's work see that it is not done twice.

        Raises:
            ValueError: the optimizer does what the method cannot go with.
        """
        self._optimizers.see(optimizer)
        workers = [each for each in (self.settings.correction, self.settings.exchange) if each and each.optimizes]
        for said in self._optimizers.take_over(optimizer, workers) if self.active else ():
            if self._collective.rank == 0:
                log.info(said)

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer stepped: the residuals of its parameters become true, unless a gradient was not finite."""
        names = self._optimizers.owned(optimizer)
        if not names:
            return
        rejected = self._flag.isnan()
        if (found := getattr(optimizer, "found_inf", None)) is not None:  # a fused optimizer skips by itself
            rejected = rejected | (found > 0).to(rejected.device)
        follows = self.settings.residual_follows_lr
        moved = names - self._optimizers.stepped(optimizer) if follows else names
        for group in self.groups:
            for state in group.states.values():
                state.commit(rejected, moved if state is group.residual else names)
        if not self._stepped:  # the first of several optimizers, or an optimizer inside another one
            self._stepped = True
            self._nonfinite_steps.add_(rejected.squeeze())
            self.step += 1
            self.meter.end_step()

    def roll_back(self) -> None:
        """The optimizer did not step: residuals stay as they were. Nothing happens where it did."""
        if not self._stepped:
            self._nonfinite_steps.add_(self._flag.isnan())
            self._begin_step()
            self._stepped = True

    @property
    def next_settings(self) -> Settings:
        """What the next step begins with."""
        return self._next_settings or self.settings

    def retune(self, compressor: CompressorLike | None = None, **changes: object) -> None:
        """Compress otherwise from the next step on: ``retune(density=0.01)``, ``retune("onebit")``.

        Must be called on all ranks, in the same step, with the same arguments: ranks that disagree cannot read each
        other's messages. Residuals and other states stay; a residual that the new method needs not is sent with the
        next gradient. On one rank, where nothing is compressed, only the settings change.

        Args:
            compressor: as in ``attach``; None: the one that runs.
            **changes: of its settings.

        Raises:
            ValueError: there is no such setting, a value is out of range, the exchange cannot carry the method, another
                part of the optimizer's work would be taken over, or the run began with ``none``, which has no hook.
        """
        if not self.active and self._collective.size > 1:
            raise ValueError(
                "the run began with compressor='none', which leaves the average to DistributedDataParallel for good; "
                "begin with a compressor whose settings lose nothing, such as {'name': 'topk', 'density': 1.0}"
            )
        self._next_settings = self.next_settings.retuned(compressor, changes)

    def reset(self) -> None:
        """Begin again: no residuals, no steps."""
        for state in self.groups.states():
            state.reset()
        self._optimizers.forget()
        self._flag.zero_()
        self._stepped = True
        self.step = 0

    def stats(self) -> dict[str, float]:
        """Traffic of the last step and in total, time and error of the last sampled step; waits for the device.

        Returns:
            ``bytes_sent``, ``bytes_dense`` (what stock DDP sends), ``ratio`` of the last step; ``encode_ms``,
            ``exchange_ms``, ``decode_ms``, ``relative_error`` (norm of what was not sent over that of gradient plus
            residual) of the last of the steps that are sampled: the first, and each ``meter.sample_every``-th;
            ``residual_norm`` now; ``total_bytes_sent``, ``total_bytes_dense``, ``steps``, ``nonfinite_steps``.
        """
        norms = [residual.committed.norm() for residual in self.groups.residuals()]
        return self.meter.read() | {
            "residual_norm": float(torch.stack(norms).norm()) if norms else 0.0,
            "nonfinite_steps": float(self._nonfinite_steps),
        }

    def close(self) -> None:
        """Stop watching the optimizers and give memory back, when the model will not be trained any more.

        ``state_dict`` goes on giving the last state, which waits on the CPU.
        """
        if self.active and self._last_state is None:
            self._last_state = snapshot.on_cpu(self.state_dict())
        unwatch(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.groups.clear()
