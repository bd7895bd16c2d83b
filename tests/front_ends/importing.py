"""Statements that each run first of all: ``python importing.py STATEMENT ...`` prints the error of each as JSON.

Each runs in a fork of a process that has imported what Lightning needs, and nothing of Lightning: it takes no seconds.
"""

import gc
import json
import os
import sys
import traceback
from importlib import import_module

FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_compress")


def told(statement):
    """What a statement prints or raises in a fork."""
    reading, writing = os.pipe()
    if not os.fork():
        os.dup2(writing, 1)
        try:
            exec(statement, {"__name__": "told"})
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with open(reading) as said:
        text = said.read()
    os.wait()
    return text


def preload():
    """Import all that Lightning imports, but not Lightning."""
    import torchmetrics  # noqa: F401

    needed = told("import sys, lightning, pytorch_lightning\nprint(*sys.modules)").split()
    for name in needed:
        if name.split(".")[0] not in FRAMEWORKS and name != "__main__":
            import_module(name)


if __name__ == "__main__":
    gc.disable()  # imports make much and leave little behind, and a collection in a fork would copy its memory
    preload()
    assert not {*FRAMEWORKS} & {*sys.modules}
    print(json.dumps({statement: told(statement) for statement in sys.argv[1:]}))
