"""Milliseconds of work on a device: by replays of a CUDA graph where one can hold it, else by CUDA events."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

Call = Callable[[], object]
GRAPH, EVENTS, CLOCK = "graph", "events", "clock"
LEAST_ROUNDS = 3


def waits_for_device(call: Call) -> str:
    """What ``torch`` says if the call makes the host wait for the CUDA device, and where that is, else nothing.

    Raises:
        RuntimeError: the call fails for another reason.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return f"{str(error).splitlines()[0]} ({_place(error)})"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _place(error: BaseException) -> str:
    """File and line where an error began, in this repository if anything of it was there."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "lightning_compress" in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "nowhere"


class Work:
    """Calls that are timed together, one after the other, each on inputs of its own.

    They are made twice first, so that nothing is compiled or set up while they are timed. A graph then holds them,
    unless one of them waits for the device or cannot be captured: what the host does between launches costs nothing in
    it.

    Args:
        calls: what is timed.
        refill: makes the inputs anew before each timing, on the device, so that the host is ahead when it begins.
        device: where they work.

    Attributes:
        how: ``GRAPH``, ``EVENTS``, or ``CLOCK`` on a CPU.
        why: why no graph holds them.
        ms: milliseconds of one call, by timing.
    """

    def __init__(
        self, calls: Sequence[Callable[[], object]], refill: Callable[[], object], device: torch.device
    ) -> None:
        self._calls, self._refill = list(calls), refill
        self._graph: torch.cuda.CUDAGraph | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.ms: list[float] = []
        self.how, self.why = CLOCK, ""
        for _ in range(2):
            refill()
            self._launch()
        if device.type == "cuda":
            self.why = waits_for_device(self._calls[0]) or self._capture()
            self.how = EVENTS if self.why else GRAPH

    def _launch(self) -> None:
        for call in self._calls:
            call()

    def _capture(self) -> str:
        """Put the calls into a graph; returns what went wrong."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # which a capture that cannot be ended leaves behind
            return f"no graph: {str(error).splitlines()[0]}"
        graph.replay()  # the first one uploads it
        self._graph = graph
        return ""

    def run(self) -> None:
        """Time all calls once; on a GPU the figure is there after ``settle``."""
        self._refill()
        if self.how == CLOCK:
            start = time.perf_counter()
            self._launch()
            self.ms.append(1e3 * (time.perf_counter() - start) / len(self._calls))
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        if self._graph:
            self._graph.replay()
        else:
            self._launch()
        after.record()
        self._events.append((before, after))

    def settle(self) -> None:
        """Wait for the device, and read what was timed."""
        for before, after in self._events:
            after.synchronize()
            self.ms.append(before.elapsed_time(after) / len(self._calls))
        self._events.clear()


def take_turns(works: Sequence[Work], rounds: int, seconds: float) -> None:
    """Time all of them, one after the other, so many times or for so long, but ``LEAST_ROUNDS`` times."""
    end = time.monotonic() + seconds
    for number in range(rounds):
        for work in works:
            work.run()
        for work in works:
            work.settle()
        if number + 1 >= LEAST_ROUNDS and time.monotonic() > end:
            break
