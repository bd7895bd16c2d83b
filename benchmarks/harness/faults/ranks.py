"""Rank processes: started, watched, and none left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.harness.forking import forking


def serve(job: Any, rank: int, port: int, leader: int, outcome: str) -> None:
    """What a rank does: train, and write down how it ended."""
    from benchmarks.harness.faults import injection, training

    _join(leader)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without it
    log = os.open(f"{job.folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(job.size), NODE_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    tempfile.tempdir = job.temporary or job.checkpoints
    started = time.monotonic()
    told: dict[str, Any] = {"started": started}
    try:
        callbacks = [injection.Fault(job, rank)] if job.fault else []
        told |= training.digest(*training.fit(job, [*callbacks, *injection.saving(job)]))
    except BaseException as error:
        told |= {"at": time.monotonic(), "error": type(error).__name__, "said": f"{error}"}
        raise
    finally:
        Path(f"{outcome}.part").write_text(json.dumps(told))
        os.replace(f"{outcome}.part", outcome)


def _join(leader: int) -> None:
    """Be in the process group of rank 0, which may be about to found it."""
    for _ in range(500):
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(0, leader)
            return
        time.sleep(0.01)
    raise RuntimeError(f"there is no process group {leader}")


@dataclass
class Ended:
    """How the ranks of a job ended.

    Attributes:
        outcomes: what each rank wrote, in the order of the ranks; None if it wrote nothing.
        exits: exit codes; minus the signal that killed it.
        struck: moment of the fault, by the clock that all processes share.
        hung: ranks that had to be killed.
        orphans: processes of the group that were there afterwards.
    """

    outcomes: list[dict[str, Any] | None]
    exits: list[int | None]
    struck: float
    hung: list[int] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)


def run(job: Any, patience: float) -> Ended:
    """Start the ranks of a job and wait until they end.

    Args:
        job: a ``training.Job``.
        patience: seconds after which a rank that goes on is killed, and counted as hung.
    """
    for path in (job.checkpoints, job.temporary or job.checkpoints):
        os.makedirs(path, exist_ok=True)
    files = [f"{job.folder}/rank{rank}.json" for rank in range(job.size)]
    for file in [*files, f"{job.folder}/fault.json"]:
        Path(file).unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun, processes = time.monotonic(), list[BaseProcess]()
    for rank in range(job.size):
        leader = (processes[0].pid or 0) if processes else 0
        processes.append(forking().Process(target=serve, args=(job, rank, port, leader, files[rank])))
        processes[-1].start()
    leader = processes[0].pid or 0
    try:
        frozen = [job.victim] if job.fault == "stopped" else []
        _wait([each for rank, each in enumerate(processes) if rank not in frozen], patience)
        for rank in frozen:  # it wakes up when the others are gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank].pid or 0, signal.SIGCONT)
        _wait(processes, patience if frozen else 0.0)
        hung = [rank for rank, each in enumerate(processes) if each.is_alive()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    struck = json.loads(_read(f"{job.folder}/fault.json") or "{}").get("at", begun)
    outcomes = [json.loads(text) if (text := _read(file)) else None for file in files]
    exits = [process.exitcode for process in processes]
    return Ended(outcomes, exits, struck, hung, _members(leader))


def _wait(processes: list[BaseProcess], patience: float) -> None:
    until = time.monotonic() + patience
    while alive := [each.sentinel for each in processes if each.is_alive()]:
        if not wait(alive, max(until - time.monotonic(), 0.0)):
            return


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _members(group: int) -> list[int]:
    """Processes of a group that are not dead."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, own = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            if int(own) == group and state != "Z":
                found.append(int(folder.name))
    return found


if sys.platform == "win32":
    raise ImportError("these faults are those of POSIX")
