"""Start the ranks, in namespaces or side by side, and wait for all, or for the first that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing

from benchmarks.harness.lab import Lab, die_with_parent
from benchmarks.harness.rank import join, leave

KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "OMP_NUM_THREADS": "1"}
"""For glibc, which would give gradients' memory back in some runs and not in others: page faults then take up to 10 ms
of a core in a step, by chance. And a rank has one core."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def run_ranks(
    lab: Lab, told: dict[str, Any], module: str = "benchmarks._network.rank", *, heard: bool = False, each: int = 1
) -> list[dict[str, Any]]:
    """What each rank found.

    Args:
        lab: where they run.
        told: what the module's ``find`` is given, besides what ``benchmarks.harness.rank`` needs.
        module: what they run.
        heard: what rank 0 prints is shown.
        each: ranks of a namespace.

    Raises:
        RuntimeError: a rank failed; carries what it wrote. The others are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        with waited_for(Path(folder)) as processes:
            for rank in range(lab.ranks * each):
                given = told | {"rank": rank, "ranks": lab.ranks * each}
                processes.append(_start(lab, rank // each, given, Path(folder), module, heard and not rank))
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(len(processes))]


@contextmanager
def waited_for(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Wait for ranks that are started within, or for the first that fails, and end the others.

    Args:
        folder: where a rank's log is, ``rank0.log``.

    Raises:
        RuntimeError: a rank failed; carries what it wrote.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
        failed = first_failed(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    if failed is not None:
        said = Path(folder, f"rank{failed}.log").read_text()[-3000:]
        raise RuntimeError(f"rank {failed} failed with {processes[failed].returncode}:\n{said}")


def _start(
    lab: Lab, host: int, told: dict[str, Any], folder: Path, module: str, heard: bool
) -> subprocess.Popen[bytes]:
    master, rank = lab.address(0), told["rank"]
    found = {"meet": f"tcp://{master}:29500", "master": master, "result": str(folder / f"rank{rank}.json")}
    note = folder / f"told{rank}.json"
    note.write_text(json.dumps(told | found))
    words = lab.command(host, sys.executable, "-W", "ignore", "-m", "benchmarks.harness.rank", module, str(note))
    own = {"GLOO_SOCKET_IFNAME": lab.interface}
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(
            words,
            env=os.environ | KEEPING | own,
            stdout=None if heard else log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )


def first_failed(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all: the others of a rank that died would wait for it for as long as Gloo lets them."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(0.05)


def run_beside(ranks: int, work: Callable[..., Any], *given: Any, start: str = "spawn") -> list[Any]:
    """What ``work(*given)`` returns on each rank, a process of a Gloo group on this machine; as JSON keeps it.

    Args:
        ranks: how many.
        work: is called when the ranks have met.
        *given: for ``work``.
        start: "spawn"; or "fork", which spares imports, where this process has not computed with several threads, as
            forks would wait for these in vain.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the others are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = (Path(folder), ranks, work, given)
        with mock.patch.dict(os.environ, KEEPING):
            torch.multiprocessing.start_processes(_rank_beside, told, ranks, start_method=start)  # type: ignore[attr-defined, no-untyped-call]
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _rank_beside(rank: int, folder: Path, ranks: int, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    if sys.platform == "linux":
        die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    join(f"file://{folder}/store", rank, ranks)
    leave(Path(folder, f"rank{rank}.json"), work(*given))
