"""PyTorch's own tests of communication hooks, as they were installed with it."""

import ast
import copy
import importlib.util
import unittest
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # as the installed file calls it
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach

METHODS = {"_test_accumulate_gradients_no_sync", "_prepare_cpu_module", "_init_global_test"}
MODELS = {"Net", "_FC2"}


class Attaches(DistributedDataParallel):
    """Takes the settings of a compression where the installed tests register a hook."""

    def register_comm_hook(self, state, hook):
        if isinstance(hook, dict):
            self.compression = Attaches.last = attach(self, **hook)
        else:
            super().register_comm_hook(state, hook)


class Assertions(unittest.TestCase):
    """Tensors are compared as torch's test case does it, to its tolerances."""

    def assertEqual(self, actual, expected):  # noqa: N802  # unittest's name
        torch.testing.assert_close(actual, expected)

    def assertNotEqual(self, actual, expected):  # noqa: N802
        try:
            torch.testing.assert_close(actual, expected)
        except AssertionError:
            return
        raise AssertionError("both are the same")


@cache
def _source():
    """Methods and models as syntax trees."""
    package = importlib.util.find_spec("torch.testing._internal.distributed").submodule_search_locations[0]
    outer = ast.parse((Path(package) / "distributed_test.py").read_text()).body
    (tests,) = (node for node in outer if isinstance(node, ast.ClassDef) and node.name == "DistributedTest")
    (base,) = (node for node in tests.body if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase")
    methods = [node for node in base.body if isinstance(node, ast.FunctionDef) and node.name in METHODS]
    models = [node for node in outer if isinstance(node, ast.ClassDef) and node.name in MODELS]
    assert {node.name for node in methods} == METHODS
    assert {node.name for node in models} == MODELS
    return methods, models


def borrowed(**replaced):
    """An object that has the installed tests' methods, word for word.

    Their module cannot be imported beside other tests: it wants packages that torch does not bring, and changes global
    flags of torch.

    Args:
        **replaced: names that the methods see otherwise than in their module, as ``Net``.
    """
    methods, models = _source()
    seen = {"torch": torch, "nn": nn, "F": F, "dist": dist, "copy": copy, "BACKEND": "gloo"}
    seen |= {"get_world_size": dist.get_world_size, "DistributedDataParallel": Attaches}
    exec(compile(ast.Module(models, []), "distributed_test.py", "exec"), seen)
    seen |= replaced
    exec(compile(ast.Module(methods, []), "distributed_test.py", "exec"), seen)
    return type("Borrowed", (Assertions,), {name: seen[name] for name in METHODS})()
