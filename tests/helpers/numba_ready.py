"""Imported by the server of forks: what Numba does once in each process, two thirds of a second, is then done.

Of processes that need the same kernel at the same time, one compiles it, and the others load it from Numba's cache.
"""

import fcntl
import threading
from functools import wraps

from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

_thread, _inside = threading.Lock(), threading.local()


def _one_at_a_time(compile_one):
    @wraps(compile_one)
    def compile_or_load(self, signature):
        if getattr(_inside, "kernel", False):  # a kernel's own kernels
            return compile_one(self, signature)
        with _thread, open(__file__) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _inside.kernel = True
            try:
                return compile_one(self, signature)
            finally:
                _inside.kernel = False
                fcntl.flock(file, fcntl.LOCK_UN)  # a fork may have the file, too

    return compile_or_load


Dispatcher.compile = _one_at_a_time(Dispatcher.compile)
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
