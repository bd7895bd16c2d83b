"""Workers of pytest-xdist as forks of a process which has imported everything; so are the ranks that they start."""

import atexit
import os
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection

from execnet import gateway_io

from benchmarks.harness.forking import forking
from tests.helpers.processes import PRELOADED


class _Forked(gateway_io.Popen2IO):
    """In place of execnet's, which starts a new Python and talks over its standard input and output."""

    def __init__(self, _, execmodel):
        context = forking(("tests.helpers.everything", *PRELOADED))
        (source, to), (back, sink) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        errors = Connection(os.dup(2))
        self._process = context.Process(target=_serve, args=(source, sink, errors))
        self._process.start()
        for theirs in (source, sink, errors):
            theirs.close()
        super().__init__(_file(to, "wb"), _file(back, "rb"), execmodel)

    def wait(self):
        self._process.join()
        return self._process.exitcode

    def kill(self):
        self._process.kill()


def fork_workers():
    """From now on, in this process, which starts them."""
    gateway_io.Popen2IOMaster = _Forked


def _file(pipe, mode):
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()), mode)


def _serve(*pipes):
    server = forkserver._forkserver
    server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running  # else another would be started
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    exec(gateway_io.popen_bootstrapline, {"__name__": "__main__"})
    atexit._run_exitfuncs()
