"""What a step cost: bytes always, time and error on the steps that are sampled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

SPANS = ("encode", "exchange", "decode")


@dataclass
class _Sample:
    """Raw measurements of one step; on CUDA they are read only on request."""

    spans: list[tuple[str, object, object]] = field(default_factory=list)
    errors: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Meter:
    """Counters of one rank.

    Attributes:
        sample_every: time and error are measured on each so-manieth step, and on the first; 0: on none.
        sampling: they are measured now.
        steps: steps that ended.
        sampled: how many they were when the last one that was measured ended.
        bytes_sent: bytes that this rank handed to the transport, over all steps.
        bytes_dense: bytes that stock DDP would have sent, over all steps.
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
        self._sample = _Sample()

    def follow(self, before: Meter) -> None:
        """Count on from where another one of this run is."""
        self.sample_every, self.steps, self.sampled = before.sample_every, before.steps, before.sampled
        self.bytes_sent, self.bytes_dense = before.bytes_sent, before.bytes_dense
        self._last, self._sample = before._last, before._sample

    def begin_step(self) -> None:
        """Open the books of a step."""
        due = self.steps == 0 or (self.steps + 1) % self.sample_every == 0 if self.sample_every else False
        self.sampling = due
        self._started = (self.bytes_sent, self.bytes_dense)
        if due:
            self._sample = _Sample()

    def end_step(self) -> None:
        """Close them: the step counts."""
        self.steps += 1
        self.sampled = self.steps if self.sampling else self.sampled
        self.sampling = False
        self._last = (self.bytes_sent - self._started[0], self.bytes_dense - self._started[1])

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what happens inside, on sampled steps."""
        if not self.sampling:
            yield
            return
        start = self._now()
        yield
        self._sample.spans.append((name, start, self._now()))

    def _now(self) -> object:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_error(self, before: Tensor, after: Tensor) -> None:
        """Note the norms of a vector before it was encoded and of what stayed behind."""
        self._sample.errors.append((before, after))

    def read(self) -> dict[str, float]:
        """Figures of the last step, of the last sampled step, and totals; waits for the device."""
        milliseconds = dict.fromkeys(SPANS, 0.0)
        for name, start, end in self._sample.spans:
            milliseconds[name] += _elapsed_ms(start, end)
        before = sum(float(norm) ** 2 for norm, _ in self._sample.errors) ** 0.5
        after = sum(float(norm) ** 2 for _, norm in self._sample.errors) ** 0.5
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
