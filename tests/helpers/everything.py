"""Imported by the process of which pytest's workers are forks: what many tests import, and compiled kernels."""

import atexit
import os
import sys
from contextlib import suppress
from importlib import import_module

import torch

from lightning_compress import kernels
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.group import Group
from lightning_compress.settings.run_state import RunState
from tests.cases import kernel_settings

CPU = torch.device("cpu")
OTHERS = ("matplotlib.pyplot", "torch._dynamo", "wandb")
"""None that brings a plugin of pytest, which each worker is to import as pytest does."""


def _compile_kernels():
    """Those of codecs: each worker would, and each of its ranks, several at the same time."""
    torch.set_num_threads(1)  # others would not be forked

    def rank(collective):
        for _, given in kernel_settings("numba"):
            for exchange in ("all_gather", "two_shot"):
                settings = RunState.of(given, exchange, min_numel=1)
                group = Group([("weight", (300, 7)), ("bias", (37,))], settings, World(collective, CPU, Meter(CPU)))
                group.reduce([torch.ones(2100), torch.ones(37)], 0, None)

    run_threads(2, rank)


def _leave_directories():
    """In a fork: leave wandb's directories to this process, or the first fork that ends would remove them."""
    artifacts, media = (sys.modules.get(f"wandb.sdk.{name}") for name in ("artifacts.artifact", "data_types._private"))
    for directory in (media and media.MEDIA_TMP, artifacts and artifacts.Artifact._TMP_DIR):
        if directory:
            directory._finalizer.detach()
            atexit.unregister(directory.cleanup)


for name in OTHERS:
    with suppress(ImportError):
        import_module(name)
os.register_at_fork(after_in_child=_leave_directories)
if kernels.compiler(CPU) is not None:
    _compile_kernels()
with open(os.devnull, "w") as nowhere:  # for what ranks say
    os.dup2(nowhere.fileno(), 1)
    os.dup2(nowhere.fileno(), 2)
