"""Start a process in each rank's namespace, and wait for all, or for the first that fails."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._network.lab import Lab

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def run_ranks(lab: Lab, told: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank found.

    Args:
        lab: where they run.
        told: what ``rank.main`` is given, but for ``rank``, ``ranks``, ``master`` and ``result``.

    Raises:
        RuntimeError: a rank failed; carries what it wrote. The others are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(lab.ranks):
                processes.append(_start(lab, rank, told, Path(folder)))
            failed = _first_failed(processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
        if failed is not None:
            said = Path(folder, f"rank{failed}.log").read_text()[-3000:]
            raise RuntimeError(f"rank {failed} failed with {processes[failed].returncode}:\n{said}")
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(lab.ranks)]


def _start(lab: Lab, rank: int, told: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    own = {"rank": rank, "ranks": lab.ranks, "master": lab.address(0), "result": str(folder / f"rank{rank}.json")}
    note = folder / f"told{rank}.json"
    note.write_text(json.dumps(told | own))
    words = lab.command(rank, sys.executable, "-W", "ignore", "-m", "benchmarks._network.rank", str(note))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(
            words, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent
        )


def _die_with_parent() -> None:
    """Also where the parent is killed with what it cannot catch."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _first_failed(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all: the others of a rank that died would wait for it for as long as Gloo lets them."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(0.05)
