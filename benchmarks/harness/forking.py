"""Processes that fork from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from typing import Any

PRELOAD = ("benchmarks.harness.faults.trial", "rich.console", "rich.table")


@cache
def forking(preload: tuple[str, ...] = PRELOAD) -> Any:
    """Processes that fork from a server which has imported everything: an import costs seconds, a fork milliseconds.

    Args:
        preload: the modules; the first call of a process decides, which has one server.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    before = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # the server must have one thread, or its forks would hang
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context
