"""The communication hooks of DistributedDataParallel: each gets a bucket and returns its mean."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from queue import Queue
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.collectives import TorchCollective
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.engine import checks
from lightning_compress.engine.compression import Compression

Work = tuple[Callable[[], None], Callable[[], None]]


class Background:
    """Run submitted work in order in one thread; after an error, run nothing until ``wait`` has raised it.

    The thread starts with the first work. It is a daemon: a process that exits in the middle of a step does not wait
    for other ranks.
    """

    def __init__(self) -> None:
        self._queue: Queue[Work | None] = Queue()
        self._errors: list[BaseException] = []
        self._begun = False

    def submit(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        """Queue ``work``, and ``done`` after it.

        Args:
            work: skipped if earlier work failed.
            done: always called, even if ``work`` failed or was skipped.
        """
        if not self._begun:
            self._begun = True
            arguments = self._queue, self._errors
            thread = threading.Thread(target=_serve, args=arguments, name="lightning_compress", daemon=True)
            thread.start()
            weakref.finalize(self, _end, self._queue, thread)
        self._queue.put((work, done))

    @property
    def idle(self) -> bool:
        """Whether all work is done."""
        return not self._queue.unfinished_tasks

    @property
    def failed(self) -> bool:
        """Whether work has raised an error that ``wait`` will raise."""
        return bool(self._errors)

    def wait(self) -> None:
        """Wait until all work is done.

        Raises:
            BaseException: the error of the work that failed.
        """
        self._queue.join()
        if self._errors:
            raise self._errors.pop()


class Workers:
    """A thread for each lane, to which buckets go by turns. A bucket begins when the one before it has started.

    After an error, the later buckets of that thread are skipped, on every rank the same ones.

    Args:
        count: of threads.
    """

    def __init__(self, count: int) -> None:
        self._backgrounds = [Background() for _ in range(count)]
        self._submitted = 0
        self._started = threading.Event()
        self._started.set()

    def submit(self, average: Callable[[Callable[[], object]], None], done: Callable[[], None]) -> None:
        """Queue the average of a bucket.

        Args:
            average: is given what to call as soon as the next bucket may begin.
            done: always called, after it.
        """
        # thread 1:  | start of 1 | rest of 1 .............. | start of 3 | rest of 3 ...
        # thread 2:               | start of 2 | rest of 2 .............. | start of 4 | ...
        # a start waits until the one before it is over, whichever thread that is in; the rest goes on beside others
        before, started = self._started, threading.Event()

        def work() -> None:
            before.wait()
            average(started.set)

        def end() -> None:
            started.set()
            done()

        self._backgrounds[self._submitted % len(self._backgrounds)].submit(work, end)
        self._submitted, self._started = self._submitted + 1, started

    @property
    def idle(self) -> bool:
        """Whether all buckets are averaged."""
        return all(each.idle for each in self._backgrounds)

    @property
    def failed(self) -> bool:
        """Whether averaging a bucket has raised an error that ``wait`` will raise."""
        return any(each.failed for each in self._backgrounds)

    def wait(self) -> None:
        """Wait until all buckets are averaged.

        Raises:
            BaseException: the error of one that failed.
        """
        with ExitStack() as stack:  # waits for all of them, whichever fails
            for background in self._backgrounds:
                stack.callback(background.wait)


def _end(queue: Queue[Work | None], thread: threading.Thread) -> None:
    """Let an idle thread end before the interpreter does: a thread that wakes up during exit aborts the process."""
    idle = not queue.unfinished_tasks
    queue.put(None)
    if idle and thread is not threading.current_thread():
        thread.join(10)


def _serve(queue: Queue[Work | None], errors: list[BaseException]) -> None:
    while (item := queue.get()) is not None:
        work, done = item
        try:
            if not errors:
                with torch.no_grad():
                    work()
        except BaseException as error:  # ``wait`` raises it
            errors.append(error)
        finally:
            done()
            queue.task_done()
        del item, work, done  # or they would hold gradients until the next step


# The hooks' reduce methods have no annotations: DistributedDataParallel inspects them, and rejects strings.


class Hook:
    """What a compression adds to a DistributedDataParallel. A copy of that model, or one from a file, has none.

    Args:
        compression: averages the gradients; None: there is none.
    """

    def __init__(self, compression: Compression | None) -> None:
        self._compression: Any = compression

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)

    def before_forward(self, ddp: DistributedDataParallel, _: object) -> None:
        """Prepare for a forward, and the backward pass after it."""
        if self._compression is None:
            return
        checks.check_running(ddp)
        if torch.is_grad_enabled():
            self._compression.before_backward()
            if ddp.module.training:  # Lightning leaves ``ddp`` itself in eval mode
                self._compression.compare_ranks()

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Replace a bucket's gradients by their mean; return a future of its buffer."""
        raise NotImplementedError


