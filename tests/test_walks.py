"""Through how many files a gradient goes, and a setting: all that is entered counts, kernels and helpers too."""

import ast
import sys
import threading
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_compress
from lightning_compress.collectives import run_threads
from lightning_compress.engine import optimizers
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import ThreadHook
from lightning_compress.settings.options import Options
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.run_state import RunState

PACKAGE = str(Path(lightning_compress.__file__).parent) + "/"
ROOT = Path(__file__).parents[1]


def moves(work):
    """(from which file, to which) of each call from one of our files into another, on this thread and new ones."""
    found = []

    def ours(frame):
        name = frame.f_code.co_filename
        return name.removeprefix(PACKAGE) if name.startswith(PACKAGE) else None

    def watch(frame, event, _):
        here, above = ours(frame) if event == "call" else None, frame.f_back
        while here and above and not ours(above):
            above = above.f_back
        if here and here != (above and ours(above)):
            found.append((above and ours(above), here))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


class Bucket:
    """Of DistributedDataParallel: one matrix."""

    def __init__(self, module):
        self._parameters = list(module.parameters())
        self._buffer = torch.randn(64 * 64)

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters

    def gradients(self):
        return [self._buffer.view(64, 64)]


def walk_of_a_step(compressor, exchange, ranks):
    """The moves on rank 0 in a step from the hook to the commit, and back."""
    together = threading.Barrier(ranks)
    for left in list(optimizers._listeners):  # by earlier tests; they are told of every step in this process
        optimizers.unwatch(left)

    def rank(collective):
        torch.manual_seed(collective.rank)
        module = nn.Linear(64, 64, bias=False)
        compression = Compression(trained(module), RunState.of(compressor, exchange), collective, unused=False)
        hook, optimizer = ThreadHook(compression, []), torch.optim.SGD(module.parameters(), 0.1)
        loss = torch.ones(1, requires_grad=True)
        bucket = Bucket(module)  # whose memory stays where it is, as DistributedDataParallel's does
        loss.register_hook(lambda _: hook.reduce(None, bucket) and None)

        def step():
            compression.before_backward()
            loss.sum().backward()  # at whose end the hook waits
            module.weight.grad = torch.zeros(64, 64)
            optimizer.step()

        for _ in range(2):  # plans are made, and passes counted
            step()
        if collective.rank:
            optimizers.unwatch(compression)  # of another process
        else:
            hook._workers = type(hook._workers)(1)  # whose thread begins while somebody watches
        together.wait()
        found = step() if collective.rank else moves(step)
        compression.close()
        return found

    return run_threads(ranks, rank)[0]


@pytest.mark.parametrize(
    ("compressor", "exchange", "ranks", "files", "most"),
    [("topk", "all_gather", 2, 18, 48), ("rotated", "all_gather", 2, 18, 51), ("onebit", "two_shot", 4, 20, 73)],
)
def test_a_gradient(compressor, exchange, ranks, files, most):
    found = walk_of_a_step(compressor, exchange, ranks)
    entered = sorted({here for _, here in found})
    assert len(entered) <= files, entered
    assert len(found) <= most


@cache
def names():
    """By file of the package, without contrib and kernels: names in it, and texts."""
    found = {}
    for path in Path(PACKAGE).rglob("*.py"):
        if "contrib" in path.parts or path.stem.endswith(("_numba", "_triton")):
            continue
        nodes = ast.walk(ast.parse(path.read_text()))
        own = (getattr(node, each, None) for node in nodes for each in ("id", "attr", "arg", "name", "value"))
        found[str(path.relative_to(PACKAGE))] = {each for each in own if isinstance(each, str)}
    return found


def naming(words):
    """Files in which one of the words is a name or a text."""
    return sorted(path for path, found in names().items() if not words.isdisjoint(found))


SHARED = {"compressor", "exchange", "rules", "schedule", "error_feedback", "seed", "delay"}
"""Settings that are words of the field, too: what they say is an idea of its own, with files of its own."""


@pytest.mark.parametrize("setting", [each.name for each in fields(Options) if each.name not in SHARED])
def test_a_setting(setting):
    """Both strategies that take it, local steps, what was chosen, the line that says so, and what it is for."""
    assert len(naming({setting})) <= {"on_nonfinite": 8, "min_numel": 8}.get(setting, 6)


USED = {
    "Rotated": 4,
    "QSGD": 4,
    "BF16": 6,
    "OneBit": 4,
    "EFSign": 4,
    "TopK": 3,
    "SparseLoCo": 3,
    "DGC": 3,
    "FP16": 3,
    "Rows": 6,
}
"""Methods that something else chooses, contains or advises, and the files that name them."""


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name not in ("auto", "none")])
def test_a_method(name):
    """Its own file, and the one that imports it; beside the package its row and its YAML."""
    kind = COMPRESSORS[name].__name__
    if "contrib" not in COMPRESSORS[name].__module__:
        assert len(naming({kind})) <= USED.get(kind, 2), naming({kind})
    assert (ROOT / f"conf/compressor/{name}.yaml").exists()
