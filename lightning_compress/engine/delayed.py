"""Double buffering: the optimizer of a step applies the average of the step before, while this step's travels.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014. With any codec, the parameters follow delayed SGD: step t applies the mean gradient of step
t - 1. The first step applies nothing. The average of the last step is in flight when training ends.

The threads that average also end a step: they commit its states, or roll them back if a gradient was not finite. What
the main thread knows (loss scale, epoch, learning rate) is noted with a step's first bucket. Before the main thread
reads or changes states, it waits for the threads.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import LBFGS, Optimizer

from lightning_compress.collectives import Collective, TorchCollective, consensus
from lightning_compress.core import state_check, state_dict
from lightning_compress.core.state_dict import StateDict
from lightning_compress.engine.compression import Compression, ScaleSource
from lightning_compress.engine.hook import ThreadHook, Workers, bucket_of
from lightning_compress.engine.in_flight import Average, ZeroGrad
from lightning_compress.engine.optimizers import Trained, skip_step
from lightning_compress.settings.options import check_delayed
from lightning_compress.settings.parsing import CompressorLike
from lightning_compress.settings.run_state import RunState
from lightning_compress.settings.schedule import Progress

PATIENCE_S = 5.0
"""Seconds for which an aborted run waits for what is in flight: the other ranks may be gone."""


class DelayedCompression(Compression):
    """A ``Compression`` whose averages are applied one step later; one synchronising backward pass per step.

    Args:
        trained: see ``Compression``.
        settings: see ``Compression``.
        collective: see ``Compression``.
        scale: see ``Compression``.
        **more: see ``Compression``.

    Attributes:
        workers: the threads that average; the hook sets them.
        in_flight: the average that the next step applies, or None.
        begun: steps whose averages are made or in flight.
    """

    workers: Workers

    def __init__(
        self,
        trained: Sequence[Trained],
        settings: RunState,
        collective: Collective,
        scale: ScaleSource = lambda: None,
        *more: Any,
        **named: Any,
    ) -> None:
        self.loss_scale = scale
        self._averaged = Average()  # the step that the threads average
        self.in_flight: Average | None = None
        self._applied: Average | None = None
        self.begun = 0
        self._stepping = self._applied_in_step = False
        self._owned: Collection[str] = ()  # names of the last optimizer's parameters
        self._notices_steps = self._awaits_step = False
        self._gave_up = False
        super().__init__(trained, settings, collective, lambda: self._averaged.scale, *more, **named)
        self._parameters = {each.name: each.parameter() for each in trained}
        self._zero_grad = ZeroGrad(self._parameters)
        self.closing.callback(self._zero_grad.close)

    # --- the main thread

    def begin(self) -> Average:
        """Return a new average, at the first bucket of a step."""
        rate = self.optimizers.rate() if self.next_settings.options.schedule.by_rate else None
        self.begun += 1
        return Average(self.loss_scale(), self.epoch, rate, self._applied)

    def apply(self, average: Average, buckets: Iterable[tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]) -> None:
        """Replace the gradients of a step by the means of the step before, once they are here.

        Args:
            average: of this step, whose buckets are all submitted.
            buckets: of this step: buffer, parameters, gradients.

        Raises:
            BaseException: averaging failed.
            RuntimeError: see ``_check_stepped``.
        """
        scale = self.loss_scale()
        factor = 1.0 if scale is None else float(scale)
        self._check_stepped(factor)
        last, start = self.in_flight, time.perf_counter()
        if last is not None:
            last.done.wait()
        waited = start, time.perf_counter()
        if last is not None and not last.complete:
            self.workers.wait()
            raise RuntimeError("the average of the last step is lost, because averaging failed")
        for buffer, parameters, gradients in buckets:
            if last is None:
                buffer.zero_()
            else:
                last.apply(buffer, parameters, gradients, factor)
        self._applied, self.in_flight = last, average
        self._applied_in_step = True
        self._awaits_step = self._notices_steps and last is not None and not last.problem
        self._zero_grad.hold(last, self._owned)
        self.workers.submit(lambda _: self._end(average, waited), average.done.set)

    def _check_stepped(self, factor: float) -> None:
        """Raise if the average that the last backward applied is lost, or is still in the gradients.

        Args:
            factor: of the present loss.

        Raises:
            RuntimeError: an optimizer calls its closure twice in a step, none has stepped since the last backward, or
                ``zero_grad`` was not called.
        """
        if self._stepping and self._applied_in_step:
            raise RuntimeError(
                "the optimizer computes gradients several times in a step, and delay=1 would give it those of several "
                "steps: use delay=0"
            )
        if self._zero_grad.held:
            raise RuntimeError(
                "a second backward began before zero_grad(), and delay=1 averages one backward in each step: call "
                "zero_grad() after each optimizer step, accumulate under no_sync(), or use delay=0"
            )
        skipped = self.in_flight is not None and factor < self.in_flight.factor  # by a GradScaler, which then lowers it
        if self._awaits_step and not skipped:
            raise RuntimeError(
                "a second backward began before the optimizer stepped, and delay=1 would lose the average that the "
                "first one applied: step after each backward, run one without a step under no_sync(), or use delay=0. "
                "To discard an average because of its values, call zero_grad() and then step()"
            )

    def settle(self) -> None:
        """Wait until nothing is under way; if an exception is being handled, only for a while.

        Raises:
            BaseException: averaging failed.
        """
        aborted = sys.exc_info()[0] is not None  # then other ranks may never answer
        until = time.monotonic() + (PATIENCE_S if aborted else math.inf)
        while not (self._gave_up or self.workers.idle):
            time.sleep(1e-3)
            self._gave_up = time.monotonic() > until
        if not aborted:
            self.workers.wait()

    def stepped_by(self, optimizers: Sequence[Optimizer]) -> None:
        """See ``Compression``.

        Raises:
            ValueError: there are several optimizers, or one computes gradients several times in a step.
        """
        if len(optimizers) > 1:
            raise ValueError(
                f"delay=1 works with one optimizer, and there are {len(optimizers)}, which may step at different "
                "times: give all parameters to one optimizer, or use delay=0"
            )
        if any(isinstance(each, LBFGS) for each in optimizers):
            raise ValueError(
                "delay=1 does not work with LBFGS, which computes gradients several times in a step: use another "
                "optimizer, or delay=0"
            )
        super().stepped_by(optimizers)
        self._stepping = False

    def take_over(self, optimizer: Optimizer) -> bool:
        """See ``Compression``."""
        self._owned = self.optimizers.owned(optimizer) or self._owned
        if not self._stepping:  # else an optimizer's step calls that of its base class
            self._stepping, self._applied_in_step = True, False
        return super().take_over(optimizer) or self._applied is None

    def before_step(self, optimizer: Optimizer) -> None:
        """Keep the optimizer from stepping in the first step, and with non-finite gradients.

        Raises:
            FloatingPointError: a gradient is not finite and ``on_nonfinite="raise"``; on all ranks.
        """
        if not self.optimizers.owned(optimizer):
            return
        if self._applied is None:
            skip_step(optimizer)
        elif self._applied.problem and self.finite.checks:
            self._stepping = False  # it may raise
            self.finite.refuse(optimizer, self._applied.problem)

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that the optimizer has stepped; its states were committed before."""
        self._stepping = False
        if self.optimizers.owned(optimizer):
            self._notices_steps, self._awaits_step = True, False

    def compare_ranks(self, now: bool = False) -> None:
        """See ``Compression``."""
        if self.active and (now or self._drift.due(self.begun)):
            self.settle()
            super().compare_ranks(now)

    def before_backward(self) -> None:
        """Do nothing: a step has one backward pass."""

    def roll_back(self) -> None:
        """Raise, because a step's states are committed as soon as it is averaged.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "with delay=1 a step cannot be discarded after its backward, because its average is already being made. "
            "Decide before backward, or use delay=0"
        )

    def retune(self, compressor: CompressorLike | None = None, **changes: object) -> None:
        """See ``Compression``.

        Raises:
            ValueError: see ``Compression``, or the new compressor does not work with a delay.
        """
        self.settle()
        check_delayed(self.next_settings.retuned(compressor, changes).methods)
        super().retune(compressor, **changes)

    def state_dict(self) -> StateDict:
        """See ``Compression``; with the average that no optimizer has applied yet. Waits for what is under way."""
        self.settle()
        state, flying = super().state_dict(), self.in_flight
        if flying is None or not flying.complete:
            return state
        means = {self.names[each]: mean.reshape(-1) for each, mean in flying.means.items()}
        gradients = self.settings.steps_by is None
        return state | {state_dict.IN_FLIGHT: {"scale": flying.factor, "means": means, "gradients": gradients}}

    def load_state_dict(self, state: StateDict) -> None:
        """See ``Compression``; what was in flight is rank 0's."""
        self.settle()  # ranks compare the state where averages travel
        super().load_state_dict(state)
        self.begun = self.step
        try:
            self.load_in_flight(state_check.check(state))
        except ValueError:
            self.reset()
            raise

    def load_in_flight(self, state: StateDict) -> None:
        """Let the next step apply what was in flight on rank 0; the rest of the state is ignored.

        A rank that did not take the last step, because another had failed, saved an average that rank 0's model has.
        Collective: all ranks must call it.

        Args:
            state: validated; that of other ranks may be empty.

        Raises:
            ValueError: on every rank: an average does not fit its parameter.
        """
        scale, means, problem = 1.0, dict[str, Tensor](), None
        try:
            shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
            scale, means = state_dict.means_in_flight(state, shapes, self.groups.orders)
        except ValueError as error:
            problem = error
        consensus.check({}, problem, self._collective, self.device, "")
        self.in_flight = self._of_first_rank(scale, means)

    def _of_first_rank(self, scale: float, means: Mapping[str, Tensor]) -> Average | None:
        """Return what was in flight on rank 0, or None; collective."""
        head = torch.tensor([scale, *(name in means for name in self._parameters)], dtype=torch.float64)
        self._collective.broadcast(head, self.device)
        scale, *known = head.tolist()
        names = [name for name, is_known in zip(self._parameters, known, strict=True) if is_known]
        if not names:
            return None
        average = Average(None if scale == 1.0 else torch.tensor(scale, dtype=torch.float32))
        for name, parameter in ((name, self._parameters[name]) for name in names):
            mean = means.get(name, torch.zeros(parameter.shape, dtype=torch.float32)).to(parameter.dtype, copy=True)
            self._collective.broadcast(mean, self.device)
            average.means[id(parameter)] = mean
            if not mean.isfinite().all():
                average.problem = "gradients of the step before the checkpoint are not finite"
        average.complete = True
        average.done.set()
        return average

    def follow(self, before: Compression) -> None:
        """See ``Compression``; what was in flight is dropped, as residuals are."""
        super().follow(before)
        self.begun = self.step

    def reset(self) -> None:
        """See ``Compression``; what is in flight is dropped."""
        self.settle()
        super().reset()
        self.in_flight = self._applied = None
        self._awaits_step = False
        self._zero_grad.hold(None, ())
        self.begun = 0

    def stats(self) -> dict[str, float]:
        """See ``Compression``; waits for what is under way."""
        self.settle()
        return super().stats()

    def close(self) -> None:
        """See ``Compression``; waits for what is under way."""
        try:
            self.settle()
        finally:
            super().close()
            self.in_flight = self._applied = None

    # --- the threads

    def average(
        self,
        average: Average,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        started: Callable[[], object],
    ) -> None:
        """Replace the gradients of one bucket by their mean; see ``reduce``."""
        self._averaged = average
        self.reduce(bucket_of(self, parameters), gradients, started)

    def _progress(self) -> Progress:
        return Progress(self.step, self._averaged.epoch, self._averaged.rate)

    def _end(self, average: Average, waited: tuple[float, float]) -> None:
        """Commit the states of a step, or roll them back; the threads have started its last bucket."""
        with self.lanes.turn, self.lanes.taken():  # until the last buckets are averaged
            if self.workers.failed:
                return
            names, rejected = set(self.names.values()), self.finite.found()
            if rejected:
                average.problem = f"step {self.step}: {self.groups.nonfinite(self._everyone.rank)}"
            self.finite.note()
            ended = self._passes.end(names)
            for state in self.groups.states():
                state.commit(rejected, names, ended)
            self.meter.waited(*waited)
            self.meter.end_step()
            self._stepped = average.complete = True
            self.step += 1


