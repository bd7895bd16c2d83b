"""When a step computes and when it talks, taken down while it runs.

A trace of one method on one rank: ``buckets``, the names of the parameters in each, in DistributedDataParallel's order;
``steps``, each with seconds of ``forward``; of backward before each bucket was ready (``gaps``), and after everything
was averaged (``tail``); of the ``optimizer``; and, bucket by bucket, of what averaging computes before, between and
after its collectives (``chunks``). How long collectives take is left out: that is what a replay finds out.
"""

from __future__ import annotations

import fcntl
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks._network import methods
from benchmarks._network.hooks import nothing
from lightning_compress import Compression, attach
from lightning_compress.collectives import CountingCollective
from lightning_compress.engine.attach import BUCKET_CAP_MB

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "swap")
DENSE = {"no communication": None, "DDP": None, "PyTorch fp16": torch.float16, "PyTorch bf16": torch.bfloat16}
"""Those of PyTorch's methods that can be taken down, and the dtype they cast to; their hooks are written out here, to
look inside."""


class Turn:
    """What the ranks pass around so that one computes at a time, and is timed as if alone.

    Args:
        path: a file that is there for all; None: they all compute whenever they can.

    Attributes:
        one_by_one: there is one.
    """

    def __init__(self, path: str | None) -> None:
        self.one_by_one = path is not None
        self._file = Path(path).open("w") if path else None  # noqa: SIM115  # as long as the process

    def take(self) -> None:
        """Wait for it."""
        if self._file:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def pass_on(self) -> None:
        """Before anything is waited for that another rank does."""
        if self._file:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Recorder:
    """Takes down the steps of one method.

    Args:
        name: of the method.
        module: the model.
        turn: to compute.

    Attributes:
        model: the module, averaged by the method.
        trace: what was taken down.
    """

    def __init__(self, name: str, module: nn.Module, turn: Turn) -> None:
        self._turn = turn
        self._names = {id(parameter): each for each, parameter in module.named_parameters()}
        self._on = False
        self._here = threading.local()  # the place of the bucket that a thread averages, and when its chunk began
        self._since = self._last = 0.0
        self.trace: dict[str, Any] = {"buckets": [], "steps": []}
        given = methods.settings(name)
        cap = None if given is None else BUCKET_CAP_MB
        # broadcasting buffers would be a collective in forward
        self.model = DistributedDataParallel(module, broadcast_buffers=False, bucket_cap_mb=cap)
        self.compression: Compression | None = None
        if given is None:
            self.model.register_comm_hook(None, self._dense_hook(name))
            return
        register = self.model.register_comm_hook
        with mock.patch.object(self.model, "register_comm_hook", lambda state, hook: register(state, self._wrap(hook))):
            self.compression = attach(self.model, **given)

    def begin(self) -> None:
        """Forward begins."""
        self._turn.take()
        self._on = True
        self._step: dict[str, Any] = {"gaps": [], "chunks": []}
        self._buckets: list[list[str]] = []
        self._reduced = 0
        self._since = time.perf_counter()

    def mark(self, part: str) -> None:
        """The part of the step that ends now: forward, tail or optimizer."""
        now = time.perf_counter()
        self._step[part] = now - max(self._since, self._last)
        self._since = self._last = now

    def end(self) -> None:
        """The step has ended."""
        self._on = False
        self._turn.pass_on()
        self.trace["buckets"] = self._buckets
        self.trace["steps"].append(self._step)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the collectives of our exchanges, and when they are called for."""
        with wrapped_collectives(self._talking), mock.patch.object(Compression, "reduce", self._reducing()):
            yield

    def _ready(self, bucket: Any) -> None:
        now = time.perf_counter()
        self._step["gaps"].append(now - self._since)
        self._step["chunks"].append([])
        self._buckets.append([self._names[id(each)] for each in bucket.parameters()])

    def _wrap(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # DDP looks
            if not self._on:
                return hook(state, bucket)
            self._ready(bucket)
            future = hook(state, bucket)
            if self._turn.one_by_one:  # the hook's thread has the turn now: backward would go on beside the other ranks
                future.wait()
            self._since = time.perf_counter()
            return future

        return watched

    def _reducing(self) -> Callable[..., None]:
        reduce = Compression.reduce

        @functools.wraps(reduce)
        def watched(*arguments: Any) -> None:
            if not self._on:
                reduce(*arguments)
                return
            here = self._here
            here.place, self._reduced = self._reduced, self._reduced + 1
            here.chunk = time.perf_counter()
            reduce(*arguments)
            self._last = time.perf_counter()
            self._step["chunks"][here.place].append(self._last - here.chunk)
            del here.place

        return watched

    def _talking(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def watched(*arguments: Any) -> Any:
            here = self._here
            if not hasattr(here, "place"):  # not for an average
                return collective(*arguments)
            self._step["chunks"][here.place].append(time.perf_counter() - here.chunk)
            self._turn.pass_on()
            found = collective(*arguments)
            self._turn.take()
            here.chunk = time.perf_counter()
            return found

        return watched

    def _dense_hook(self, name: str) -> Callable[..., Any]:
        if name not in DENSE:
            raise ValueError(f"{name!r} cannot be taken down; of PyTorch's methods these can: {', '.join(DENSE)}")
        dtype = DENSE[name]

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # DDP looks
            start = time.perf_counter()
            buffer = bucket.buffer()
            if self._on:
                self._ready(bucket)
            if name == "no communication":
                self._since = time.perf_counter()
                return nothing(state, bucket)  # type: ignore[no-untyped-call]
            message = buffer.to(dtype) if dtype else buffer
            message.div_(dist.get_world_size())
            chunks = self._step["chunks"][-1] if self._on else []
            chunks.append(time.perf_counter() - start)
            future = dist.all_reduce(message, async_op=True).get_future()
            if self._on and self._turn.one_by_one:
                self._turn.pass_on()
                future.wait()
                self._turn.take()

            def finish(reduced: Future[Any]) -> Tensor:
                begin = time.perf_counter()
                if dtype:
                    buffer.copy_(message)
                self._last = time.perf_counter()
                chunks.append(self._last - begin)
                averaged: Tensor = buffer
                return averaged

            future = future.then(finish)
            self._since = time.perf_counter()
            return future

        return hook


@contextmanager
def wrapped_collectives(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have every collective that is counted be what ``wrap`` makes of it, and every wait for one, too."""
    begin = wrap(CountingCollective.begin)
    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(CountingCollective, name, wrap(getattr(CountingCollective, name))))
        patches.enter_context(mock.patch.object(CountingCollective, "begin", lambda *given: wrap(begin(*given))))
        yield


def quicker(trace: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same of one method and rank, where everything is computed ``factor`` times as fast."""

    def scaled(value: Any) -> Any:
        return [scaled(each) for each in value] if isinstance(value, list) else value / factor

    steps = [{part: scaled(value) for part, value in step.items()} for step in trace["steps"]]
    return {"buckets": trace["buckets"], "steps": steps}
