"""The cost of a step: bytes in every step, time and error in sampled steps. Methods never report their own."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_compress.collectives.collective import Collective, Operation, Overlapping, Wait
from lightning_compress.kernels import program

SPANS = ("encode", "exchange", "decode")
WAIT = "wait"
"""What the end of a backward pass waits for averages, which nothing hides."""
KEPT = 200
"""Steps whose times are kept."""


def least_ms(device: torch.device, repeats: int, work: Callable[[], object], before: Callable[[], object]) -> float:
    """Return the shortest of ``repeats`` times of ``work``, in milliseconds; ``before`` runs before each, untimed."""
    took = []
    for _ in range(repeats):
        before()
        start = now(device)
        work()
        took.append(1e3 * (now(device) - start))
    return min(took)


def now(device: torch.device) -> float:
    """Return a clock's time in seconds, after waiting for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Span:
    """Times what happens inside the context."""

    def __init__(self, name: str, now: Callable[[], object], spans: list[tuple[str, object, object]]) -> None:
        self._name, self._now, self._spans = name, now, spans
        self._starts: list[object] = []

    def __enter__(self) -> None:
        self._starts.append(self._now())

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._name, self._starts.pop(), self._now()))


class Meter:
    """Counters of one rank.

    Attributes:
        sample_every: measure time and error in every n-th step, and in the first; 0: never.
        sampling: whether they are measured now.
        encode, exchange, decode: contexts whose time counts as that, in sampled steps.
        steps: completed steps.
        sampled: value of ``steps`` after the last sampled step.
        bytes_sent: bytes that this rank gave to the transport, over all steps.
        bytes_dense: bytes that stock DistributedDataParallel would have sent, over all steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sample_every = 50
        self.sampling = False
        self.steps = 0
        self.sampled = 0
        self.bytes_sent = 0
        self.bytes_dense = 0
        self._started = (0, 0)
        self._last = (0, 0)
        self._spans: list[tuple[str, object, object]] = []  # of the last sampled step; on CUDA, read on request only
        self._errors: list[tuple[Tensor, Tensor]] = []
        self._waiting, self._waits = 0.0, deque[float](maxlen=KEPT)
        self.encode: AbstractContextManager[None] = nullcontext()
        self.exchange: AbstractContextManager[None] = self.encode
        self.decode: AbstractContextManager[None] = self.encode

    def follow(self, before: Meter) -> None:
        """Continue the counts of another meter of this run."""
        self.sample_every, self.steps, self.sampled = before.sample_every, before.steps, before.sampled
        self.bytes_sent, self.bytes_dense = before.bytes_sent, before.bytes_dense
        self._last, self._spans, self._errors = before._last, before._spans, before._errors
        self._waits = before._waits

    def begin_step(self) -> None:
        """Begin a step, and sample it if that is due."""
        due = self.steps == 0 or (self.steps + 1) % self.sample_every == 0 if self.sample_every else False
        self.sampling = due
        self._started, self._waiting = (self.bytes_sent, self.bytes_dense), 0.0
        if due:
            self._spans, self._errors = [], []
            self.encode, self.exchange, self.decode = (_Span(name, self._now, self._spans) for name in SPANS)

    def end_step(self) -> None:
        """End the step and count it."""
        self.steps += 1
        self._waits.append(self._waiting)
        if self.sampling:
            self.sampled, self.sampling = self.steps, False
            self.encode = self.exchange = self.decode = nullcontext()
        self._last = (self.bytes_sent - self._started[0], self.bytes_dense - self._started[1])

    def _now(self) -> object:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def waited(self, since: float, until: float | None = None) -> None:
        """Record that backward's end waited for averages; on CPUs.

        Args:
            since: ``time.perf_counter()`` when it began to wait.
            until: when it ended; None: now.
        """
        ended = time.perf_counter() if until is None else until
        self._waiting += ended - since
        if self.sampling:
            self._spans.append((WAIT, since, ended))

    @property
    def median_wait_ms(self) -> float | None:
        """Median milliseconds that backward's end waited for averages, or None: not known, as on CUDA."""
        known = self._waits if self.device.type == "cpu" else ()
        return 1e3 * statistics.median(known) if known else None

    def add_error(self, before: Tensor, after: Tensor) -> None:
        """Record the norm of a vector before encoding, and the norm of what was not sent."""
        self._errors.append((before, after))

    def read(self) -> dict[str, float]:
        """Return figures of the last step and the last sampled step, and totals; waits for the device."""
        milliseconds = dict.fromkeys((*SPANS, WAIT), 0.0)
        for name, start, end in self._spans:
            milliseconds[name] += _elapsed_ms(start, end)
        before = sum(float(norm) ** 2 for norm, _ in self._errors) ** 0.5
        after = sum(float(norm) ** 2 for _, norm in self._errors) ** 0.5
        return {
            "bytes_sent": float(self._last[0]),
            "bytes_dense": float(self._last[1]),
            "ratio": self._last[1] / self._last[0] if self._last[0] else 1.0,
            **{f"{name}_ms": value for name, value in milliseconds.items()},
            "relative_error": after / before if before else 0.0,
            "steps": float(self.steps),
            "total_bytes_sent": float(self.bytes_sent),
            "total_bytes_dense": float(self.bytes_dense),
        }


