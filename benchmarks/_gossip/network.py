"""Steps of gossip and of what averages with all, over links of a set speed and delay; computing is a sleep.

Of methods whose ranks wait for nobody, ``averages`` is how many a rank has had part in, a step: those that it asked
for, and those that it answered. ``formula_bytes`` is what their messages are, without headers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from benchmarks._gossip import methods
from benchmarks._network.hooks import bf16_mean, power_sgd_state
from benchmarks._network.show import show, title
from benchmarks.harness.lab import Lab
from benchmarks.harness.launch import run_ranks
from benchmarks.harness.rank import COUNTER
from benchmarks.harness.results import write
from lightning_compress.codecs import Codec, OneBit, Rotated
from lightning_compress.collectives import TorchCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.asynchronous.async_gossip import AsyncGossip
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import TwoShot
from lightning_compress.exchanges.message import Section

LOCAL_STEPS = 16
DDP = "DDP's all-reduce"
Step = Callable[[Tensor, int], object]


def _all_reduce(every: int) -> Callable[[int], Step]:
    def make(numel: int) -> Step:
        return lambda vector, step: dist.all_reduce(vector) if (step + 1) % every == 0 else None

    return make


def _compressed(codec: Codec) -> Callable[[int], Step]:
    def make(numel: int) -> Step:
        layout, device = Layout.of([("x", (numel,))]), torch.device("cpu")
        plan = TwoShot().plan([Section(codec, layout, 0)], World(TorchCollective(), device, Meter(device)))
        out, flag = torch.empty(numel), torch.tensor(0.0)
        return lambda vector, step: plan.mean(vector, out, step, flag)

    return make


def _gossip(settings: methods.Settings, every: int = 1) -> Callable[[int], Step]:
    def make(numel: int) -> Step:
        mixing = methods.begin(settings, TorchCollective(), numel)
        return lambda vector, step: mixing.mix(vector, 0.1) if (step + 1) % every == 0 else None

    return make


def _moniqua(bits: int) -> methods.Settings:
    return {"algorithm": "dpsgd", "compressor": {"name": "moniqua", "bits": bits, "theta": 1.0}}


class _Bucket:
    """What PyTorch's hooks ask of DDP's bucket: a vector, whose matrix is as square as can be.

    Args:
        vector: float32 [N].
    """

    def __init__(self, vector: Tensor) -> None:
        side = isqrt(vector.numel())
        matrix, rest = vector.split([side * side, vector.numel() - side * side])
        parts = [matrix.view(side, side), rest]
        self.index, self.is_last = lambda: 0, lambda: True
        self.buffer, self.gradients = lambda: vector, lambda: parts


def _pytorch(hook: Callable[..., Any], state: Callable[[], object] = lambda: None) -> Callable[[int], Step]:
    def make(numel: int) -> Step:
        kept = state()
        return lambda vector, step: hook(kept, _Bucket(vector)).wait()

    return make


class Asynchronous:
    """Averages of pairs beside the steps of a model that moves by its gradient.

    Args:
        numel: parameters.
        compressor: see ``AsyncGossip``.
    """

    def __init__(self, numel: int, compressor: object) -> None:
        self._model = nn.ParameterList([torch.zeros(numel)])
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3)
        self.gossip = AsyncGossip("adpsgd", "ring", compressor)
        self.gossip.start(self._model, [self._optimizer])
        self.gossip.resume()

    def __call__(self, vector: Tensor, step: int) -> None:
        """Step by this gradient, then ask a neighbour."""
        self._model[0].grad = vector
        self.gossip.before_step(self._optimizer)
        self._optimizer.step()
        self.gossip.after_step()

    def figures(self) -> tuple[float, float]:
        """Wait for all others, and return the bytes that this rank has sent, and how many averages it had part in."""
        self.gossip.pause()
        told = self.gossip.stats()
        sent = sum(each for name, each in told.items() if name.startswith("bytes_to_"))
        return sent, told["answers"] + told["answered"]

    def close(self) -> None:
        """Wait for all others, and end."""
        self.gossip.finish()
        self.gossip.close()


METHODS: dict[str, Callable[[int], Step]] = {
    "no communication": lambda numel: lambda vector, step: None,
    DDP: _all_reduce(1),
    "PyTorch bf16": _pytorch(bf16_mean),
    "PyTorch PowerSGD 1": _pytorch(powerSGD_hook.powerSGD_hook, lambda: power_sgd_state(1)),
    "rotated, 4 bits": _compressed(Rotated()),
    "onebit": _compressed(OneBit()),
    f"local SGD, every {LOCAL_STEPS}": _all_reduce(LOCAL_STEPS),
    **{name: _gossip(methods.METHODS[name]) for name in ("D-PSGD", "SGP", "SGP, used a round later")},
    **{name: _gossip(methods.METHODS[name]) for name in ("CHOCO, 1 bit", "DeepSqueeze, 1 bit", "DCD, 8 bits")},
    "Moniqua, 8 bits": _gossip(_moniqua(8)),
    "Moniqua, 1 bit": _gossip(_moniqua(1)),
    f"Moniqua, 8 bits, every {LOCAL_STEPS}": _gossip(_moniqua(8), every=LOCAL_STEPS),
    "AD-PSGD": partial(Asynchronous, compressor=None),
    "AD-PSGD, Moniqua, 8 bits": partial(Asynchronous, compressor="moniqua"),
    "AD-PSGD, Moniqua, 4 bits": partial(Asynchronous, compressor={"name": "moniqua", "bits": 4}),
}


def find(told: dict[str, Any]) -> dict[str, Any]:
    """Do what is told: ``methods``, ``numel``, ``compute_ms``, ``steps``."""
    found: dict[str, Any] = {"ms": {}, "wire_bytes": {}, "formula_bytes": {}, "averages": {}}
    for name in told["methods"]:
        _measure(name, told, found)
    return found


def _measure(name: str, told: dict[str, Any], found: dict[str, Any]) -> None:
    vector = torch.randn(told["numel"], generator=torch.Generator().manual_seed(told["rank"])) * 0.01
    step = METHODS[name](told["numel"])
    for warm in range(LOCAL_STEPS):
        step(vector, warm)
    free = step if isinstance(step, Asynchronous) else None
    earlier = free.figures() if free else (0, 0)
    dist.barrier()
    before, start = int(COUNTER.read_text()), time.perf_counter()
    if free is not None:
        free.gossip.resume()
    for number in range(told["steps"]):
        time.sleep(told["compute_ms"] / 1e3)
        step(vector, number)
    if free is None:
        dist.barrier()
    found["ms"][name] = 1e3 * (time.perf_counter() - start) / told["steps"]
    if free is not None:
        sent, averages = (now - then for now, then in zip(free.figures(), earlier, strict=True))
        found["formula_bytes"][name], found["averages"][name] = sent / told["steps"], averages / told["steps"]
    found["wire_bytes"][name] = (int(COUNTER.read_text()) - before) / told["steps"]
    if free is not None:
        free.close()


def measure(given: argparse.Namespace) -> None:
    """A cell for each delay: milliseconds and bytes a step, of rank 0; printed, and written to a JSON file.

    Args:
        given: the command line of ``benchmarks.gossip network``.

    Raises:
        ValueError: steps are no multiple of the local ones.
        RuntimeError: this is not Linux with iproute2, or not root; or a rank failed.
    """
    if given.steps < LOCAL_STEPS or given.steps % LOCAL_STEPS:
        raise ValueError(f"--steps {given.steps} must be a multiple of {LOCAL_STEPS}, the local steps of some methods")
    told = {name: getattr(given, name) for name in ("methods", "numel", "compute_ms", "steps")}
    place, cells = {name: getattr(given, name) for name in ("ranks", "rate", "last")}, list[dict[str, Any]]()
    how = f"the last link {given.last}; " if given.last else ""
    how += f"computing emulated: a sleep of {given.compute_ms:g} ms, nothing beside it"
    place |= {"model": f"{given.numel:,} parameters", "how": how}
    for delay in map(float, given.delays.split(",")):
        with Lab(given.ranks, given.rate, delay, given.last) as lab:
            found = run_ranks(lab, told, "benchmarks._gossip.network")[0]
        cells.append(place | {"delay_ms": delay, **told, **found})
        show(cells[-1], title(cells[-1]), DDP)
        write(given.json, {"cells": cells})
