"""Speed of one codec on a GPU: with its kernels and with tensor operations, against a copy of a vector."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._codecs import CASES, plan_of
from benchmarks._gpu.isolated import Row, Task, breaks_device, said
from benchmarks._gpu.memory import allocated, counted, give_back, peak_of
from benchmarks._timing import Work, take_turns
from lightning_compress import kernels
from lightning_compress.codecs.codec import Plan, aligned
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Source

ORDER = ("onebit", "efsign", "qsgd", "rotated", "range_float", "topk", "topk-exact", "fft", "bf16", "dgc")
"""What is measured first, where time is short."""
WAYS = {"kernels": "auto", "torch": "torch"}
"""What ``LIGHTNING_COMPRESS_KERNELS`` is for each."""
MESSAGES = 8
"""That are decoded together: those of 8 ranks."""
CACHE = 64 << 20
"""Bytes of a GPU's cache, where it does not say."""


def measure(task: Task) -> Row:
    """Time one codec at one size.

    Args:
        task: ``codec``, a name of ``CASES``; ``numel``; ``device``; ``rounds`` and ``seconds`` at most.

    Returns:
        the task, ``sets`` of inputs that take turns, ``copy_ms`` and ``copy_gbs``; by way (``WAYS``): the class of the
        plan, ``scratch`` in bytes per element at the most, and of ``encode_sum``, ``send``, ``decode`` and
        ``decode_8``: milliseconds (median), GB/s, the share of the bandwidth of a copy, and how it was timed; or an
        ``error``. ``fatal`` if the device does nothing more for this process.
    """
    device = torch.device(task["device"])
    bench = _Bench(task["codec"], task["numel"], device)
    row: Row = {**task, "sets": bench.count}
    copy = Work(bench.copies(), bench.refill, device)
    works: dict[tuple[str, str], Work] = {}
    for way in WAYS:
        with kernels.using(WAYS[way]):  # what was chosen stays chosen, in the plan
            row[way] = bench.prepare(way, works)
        if any(breaks_device(RuntimeError(said)) for said in _errors(row[way])):
            return {**row, "fatal": True}
    take_turns([copy, *works.values()], task["rounds"], task["seconds"])
    row["copy_ms"] = statistics.median(copy.ms)
    row["copy_gbs"] = 8e-6 * bench.numel / row["copy_ms"]
    for (way, name), work in works.items():
        row[way][name] = _figures(work, bench.moved(name, row[way]["message_bytes"]), row["copy_gbs"])
    return row


