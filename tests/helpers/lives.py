"""Ranks that live in processes of their own, from the process group to the end of the interpreter."""

import ctypes
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from benchmarks.harness.forking import forking
from tests.helpers.processes import PRELOADED


def _live(rank, size, folder, seconds, function, arguments):
    log = os.open(f"{folder}/stderr{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    from tests.helpers import link

    link.pretend()
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size))
    store, limit = f"file://{folder}/store", timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    code = 0
    try:
        function(*arguments)
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(code)  # as a script ends: multiprocessing would leave out what libraries do then


def live(size, folder, function, *arguments, seconds=60):
    """``function(*arguments)`` on ``size`` new ranks; exit codes, and what each said on stderr.

    A server that has imported everything already makes the processes, so that one costs no seconds.

    Args:
        size: number of ranks.
        folder: a new one, for the ranks to meet.
        function: of a module.
        *arguments: of it.
        seconds: after which a collective gives up.
    """
    Path(folder).mkdir(parents=True)
    ranks = [
        forking(PRELOADED).Process(target=_live, args=(rank, size, str(folder), seconds, function, arguments))
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(seconds + 180)
    hung = [rank for rank, each in enumerate(ranks) if each.exitcode is None]
    for rank in hung:
        ranks[rank].kill()
    assert not hung, f"ranks {hung} did not end"
    return [each.exitcode for each in ranks], [Path(f"{folder}/stderr{rank}").read_text() for rank in range(size)]
