"""Processes that end when the one that started them does, however that ends.

W&B's agent and impatient people kill the process they started and no other; its ranks would go on waiting for it, with
the GPU's memory. A process that starts ranks calls ``start_lineage``; whoever of them imports ``recipes`` follows. What
W&B's agent or torchrun started follows that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

__all__ = ["PARENT", "end_with", "exit_on_sigterm", "follow", "start_lineage"]

PARENT = "LIGHTNING_COMPRESS_PARENT"
"""The environment variable by which a process tells those that it starts to end with it: its process id."""
LAUNCHERS = ("WANDB_SWEEP_ID", "TORCHELASTIC_RUN_ID")
"""Set by W&B's agent and by torchrun for what they start: such a process ends with its parent, unasked."""
PR_SET_PDEATHSIG = 1
EVERY = 0.5
"""Seconds between two looks at the parent, where the kernel does not tell."""


def start_lineage() -> None:
    """Have every ``recipes`` process that is started from here end with this one."""
    os.environ[PARENT] = str(os.getpid())


def exit_on_sigterm() -> None:
    """Have SIGTERM raise SystemExit from now on, so that what was started, mounted or written is cleaned up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def follow() -> None:
    """End with the process that asked for it, or else with a launcher, and have one's own follow in turn."""
    if sys.platform == "win32":
        return  # where no signal asks whether a process is there
    parent = os.environ.get(PARENT, "")
    if parent.isdigit() and int(parent) != os.getpid():
        end_with(int(parent))
        start_lineage()
    elif not parent and any(map(os.environ.get, LAUNCHERS)):
        _watched(os.getppid())


def end_with(parent: int) -> None:
    """End this process when another one does; at once where that has ended already.

    On Linux the kernel kills it at once, where the other is its parent and nothing else was agreed since (PyTorch's
    spawn asks for an interrupt, which a rank that waits in a collective does not hear); a thread that looks every half
    second does elsewhere.

    Args:
        parent: its process id.
    """
    if sys.platform == "linux" and os.getppid() == parent:
        _ask_kernel()
    if not _alive(parent):
        os._exit(1)
    _watched(parent)


def _watched(parent: int) -> None:
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="end-with-parent").start()


def _ask_kernel() -> None:
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _watch(parent: int) -> None:
    before = os.getppid()  # changes when it ends, and the number of a process may be given again
    while _alive(parent) and os.getppid() == before:
        time.sleep(EVERY)
    os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
