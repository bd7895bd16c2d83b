"""Training steps of one model, without compression and with each method in turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks._gpu import echo
from benchmarks._gpu.isolated import FATAL, Row, Task, breaks_device, said
from benchmarks._gpu.memory import allocated, give_back
from benchmarks._gpu.models import MODELS, SMALL, Training
from benchmarks._gpu.trace import overlap
from benchmarks._network.hooks import bf16_mean, power_sgd_state
from benchmarks._network.methods import SETS
from benchmarks._timing import waits_for_device
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.optimizers import unwatch, watch
from lightning_compress.settings.run_state import RunState

PAPERS: dict[str, dict[str, object]] = {
    name: {"name": each["compressor"]} if isinstance(each["compressor"], str) else each["compressor"]
    for name, each in SETS["papers"].items()
}
"""The compressors that the lab compares as the FFT paper did."""
METHODS: dict[str, tuple[dict[str, object], str]] = {
    "none": ({}, ""),
    **{name: ({"name": name}, "all_gather") for name in ("onebit", "rotated", "qsgd", "efsign")},
    **{f"{name} two_shot": ({"name": name}, "two_shot") for name in ("onebit", "rotated", "qsgd", "efsign")},
    "topk": ({"name": "topk"}, "all_gather"),
    "dgc": ({"name": "dgc"}, "all_gather"),
    "powersgd": ({"name": "powersgd"}, "auto"),  # reduces by itself
    "fft": ({"name": "fft"}, "all_gather"),
    **{name: (given, "all_gather") for name, given in PAPERS.items()},
    "PyTorch bf16": ({}, ""),
    "PyTorch PowerSGD 1": ({}, ""),
}
"""What is compared: compressor and exchange. "none" has no hook. PyTorch's reduce over this process alone, by its back
end."""
HOOKS: dict[str, tuple[Any, Any]] = {
    "PyTorch bf16": (lambda: None, bf16_mean),
    "PyTorch PowerSGD 1": (lambda: power_sgd_state(1), powerSGD_hook),
}
"""PyTorch's: what makes the state of each, and the hook."""
WARM = 6
"""Steps before anything is measured: buckets are rebuilt after the first, kernels compiled, memory taken."""
BLOCK = 6
"""Steps of a method in a row, of which the first is not timed."""
TRACED = 3