def sets_of(numel: int, device: torch.device) -> int:
    """How many inputs have to take turns so that none is in the cache when its turn comes."""
    if device.type != "cuda":
        return 2
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", CACHE)
    return min(16, -(-cache // numel))  # vectors of 4 bytes, four times the cache


class _Bench:
    """Inputs of one size, N(0, 1), and what is done with them."""

    def __init__(self, codec: str, numel: int, device: torch.device) -> None:
        give_back(device)
        self.case, self.numel, self._device = CASES[codec], numel, device
        # of its own: a capture that fails leaves the device's generator in a graph
        self._random = torch.Generator(device).manual_seed(1)
        self.count = sets_of(numel, device)
        make = partial(torch.empty, self.count, numel, device=device)
        self.gradients, self.residuals, self.vectors, self.outs = make(), make(), make(), make()
        self.messages, self._used = torch.empty(0, 0, 0), 0
        self.refill()

    def refill(self) -> None:
        """Draw everything anew, in the order in which it is used."""
        for rows in (self.gradients, self.residuals, self.vectors, self.outs):
            rows.normal_(generator=self._random)

    def copies(self) -> list[Callable[[], object]]:
        """As many bytes read and written, by a kernel: in a graph ``copy_`` is the copy engine's, which is slower."""
        return [partial(torch.neg, vector, out=out) for out, vector in zip(self.outs, self.vectors, strict=True)]

    def prepare(self, way: str, works: dict[tuple[str, str], Work]) -> Row:
        """Make a plan, and ready what can be timed of it; says what it is and takes."""
        give_back(self._device)
        before = allocated(self._device)
        try:
            plan = plan_of(self.case, Layout.of([("weight", (self.numel,))]), self._device)
            already = counted(self.messages)
            used = self._encode_all(plan)
            held = allocated(self._device) - before - (counted(self.messages) - already)
        except Exception as error:
            return {"error": said(error)}
        found: Row = {"plan": type(plan).__name__, "message_bytes": used, "bits": 8 * used / self.numel}
        peak = 0
        for name, calls in self._calls(plan, used).items():
            try:
                peak = max(peak, peak_of(calls[0], self._device))
                works[way, name] = Work(calls, self._refill_for(name), self._device)
            except Exception as error:
                found[name] = {"error": said(error)}
        return {**found, "scratch": (held + peak) / self.numel}

    def _encode_all(self, plan: Plan) -> int:
        """Write the messages that will be decoded, once, and a copy for each set; returns the bytes of the longest."""
        plan.share(1)
        if not self.messages.numel():
            size = aligned(plan.message_size)
            messages = torch.zeros(self.count, MESSAGES + 1, size, dtype=torch.uint8, device=self._device)
            for key, message in enumerate(messages[0, 1:]):
                plan.encode(self.vectors[0].normal_(), message[: plan.message_size], key)
                self._used = max(self._used, plan.used)
            messages[1:] = messages[0]
            self.messages = messages
        return self._used

    def _calls(self, plan: Plan, used: int) -> dict[str, list[Callable[[], object]]]:
        size = plan.message_size

        def encode_sum(gradient: Tensor, residual: Tensor, vector: Tensor, messages: Tensor) -> None:
            plan.share(1)
            plan.encode_from(Source(gradient, residual), vector, messages[0, :size], 1)

        def send(vector: Tensor, messages: Tensor) -> None:
            plan.share(1)
            plan.encode_from(Source(vector), None, messages[0, :size], 1)

        def decode(messages: Tensor, out: Tensor, ranks: int) -> None:
            plan.decode(messages[1 : 1 + ranks, :used], out, 1 / ranks, True)  # the first one is what others write

        rows = list(zip(self.gradients, self.residuals, self.vectors, self.outs, self.messages, strict=True))
        return {
            "encode_sum": [partial(encode_sum, g, r, vector, messages) for g, r, vector, _, messages in rows],
            "send": [partial(send, vector, messages) for _, _, vector, _, messages in rows],
            "decode": [partial(decode, messages, out, 1) for *_, out, messages in rows],
            "decode_8": [partial(decode, messages, out, MESSAGES) for *_, out, messages in rows],
        }

    def _refill_for(self, name: str) -> Callable[[], object]:
        if name.startswith("decode"):
            return self.outs.normal_
        if name == "send":
            return self.vectors.normal_
        return lambda: (self.gradients.normal_(), self.residuals.normal_())

    def moved(self, name: str, message: int) -> int:
        """Bytes that must be read and written: gradient, residual, what stays, messages; or the sum, and messages."""
        each, messages = {"encode_sum": (12, 1), "send": (4, 1), "decode": (8, 1), "decode_8": (8, MESSAGES)}[name]
        return each * self.numel + messages * message


def _figures(work: Work, moved: int, copy_gbs: float) -> dict[str, Any]:
    ms = statistics.median(work.ms)
    speed = 1e-6 * moved / ms
    figures = {"ms": ms, "least_ms": min(work.ms), "gbs": speed, "share": speed / copy_gbs, "how": work.how}
    return figures | ({"why": work.why} if work.why else {})


def _errors(way: Row) -> Iterator[str]:
    for each in (way, *way.values()):
        if isinstance(each, dict) and "error" in each:
            yield each["error"]
