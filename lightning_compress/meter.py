"""What a step cost: bytes always, time and error on the steps that are sampled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SPANS = ("encode", "exchange", "decode")


class Meter:
    """Counters of one rank.

    Attributes:
        sampling: measure time and error from now on; bytes are counted always.
        steps: steps that ended.
        bytes_sent: bytes that this rank handed to the transport, over all steps.
        bytes_dense: bytes that stock DDP would have sent, over all steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sampling = False
        self.steps = 0
        self.bytes_sent = 0
        self.bytes_dense = 0
        self._started = (0, 0)
        self._last = (0, 0)
        self._spans: list[tuple[str, object, object]] = []
        self._error: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what happens inside, on sampled steps."""
        if not self.sampling:
            yield
            return
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def _now(self) -> object:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_error(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Note the norms of a vector before it was encoded and of what stayed behind."""
        self._error.append((before, after))

    def end_step(self) -> None:
        """Close the books of one step."""
        self.steps += 1
        self._last = (self.bytes_sent - self._started[0], self.bytes_dense - self._started[1])
        self._started = (self.bytes_sent, self.bytes_dense)

    def begin_sampling(self) -> None:
        """Measure the steps from here until the next ``read``."""
        self.sampling = True
        self._spans.clear()
        self._error.clear()

    def read(self) -> dict[str, float]:
        """The last step's figures and the totals; ends the sampling and waits for the device if it was on."""
        figures = {
            "bytes_sent": float(self._last[0]),
            "bytes_dense": float(self._last[1]),
            "ratio": self._last[1] / self._last[0] if self._last[0] else 1.0,
            "steps": float(self.steps),
            "total_bytes_sent": float(self.bytes_sent),
            "total_bytes_dense": float(self.bytes_dense),
        }
        if self.sampling:
            figures |= self._sampled()
            self.sampling = False
        return figures

    def _sampled(self) -> dict[str, float]:
        milliseconds = dict.fromkeys(SPANS, 0.0)
        for name, start, end in self._spans:
            milliseconds[name] += _elapsed_ms(start, end)
        before = sum(float(b) ** 2 for b, _ in self._error) ** 0.5
        after = sum(float(a) ** 2 for _, a in self._error) ** 0.5
        figures = {f"{name}_ms": value for name, value in milliseconds.items()}
        figures["relative_error"] = after / before if before else 0.0
        return figures


def _elapsed_ms(start: object, end: object) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end))
