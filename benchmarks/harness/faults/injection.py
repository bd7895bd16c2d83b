"""Faults, brought about from outside: the package knows nothing of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from benchmarks.harness.faults.training import Job
from lightning_compress.collectives import TorchCollective
from lightning_compress.engine.group import Group

FILLER = "filler"
"""Name of the file that fills a disk."""


class Injected(ArithmeticError):  # noqa: N818
    """An error that was asked for."""


class Fault(pl.Callback):
    """Strikes the victim in one step; the other ranks have it too, and do nothing but note the moment of an error.

    Args:
        job: says which, whom and when.
        rank: of this process.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.step = -1
        self.calls = 0
        self.random = random.Random(f"{job.fault} {job.method} {job.seed}")
        INJECTIONS[job.fault](self)

    @property
    def due(self) -> bool:
        """This is the step, and this rank the victim."""
        return self.step == self.job.at and self.rank == self.job.victim

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Remember the step, counted from 0."""
        self.step = trainer.global_step

    def note(self) -> None:
        """Write down that it happens now."""
        Path(self.job.folder, "fault.json").write_text(json.dumps({"at": time.monotonic()}))

    def kill(self) -> None:
        """End this process as the kernel would."""
        self.note()
        os.kill(os.getpid(), signal.SIGKILL)

    def soon(self, act: Callable[[], object], within: float) -> None:
        """Do it at some moment of the next seconds, whatever the main thread does then."""

        def later() -> None:
            time.sleep(self.random.uniform(0, within))
            act()

        threading.Thread(target=later, daemon=True).start()

    def turn(self) -> int:
        """How often this was asked in the step at hand, before."""
        self.calls += 1
        return self.calls - 1


def forward(fault: Fault) -> None:
    """Die in the forward pass."""

    def strike(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        fault.step = trainer.global_step
        if fault.due:
            module.register_forward_pre_hook(lambda *_: fault.kill())

    fault.on_train_batch_start = strike  # type: ignore[method-assign]


def around_groups(act: Callable[[Fault], object]) -> Callable[[Fault], None]:
    """Strike when the second group of the step is about to be averaged, in DDP's hook."""

    def install(fault: Fault) -> None:
        inner = Group.reduce

        def reduce(self: Group, *arguments: Any) -> Any:
            if fault.due and fault.turn() == 1:
                act(fault)
            return inner(self, *arguments)

        Group.reduce = reduce  # type: ignore[method-assign, assignment]

    return install


def stop(fault: Fault) -> None:
    """Be stopped, as by a debugger or a machine that sleeps."""
    fault.note()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.05)  # another thread may take the signal, a moment later


def fail(fault: Fault) -> None:
    """Raise."""
    fault.note()
    raise Injected("the codec failed, as it was asked to")


def around_collectives(during: bool) -> Callable[[Fault], None]:
    """Die after the first collective of the step, before the next; or while it sends, when the others come late."""

    def install(fault: Fault) -> None:
        for name in ("all_reduce", "all_gather", "all_to_all"):
            inner = getattr(TorchCollective, name)

            def call(self: TorchCollective, *tensors: Any, inner: Callable[..., None] = inner) -> None:
                first = fault.step == fault.job.at and fault.turn() == 0
                if during and first and fault.due:
                    fault.soon(fault.kill, within=0.01)
                elif during and first:
                    time.sleep(0.02)
                inner(self, *tensors)
                if first and fault.due:
                    time.sleep(60) if during else fault.kill()

            setattr(TorchCollective, name, call)

    return install


def while_writing(ending: str) -> Callable[[Fault], None]:
    """Die when half of a file is written; of the two checkpoints that are saved in turn, the first or the last."""

    def install(fault: Fault) -> None:
        inner = LocalFileOpener.write

        def write(self: LocalFileOpener, data: bytes) -> Any:
            if fault.due and self.path.endswith(ending) and fault.turn() == fault.job.seed % 2:
                inner(self, data[: len(data) // 2])
                self.flush()
                fault.kill()
            return inner(self, data)

        LocalFileOpener.write = write

    return install


def after_writing(ending: str) -> Callable[[Fault], None]:
    """Die when a file has just been written."""

    def install(fault: Fault) -> None:
        inner = TorchCheckpointIO.save_checkpoint

        def save(self: TorchCheckpointIO, content: Any, path: Any, storage_options: Any = None) -> None:
            inner(self, content, path, storage_options)
            if fault.due and str(path).endswith(ending) and fault.turn() == fault.job.seed % 2:
                fault.kill()

        TorchCheckpointIO.save_checkpoint = save  # type: ignore[method-assign, assignment]

    return install


def disk_full(fault: Fault) -> None:
    """Let somebody else fill the disk up to a few kilobytes, before one of the two checkpoints is saved."""
    inner = TorchCheckpointIO.save_checkpoint

    def save(self: TorchCheckpointIO, content: Any, path: Any, storage_options: Any = None) -> None:
        if fault.due and str(path).endswith(".pt") and fault.turn() == fault.job.seed % 2:
            fault.note()
            left = os.statvfs(fault.job.checkpoints)
            free = left.f_bavail * left.f_frsize - fault.random.choice([0, 20_000, 120_000])
            with contextlib.suppress(OSError):
                Path(fault.job.checkpoints, FILLER).write_bytes(bytes(max(free, 0)))
        inner(self, content, path, storage_options)

    TorchCheckpointIO.save_checkpoint = save  # type: ignore[method-assign, assignment]


def signalled(number: int, everybody: bool) -> Callable[[Fault], None]:
    """A signal at some moment of the step, to one rank or to the group of all processes."""

    def install(fault: Fault) -> None:
        def send() -> None:
            fault.note()
            os.killpg(os.getpgid(0), number) if everybody else os.kill(os.getpid(), number)

        def strike(trainer: pl.Trainer, *_: Any) -> None:
            fault.step = trainer.global_step
            if fault.due:
                fault.soon(send, within=0.02)

        def linger(*_: Any) -> None:
            if fault.due:  # the last moment is the end of the step
                time.sleep(0.03)

        fault.on_train_batch_start = strike  # type: ignore[method-assign]
        fault.on_train_batch_end = linger  # type: ignore[method-assign, assignment]

    return install


def saving(job: Job) -> list[pl.Callback]:
    """What saves a checkpoint in answer to the error, where the fault has one."""
    return [OnExceptionCheckpoint(job.checkpoints)] if job.fault.endswith("a save") else []


def nothing(fault: Fault) -> None:
    """It happened before this run, to its files."""


INJECTIONS: dict[str, Callable[[Fault], None]] = {
    "killed in forward": forward,
    "killed in the hook": around_groups(Fault.kill),
    "killed between two collectives": around_collectives(during=False),
    "killed while sending": around_collectives(during=True),
    "killed while writing its part": while_writing(".pt"),
    "killed after writing its part": after_writing(".pt"),
    "killed while writing the checkpoint": while_writing(".ckpt"),
    "killed after writing the checkpoint": after_writing(".ckpt"),
    "stopped": around_groups(stop),
    "error in the hook": around_groups(fail),
    "error in the hook and a save": around_groups(fail),
    "disk full": disk_full,
    "Ctrl-C": signalled(signal.SIGINT, everybody=True),
    "SIGINT to one rank": signalled(signal.SIGINT, everybody=False),
    "SIGTERM": signalled(signal.SIGTERM, everybody=True),
    "SIGTERM to one rank": signalled(signal.SIGTERM, everybody=False),
    "part flipped": nothing,
    "part cut off": nothing,
    "part missing": nothing,
}