class Trainer:
    """A model that is trained with one method; nothing waits for the device.

    ``issued`` has for each block of steps the milliseconds that the host took to launch one of them: where a step takes
    no longer, the host is what bounds it.

    Args:
        training: the model and its data.
        name: of ``METHODS``.
        ranks: that are pretended.
        precision: "tf32", or "bf16" for autocast.
        device: where.
        bucket_mb: the most that a bucket of gradients has; None: PyTorch's 25.
    """

    def __init__(
        self,
        training: Training,
        name: str,
        ranks: int,
        precision: str,
        device: torch.device,
        bucket_mb: float | None = None,
    ) -> None:
        method, exchange = METHODS[name]
        torch.manual_seed(0)
        module = training.make().to(device)
        self._device, self._bf16 = device, precision == "bf16"
        devices = [device.index] if device.type == "cuda" else None
        self._ddp = DistributedDataParallel(module, device_ids=devices, bucket_cap_mb=bucket_mb)
        if name in HOOKS:
            make, hook = HOOKS[name]
            self._ddp.register_comm_hook(make(), hook)
        self._optimizer = optimizer = torch.optim.SGD(module.parameters(), 1e-4, momentum=0.9)
        self._compression: Compression | None = None
        if method:
            settings = RunState.of(method, exchange, schedule="none", check_drift_every=0)
            self._compression = echo.compress(self._ddp, settings, echo.EchoCollective(ranks), optimizer)
            unwatch(self._compression)
        self._batch = training.batch(device)
        self.issued: list[float] = []
        self.numel = sum(each.numel() for each in module.parameters())

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Only then it watches optimizers: those of others would cost it time, and it would cost theirs."""
        if self._compression is not None:
            watch(self._compression)
        try:
            yield
        finally:
            if self._compression is not None:
                unwatch(self._compression)

    def step(self) -> torch.Tensor:
        """Forward, backward, optimizer; returns the loss, which is not looked at."""
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            loss: torch.Tensor = self._ddp(*self._batch)
        loss.backward()
        self._optimizer.step()
        return loss

    def steps(self, count: int) -> list[float]:
        """Milliseconds of steps in a row, from the end of one to the end of the next; the one before is not timed."""
        with self.at_work():
            return self._steps(count)

    def _steps(self, count: int) -> list[float]:
        if self._device.type != "cuda":
            ends = [time.perf_counter() for _ in range(count + 1) if self.step() is not None]
            return [1e3 * (after - before) for before, after in pairwise(ends)]
        marks, begun = [], time.perf_counter()
        for _ in range(count + 1):
            self.step()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        self.issued.append(1e3 * (time.perf_counter() - begun) / (count + 1))
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) for before, after in pairwise(marks)]


def measure(task: Task) -> Row:
    """Compare methods on one model in one precision.

    Args:
        task: ``model``, ``precision``, ``methods``, ``ranks``, ``device``, ``small``, ``seconds`` for timing,
            ``setup``, seconds after which no method is made ready any more, ``bucket_mb``, see ``Trainer``, and
            ``trace``, a file or None.

    Returns:
        the task, ``numel``, and in ``measured`` a row for each: ``ms`` (median), ``blocks`` (medians of each block),
        ``host_ms`` (of the host, to launch a step),
        ``overhead`` against "none", ``bytes_per_parameter`` of memory beyond "none" at the peak of a step, ``growth``
        in bytes from the first block of steps to the last, ``waits`` (what makes a step wait for the device, or
        nothing), ``finite`` (the loss still is); or an ``error``. With a trace, ``overlap`` of its first method.
    """
    device = echo.device_of(task["device"])
    _set_up(device)
    training = (SMALL if task["small"] else MODELS)[task["model"]]
    trainers: dict[str, Trainer] = {}
    found: dict[str, Row] = {}
    row: Row = {**task, "measured": found}
    end = time.monotonic() + task["setup"]
    try:
        # libraries take memory once, which is no method's
        Trainer(training, "none", 1, task["precision"], device).steps(2)
        for name in task["methods"]:
            late = {"error": "not measured: setting up the others took too long"}
            found[name] = late if time.monotonic() > end else _begin(name, trainers, training, task, device)
            if found[name].get(FATAL):
                return row | {FATAL: True, "broken": name}
        row["numel"] = next((each.numel for each in trainers.values()), 0)
        _time(trainers, found, task["seconds"], device)
        if task["trace"] and (named := next((each for each in trainers if each != "none"), None)):
            row["overlap"] = {"method": named} | trace(trainers[named], Path(task["trace"]), device)
        for name, trainer in trainers.items():  # last of all: a backward that was broken off is not repaired
            found[name] |= _finish(trainer, device)
        _compare(found, row["numel"])
    finally:
        trainers.clear()
        gc.collect()  # a reducer that is freed after its group ends the group's thread, and may wait for it for ever
        with suppress(RuntimeError):  # of a device that is broken, which was said already
            dist.destroy_process_group()
    return row


def _set_up(device: torch.device) -> None:
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _begin(name: str, trainers: dict[str, Trainer], training: Training, task: Task, device: torch.device) -> Row:
    """Make a trainer, warm it up, and say what memory a step takes at the most, all of this trainer's included."""
    give_back(device)
    before = allocated(device)
    try:
        trainer = Trainer(training, name, task["ranks"], task["precision"], device, task["bucket_mb"])
        trainer.steps(WARM)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.steps(2)
    except Exception as error:
        return {"error": said(error)} | ({FATAL: True} if breaks_device(error) else {})
    trainers[name] = trainer
    return {"peak": torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0}


def _time(trainers: dict[str, Trainer], found: dict[str, Row], seconds: float, device: torch.device) -> None:
    """Blocks of steps in turn, in another order each time, three of each at the least."""
    names, end = list(trainers), time.monotonic() + seconds
    blocks: dict[str, list[list[float]]] = {name: [] for name in names}
    growth = dict.fromkeys(names, 0)
    while names and (len(blocks[names[-1]]) < 3 or time.monotonic() < end):
        turn = len(blocks[names[-1]]) % len(names)
        for name in names[turn:] + names[:turn]:
            before = allocated(device)
            blocks[name].append(trainers[name].steps(BLOCK))
            growth[name] += allocated(device) - before if len(blocks[name]) > 1 else 0
    for name, each in blocks.items():
        steps = [ms for block in each for ms in block]
        medians = [statistics.median(block) for block in each]
        found[name] |= {"ms": statistics.median(steps), "blocks": medians, "growth": growth[name]}
        if issued := trainers[name].issued[-len(each) :]:
            found[name]["host_ms"] = statistics.median(issued)


def trace(trainer: Trainer, path: Path, device: torch.device) -> dict[str, Any]:
    """Write a chrome trace of some steps; returns what ``overlap`` says of it."""
    cuda = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *cuda]) as profile:
        trainer.steps(TRACED - 1)
    profile.export_chrome_trace(str(path))
    return overlap(path)


def _finish(trainer: Trainer, device: torch.device) -> Row:
    with trainer.at_work():
        finite = bool(trainer.step().isfinite())
    try:
        with trainer.at_work():
            waits = waits_for_device(trainer.step) if device.type == "cuda" else ""
    except RuntimeError as error:
        waits = said(error)
    return {"finite": finite, "waits": waits}


def _compare(found: dict[str, Row], numel: int) -> None:
    none = found.get("none", {})
    for each in found.values():
        if "ms" in each and "ms" in none:
            each["overhead"] = each["ms"] / none["ms"] - 1
            each["bytes_per_parameter"] = (each["peak"] - none["peak"]) / numel
