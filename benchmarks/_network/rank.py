"""One rank of the lab; rank 0 writes what it measured."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._network.methods import make, optimizer
from benchmarks._network.models import MODELS, batch

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
WARM = 4
"""Steps before measuring: buckets are rebuilt, sparse sums grow to their size."""


def main(arguments: dict[str, object]) -> None:
    """Measure the methods in turn, in rounds, so that what disturbs the machine disturbs all alike."""
    rank, ranks = int(str(arguments["rank"])), int(str(arguments["ranks"]))
    torch.set_num_threads(1)
    address = f"tcp://{arguments['master']}:29500"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    names = [str(each) for each in arguments["methods"]]  # type: ignore[attr-defined]
    times: dict[str, list[float]] = {name: [] for name in names}
    wire: dict[str, list[int]] = {name: [] for name in names}
    formula: dict[str, float] = {}
    model_name, rounds = str(arguments["model"]), int(str(arguments["rounds"]))
    steps = int(str(arguments["steps"])) // rounds
    for number in range(rounds):
        for name in names[number:] + names[:number]:
            one_round(name, model_name, steps, times[name], wire[name], formula)
    if rank == 0:
        medians = {name: 1e3 * statistics.median(each) for name, each in times.items()}
        sent = {name: statistics.median(each) for name, each in wire.items()}
        found = {"ms": medians, "wire_bytes": sent, "formula_bytes": formula}
        Path(str(arguments["result"])).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def one_round(
    name: str, model_name: str, steps: int, times: list[float], wire: list[int], formula: dict[str, float]
) -> None:
    """Some steps of a method, on a model of its own."""
    torch.manual_seed(0)
    module = MODELS[model_name][0]()
    model, compression = make(name)(module)
    stepper, inputs = optimizer(model), batch(model_name, dist.get_rank())
    for step in range(WARM + steps):
        dist.barrier()
        before, start = int(COUNTER.read_text()), time.perf_counter()
        stepper.zero_grad()
        model(inputs).square().mean().backward()
        stepper.step()
        if step >= WARM:
            times.append(time.perf_counter() - start)
            wire.append(int(COUNTER.read_text()) - before)
    if compression is not None:
        formula[name] = compression.stats()["bytes_sent"]
        compression.close()
    del model, module, stepper, compression
    gc.collect()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
