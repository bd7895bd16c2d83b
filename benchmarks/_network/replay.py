"""Steps played again: real messages over real links, but where a trace says that a rank computed, it sleeps.

Everything is slowed by one factor, the links too, so that few cores stand for many ranks, and slow links for fast ones.
Our exchanges are played in threads beside backward, where they run, too, as if these had a core of their own. They
really encode and decode: that is quick beside the slowed time they are given, of which the rest is slept; by how much
they overran it is reported as ``late``.
"""

from __future__ import annotations

import functools
import gc
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from benchmarks._network import methods
from benchmarks._network.trace import DENSE, wrapped_collectives
from benchmarks.harness.models import MODELS, batch
from benchmarks.harness.rank import spanned
from lightning_compress import Compression
from lightning_compress.collectives import TorchCollective
from lightning_compress.engine.checks import trained
from lightning_compress.engine.hook import Workers, bucket_of
from lightning_compress.settings.run_state import RunState

WARM = 2
UNLIKE = "{}: the trace has {} collectives than there are; was it recorded with other code, or ranks?"


def play(arguments: dict[str, Any]) -> dict[str, Any]:
    """Medians of ``steps`` by method, in the trace's own time: ``ms``, ``wire_bytes``, ``late`` of ``ms``.

    Args:
        arguments: ``model``; ``traces``, by method a list over ranks; ``factor``, by which to slow down; ``steps``.
    """
    found: dict[str, Any] = {"ms": {}, "wire_bytes": {}, "late": {}}
    for name, traces in arguments["traces"].items():
        player = Player(name, arguments["model"], traces[dist.get_rank()], arguments["factor"])
        times, sent = [], []
        with player:
            for number in range(WARM + arguments["steps"]):
                player.prepare()
                with spanned() as span:
                    player.step(number)
                times.append(span.seconds / arguments["factor"])
                sent.append(span.sent)
        found["ms"][name] = 1e3 * statistics.median(times[WARM:])
        found["wire_bytes"][name] = statistics.median(sent[WARM:])
        found["late"][name] = player.late / sum(times) / arguments["factor"]
        del player
        gc.collect()
    return found


class Player(ExitStack):
    """One method's steps on this rank.

    Args:
        name: of the method.
        model: its name.
        trace: of this rank.
        factor: by which everything is slower than it was taken down.

    Attributes:
        late: seconds by which computing took longer than it was given.
    """

    def __init__(self, name: str, model: str, trace: dict[str, Any], factor: float) -> None:
        super().__init__()
        self._name = name
        self._steps = trace["steps"]
        self._factor = factor
        self.late = 0.0
        torch.manual_seed(0)
        module = MODELS[model][0]()
        module(batch(model, dist.get_rank())).square().mean().backward()
        known = dict(module.named_parameters())
        self._buckets = [[known[each] for each in names] for names in trace["buckets"]]
        self._sources = [torch.cat([_gradient(each) for each in bucket]) for bucket in self._buckets]
        if dtype := DENSE.get(name):
            self._sources = [each.to(dtype) for each in self._sources]
        self._buffers = [each.clone() for each in self._sources]
        self._gradients = [_views(*each) for each in zip(self._buffers, self._buckets, strict=True)]
        self._optimizer = methods.optimizer(module)
        self._optimizer.zero_grad()
        self._here = threading.local()  # of a thread, the chunks that are left, and when the present one began
        self._waits: list[Callable[[], object]] = []
        self._workers: Workers | None = None  # of ours
        given = methods.settings(name)
        if given is not None:
            beside = TorchCollective().apart()
            self.callback(beside.close)
            state = RunState.of(**given)
            self._compression = Compression(trained(module), state, TorchCollective(), unused=False, beside=[beside])
            self._compression.active = True
            self._compression.stepped_by([self._optimizer])
            self.callback(self._compression.close)
            self.enter_context(wrapped_collectives(self._paced))
            average = self._compression._average
            self.enter_context(mock.patch.object(self._compression, "_average", self._last_chunk(average)))
            self._workers = Workers(len(self._compression.lanes.all))

    def prepare(self) -> None:
        """The gradients of a step, which averaging replaces."""
        for source, buffer in zip(self._sources, self._buffers, strict=True):
            buffer.copy_(source)

    def step(self, number: int) -> None:
        """Play one of the steps that were taken down."""
        step = self._steps[number % len(self._steps)]
        self._sleep(step["forward"])
        for place, (gap, chunks) in enumerate(zip(step["gaps"], step["chunks"], strict=True)):
            self._sleep(gap)
            self._average(place, chunks)
        for wait in self._waits:
            wait()
        self._waits.clear()
        if self._workers:
            self._workers.wait()
        self._sleep(step["tail"])
        start = time.perf_counter()
        self._optimizer.step()  # of no gradients: it is there to say that a step was made
        self._fill(start, step["optimizer"])

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds * self._factor)

    def _fill(self, start: float, seconds: float) -> None:
        """Sleep until it is so many of the trace's seconds after ``start``."""
        left = start + seconds * self._factor - time.perf_counter()
        self.late += max(0.0, -left)
        time.sleep(max(0.0, left))

    def _average(self, place: int, chunks: list[float]) -> None:
        if self._name == "no communication":
            return
        if self._workers is None:
            self._sleep(chunks[0])
            future = dist.all_reduce(self._buffers[place], async_op=True).get_future()

            def finish(reduced: Future[Any], seconds: float = chunks[1]) -> Tensor:
                self._sleep(seconds)
                return self._buffers[place]

            self._waits.append(future.then(finish).wait)
        else:
            self._workers.submit(lambda started: self._reduce(place, chunks, started), lambda: None)

    def _reduce(self, place: int, chunks: list[float], started: Callable[[], object]) -> None:
        self._here.chunks = deque(chunks)
        self._compression.reduce(bucket_of(self._compression, self._buckets[place]), self._gradients[place], started)
        if self._here.chunks:
            raise RuntimeError(UNLIKE.format(self._name, "more"))

    def _last_chunk(self, average: Callable[..., None]) -> Callable[..., None]:
        def paced(*arguments: Any) -> None:
            self._here.since = time.perf_counter()
            average(*arguments)
            self._fill(self._here.since, self._next())

        return paced

    def _paced(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def paced(*arguments: Any) -> Any:
            self._fill(self._here.since, self._next())
            found = collective(*arguments)
            self._here.since = time.perf_counter()
            return found

        return paced

    def _next(self) -> float:
        chunks: deque[float] = self._here.chunks
        if not chunks:
            raise RuntimeError(UNLIKE.format(self._name, "fewer"))
        return chunks.popleft()


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.view(-1)


def _views(buffer: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    parts = buffer.split([each.numel() for each in bucket])
    return [part.view_as(each) for part, each in zip(parts, bucket, strict=True)]