class DelayedHook(ThreadHook):
    """The communication hook that fills buckets with the averages of the step before.

    Args:
        compression: averages the gradients.
        transports: see ``ThreadHook``.
    """

    _compression: DelayedCompression

    def __init__(self, compression: DelayedCompression, transports: Sequence[TorchCollective]) -> None:
        super().__init__(compression, transports)
        compression.workers = self._workers
        self._arrived: list[tuple[Future[Tensor], Any]] = []
        self._average = Average()

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Submit a copy of a bucket's gradients; at the end of backward, replace all buckets by the last averages."""
        buffer, parameters, gradients = bucket.buffer(), bucket.parameters(), bucket.gradients()
        if bucket.index() == 0:
            self._average, self._arrived = self._compression.begin(), []
        copies = self._average.take(buffer, parameters, gradients)
        future: Future[Tensor] = Future()
        self._arrived.append((future, (buffer, parameters, gradients)))
        self._workers.submit(partial(self._compression.average, self._average, parameters, copies), lambda: None)
        if bucket.is_last():  # DistributedDataParallel's own callback, which needs the futures, comes after this one
            torch.autograd.Variable._execution_engine.queue_callback(self._deliver)
        return future

    def _deliver(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._compression.apply(self._average, [bucket for _, bucket in arrived])
        for future, (buffer, _, _) in arrived:
            future.set_result(buffer)
