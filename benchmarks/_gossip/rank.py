"""One rank of the lab: steps whose computing is a sleep, by each method in turn."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from benchmarks._network.hooks import bf16_mean, power_sgd_state
from benchmarks._network.ping import round_trip_ms
from lightning_compress.codecs import Codec, OneBit, Rotated
from lightning_compress.collectives import TorchCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import TwoShot
from lightning_compress.exchanges.message import Section
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
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


def _gossip(
    compressor: object, every: int = 1, algorithm_: object = "dpsgd", topology: str = "ring"
) -> Callable[[int], Step]:
    def make(numel: int) -> Step:
        algorithm, ranks = build_algorithm(algorithm_), TorchCollective()
        neighbours = Neighbours(ranks, algorithm.fit_topology(build_topology(topology, ranks.size), None))
        compressor_ = build_gossip_compressor(compressor, algorithm)
        mixing = algorithm.begin(torch.zeros(numel), neighbours, compressor_, Layout.of([("x", (numel,))]), 0)
        return lambda vector, step: mixing.mix(vector, 0.1) if (step + 1) % every == 0 else None

    return make


def _sgp(delay: int) -> Callable[[int], Step]:
    return _gossip(None, 1, {"name": "sgp", "delay": delay}, "one_peer_exponential")


def _moniqua(bits: int) -> dict[str, object]:
    return {"name": "moniqua", "bits": bits, "theta": 1.0}


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


METHODS: dict[str, Callable[[int], Step]] = {
    "no communication": lambda numel: lambda vector, step: None,
    DDP: _all_reduce(1),
    "PyTorch bf16": _pytorch(bf16_mean),
    "PyTorch PowerSGD 1": _pytorch(powerSGD_hook.powerSGD_hook, lambda: power_sgd_state(1)),
    "rotated, 4 bits": _compressed(Rotated()),
    "onebit": _compressed(OneBit()),
    f"local SGD, every {LOCAL_STEPS}": _all_reduce(LOCAL_STEPS),
    "D-PSGD": _gossip(None),
    "SGP": _sgp(0),
    "SGP, used a round later": _sgp(1),
    "Moniqua, 8 bits": _gossip(_moniqua(8)),
    "Moniqua, 1 bit": _gossip(_moniqua(1)),
    f"Moniqua, 8 bits, every {LOCAL_STEPS}": _gossip(_moniqua(8), LOCAL_STEPS),
}


def main(told: dict[str, Any]) -> None:
    """Join the others and do what is told: ``methods``, ``numel``, ``compute_ms``, ``steps``."""
    torch.set_num_threads(1)
    address, limit = f"tcp://{told['master']}:29500", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=address, rank=told["rank"], world_size=told["ranks"], timeout=limit)
    found: dict[str, Any] = {"ms": {}, "wire_bytes": {}, "own_ms": {}}
    for name in told["methods"]:
        _measure(name, told, found)
    found["ping_ms"] = round_trip_ms(told["rank"], told["ranks"], told["master"])
    Path(told["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure(name: str, told: dict[str, Any], found: dict[str, Any]) -> None:
    vector = torch.randn(told["numel"], generator=torch.Generator().manual_seed(told["rank"])) * 0.01
    step = METHODS[name](told["numel"])
    for warm in range(LOCAL_STEPS):
        step(vector, warm)
    dist.barrier()
    before, start, times = int(COUNTER.read_text()), time.perf_counter(), []
    for number in range(told["steps"]):
        time.sleep(told["compute_ms"] / 1e3)
        begun = time.perf_counter()
        step(vector, number)
        times.append(time.perf_counter() - begun)
    dist.barrier()
    taken = time.perf_counter() - start
    found["ms"][name] = 1e3 * taken / told["steps"]
    found["own_ms"][name] = 1e3 * statistics.median(times)
    found["wire_bytes"][name] = (int(COUNTER.read_text()) - before) / told["steps"]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
