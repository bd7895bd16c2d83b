"""Tasks in a process of their own, which a broken kernel may end without ending the others."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

Task = dict[str, Any]
Row = dict[str, Any]
Function = Callable[[Task], Row]
FATAL = "fatal"
"""The key of a row after which its process is good for nothing."""


def breaks_device(error: BaseException) -> bool:
    """Whether the device does nothing more for this process: an illegal address, or a failed launch."""
    short = "out of memory" in str(error).lower()  # which frees itself
    return not short and any(each in str(error) for each in ("CUDA error", "Triton Error [CUDA]"))


def said(error: BaseException) -> str:
    """An error in a line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def run(function: Function, tasks: Sequence[Task], deadline: float, limit: float) -> Iterator[Row]:
    """The row of each task, in order: what ``function`` returns, or the task with an ``error``.

    Args:
        function: of a module, so that another process finds it; a row with ``FATAL`` asks for a new process.
        tasks: its arguments, primitives.
        deadline: by ``time.monotonic()``; what was not done by then is said not to be.
        limit: seconds that one task may take, the start of a process included.
    """
    left = list(tasks)
    while left and time.monotonic() < deadline:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_work, args=(function, left, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            for row in _rows(ours, left, deadline, limit):
                left.pop(0)
                yield row
                if row.get(FATAL):
                    break
        finally:
            process.kill()
            process.join()
            ours.close()
    yield from ({**task, "error": "not measured: out of time"} for task in left)


def _rows(connection: Connection, tasks: Sequence[Task], deadline: float, limit: float) -> Iterator[Row]:
    for task in list(tasks):
        wait = min(limit, deadline - time.monotonic())
        try:
            if connection.poll(max(0.0, wait)):
                yield connection.recv()
            else:
                yield {**task, "error": f"stopped after {max(0.0, wait):.0f} s", FATAL: True}
        except (EOFError, OSError):
            yield {**task, "error": "the process died", FATAL: True}


def _work(function: Function, tasks: Sequence[Task], connection: Connection) -> None:
    for task in tasks:
        try:
            row = function(task)
        except Exception as error:
            row = {**task, "error": said(error)} | ({FATAL: True} if breaks_device(error) else {})
        connection.send(row)
        if row.get(FATAL):
            return