def _elapsed_ms(start: object, end: object) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end))


class World(NamedTuple):
    """Where an exchange happens: the ranks, the device of their vectors, and the meter for times and bytes."""

    collective: Collective
    device: torch.device
    meter: Meter

    def among(self, collective: Collective) -> World:
        """Return the same world for other ranks."""
        return self._replace(collective=collective)


class _Begun:
    """A collective that overlaps with others; a program begins it again in each step."""

    def __init__(self, meter: Meter, size: int) -> None:
        self._meter, self._size = meter, size
        self._wait: Wait | None = None

    def begin(self, start: Callable[[], Wait]) -> None:
        self._meter.bytes_sent += self._size
        self._wait = start()

    def wait(self) -> None:
        tape = program.here.tape
        with self._meter.exchange, tape.apart() if tape else nullcontext():
            self.end()
        if tape:
            tape.add(self.end, [])

    def end(self) -> None:
        wait, self._wait = self._wait, None  # it may hold tensors
        if wait:
            wait()


class CountingCollective(Collective):
    """A collective that counts its bytes and time in a meter.

    Bytes that one of W ranks sends for a tensor of n bytes: all-reduce ``2 (W - 1) n / W``, all-gather ``(W - 1) n``,
    all-to-all the rows for other ranks, swap what it sends.
    """

    def __init__(self, inner: Collective, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self.rank = inner.rank
        self.size = inner.size

    @property
    def uncounted(self) -> Collective:
        """The collective inside."""
        return self._inner

    def _count(self, size: int, send: Callable[..., object], *arguments: Any) -> None:
        if tape := program.here.tape:
            with tape.apart():
                self._count(size, send, *arguments)
            tape.add(self._count, [size, send, *arguments])
            return
        self._meter.bytes_sent += size
        with self._meter.exchange:
            send(*arguments)

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Count a bandwidth-optimal all-reduce."""
        self._count(_BYTES["all_reduce"](tensor, self.size), self._inner.all_reduce, tensor, operation)

    def begin(self, name: Overlapping, *arguments: Any) -> Wait:
        """Count the bytes when it begins; its time is the time spent waiting for it, if it overlaps with anything."""
        if type(self._inner).begin is Collective.begin:  # it does not overlap with anything
            getattr(self, name)(*arguments)
            return _at_once
        begun = _Begun(self._meter, _BYTES[name](arguments[0], self.size))
        if not (tape := program.here.tape):
            begun.begin(partial(self._inner.begin, name, *arguments))
            return begun.wait
        with tape.apart():
            start = self._inner.prepare(name, *arguments)
            begun.begin(start)
        tape.keep(arguments)
        tape.add(begun.begin, [start])
        return begun.wait

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Count one message to every other rank."""
        self._count(_BYTES["all_gather"](tensor, self.size), self._inner.all_gather, tensor, out)

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """Count the rows for other ranks."""
        self._count(_BYTES["all_to_all"](send, self.size), self._inner.all_to_all, send, receive)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Count what is sent."""
        self._count(_BYTES["swap"](sends, self.size), self._inner.swap, sends, receives)

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """Return this rank's part, counted in the same meter."""
        return CountingCollective(self._inner.part(ranks), self._meter)


def _at_once() -> None:
    """Wait for a collective that was over when it began."""


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each of ``ranks`` ranks sends in an all-reduce of ``size`` bytes."""
    return round(2 * (ranks - 1) / ranks * size)


_BYTES: dict[str, Callable[[Any, int], int]] = {
    "all_reduce": lambda tensor, ranks: all_reduce_bytes(tensor.nbytes, ranks),
    "all_gather": lambda tensor, ranks: (ranks - 1) * tensor.nbytes,
    "all_to_all": lambda rows, ranks: (ranks - 1) * rows[0].nbytes,
    "swap": lambda sends, ranks: sum(tensor.nbytes for tensor in sends.values()),
}


def all_reduce_rounds(ranks: int) -> int:
    """Return the sequential messages of an all-reduce by recursive halving and doubling."""
    return 2 * all_gather_rounds(ranks)


def all_gather_rounds(ranks: int) -> int:
    """Return the sequential messages of an all-gather by recursive doubling."""
    return (ranks - 1).bit_length()


def all_to_all_rounds(ranks: int) -> int:
    """Return the sequential messages of an all-to-all: one to each other rank."""
    return ranks - 1