class StreamHook(Hook):
    """The communication hook for CUDA: it works on a stream of its own, in parallel with backward.

    Args:
        compression: averages the gradients.
    """

    def __init__(self, compression: Compression) -> None:
        super().__init__(compression)
        self._device = compression.device
        self._stream = side_stream(self._device)

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Replace a bucket's gradients by their mean, in the order of DistributedDataParallel.

        Raises:
            RuntimeError: backward is being captured in a CUDA graph. A replay would repeat the random bits and lose the
                state.
        """
        buffer = bucket.buffer()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the backward pass is captured in a CUDA graph, but compression changes from step to step; capture the "
                "model alone (torch.compile(mode='reduce-overhead'), make_graphed_callables), or use compressor='none'"
            )
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._compression.reduce(bucket_of(self._compression, bucket.parameters()), bucket.gradients())
            buffer.record_stream(self._stream)
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(buffer)
        return future


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's one stream: its models share scratch memory, and their collectives need one order."""
    return torch.cuda.Stream(device, priority=-1)


class ThreadHook(Hook):
    """The communication hook for the CPU: it works in threads of its own, in parallel with backward.

    A thread for each lane issues all collectives of its buckets, over the lane's process group.

    Args:
        compression: averages the gradients.
        transports: the process groups of its lanes; they are destroyed when the compression closes.
    """

    def __init__(self, compression: Compression, transports: Sequence[TorchCollective]) -> None:
        super().__init__(compression)
        self._workers = Workers(len(compression.lanes.all))
        compression.closing.callback(lambda: self._close(transports))

    def _close(self, transports: Sequence[TorchCollective]) -> None:
        # otherwise a rank left in the middle of a step, and the exit ends what still waits
        if self._workers.idle:
            for transport in transports:
                transport.close()

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Replace a bucket's gradients by their mean, in the order of DistributedDataParallel."""
        buffer, gradients = bucket.buffer(), bucket.gradients()
        names, future = bucket_of(self._compression, bucket.parameters()), Future[Tensor]()
        self._workers.submit(
            lambda started: self._compression.reduce(names, gradients, started), lambda: future.set_result(buffer)
        )
        # a future would turn errors into strings, so they are raised at the end of backward
        if torch._C._current_graph_task_id() == -1:  # after backward, where Lightning averages a static_graph
            self._wait()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        return future

    def _wait(self) -> None:
        start = time.perf_counter()
        self._workers.wait()
        self._compression.meter.waited(start)


def bucket_of(compression: Compression, parameters: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the names of parameters."""
    return tuple([compression.names[id(each)] for each in parameters])


def reduce_now(compression: Compression, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Average some gradients after all of backward's hooks have finished."""
    names = bucket_of(compression, parameters)
    if compression.device.type != "cuda":
        compression.reduce(names, gradients)
        return
    stream, current = side_stream(compression.device), torch.cuda.current_stream(compression.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        compression.reduce(names, gradients)
    for gradient in gradients:
        gradient.record_stream(stream)
    current.wait_stream(stream)


def register(
    compression: Compression,
    ddp: DistributedDataParallel,
    transports: Sequence[TorchCollective] = (),
    on_cpu: Callable[..., ThreadHook] = ThreadHook,
) -> None:
    """Let ``compression`` average for ``ddp`` until the model is deleted.

    Args:
        compression: averages.
        ddp: the model.
        transports: see ``ThreadHook``.
        on_cpu: the hook for the CPU.
    """
    compression.active = True
    hook = StreamHook(compression) if compression.device.type == "cuda" else on_cpu(compression, transports)
    compression.closing.callback(ddp.register_forward_pre_hook(hook.before_forward).remove)
    ddp.register_comm_hook(None, hook.reduce)


def count_only(compression: Compression, ddp: DistributedDataParallel, ranks: int) -> Callable[[], None]:
    """Let ``ddp`` average by itself while ``compression`` counts its bytes; return a function that stops counting."""
    parameters = [parameter for _, parameter in checks.trained_parameters(ddp.module, ddp.parameters_to_ignore)]
    sent = all_reduce_bytes(sum(parameter.nbytes for parameter in parameters), ranks)
    model, counting = weakref.ref(ddp), weakref.ref(compression)  # a cycle through a parameter's hook is never freed
    last = -1

    def count(_: Tensor) -> None:
        """Count the bytes at the first gradient of each backward pass that synchronises."""
        nonlocal last
        task, ddp, compression = torch._C._current_graph_task_id(), model(), counting()
        if task != last and ddp and compression and ddp.require_backward_grad_sync:
            last = task
            compression.count(sent, sent)

    all_used = not (ddp.find_unused_parameters or ddp.static_graph)
    watched = parameters[-1:] if all_used else parameters
    handles = [parameter.register_post_accumulate_grad_hook(count) for parameter in watched]

    def end() -> None:
        for handle in handles:
            handle.remove()

    compression.closing.callback(end)
    return end
