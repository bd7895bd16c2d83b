"""What a process of its own is asked for; imports little, so that it is there at once."""

import os
import time


def do(task):
    if task["does"] == "dies":
        os._exit(3)
    if task["does"] == "breaks":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if task["does"] == "hangs":
        time.sleep(100)
    return {**task, "pid": os.getpid()}


def find(told):
    """Of a rank of a lab, which has nothing to do."""
    return {}
