"""A loopback interface that other processes of the machine do not use."""

import ctypes
import os
import shutil
import subprocess
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000


def enter(network):
    """Move this thread, and those that it starts from now on, into the namespace of a file."""
    with open(network) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"{network} cannot be entered")


@contextmanager
def separate():
    """The file of a new network namespace, its loopback up; None where the user may make none (root, Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as ours:
        if os.geteuid() != 0 or not shutil.which("ip") or libc.unshare(CLONE_NEWNET) != 0:
            yield None
            return
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            with open("/proc/thread-self/ns/net") as theirs:
                libc.setns(ours.fileno(), CLONE_NEWNET)
                yield f"/proc/{os.getpid()}/fd/{theirs.fileno()}"
        finally:
            libc.setns(ours.fileno(), CLONE_NEWNET)
