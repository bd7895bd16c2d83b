"""Steps of a sharded model on two hosts: native HSDP, a float16 mean, and ours between the replicas.

    sudo python -m benchmarks.hsdp --rates 1gbit,100mbit --accumulate 1,4 --json hsdp.json

Two hosts of two ranks each: a host holds a replica, sharded over its ranks. Linux, root and iproute2: each host is a
network namespace with a link of a set speed, and its ranks meet inside it. Medians of rank 0; bytes are those of a
host's interface, TCP, IP and Ethernet headers included, beside what formulas say of its two ranks. "HSDP each batch"
averages over replicas after every micro-batch, as Lightning's ModelParallelStrategy does; "HSDP" after the last one.
"""

from __future__ import annotations

from typing import Any

from benchmarks._arguments import described, file_to_write, plain_errors, positive, positives, some_of
from benchmarks._hsdp import METHODS, SHARDS
from benchmarks._network.show import show
from benchmarks.harness.lab import Lab
from benchmarks.harness.launch import run_ranks
from benchmarks.harness.models import MODELS
from benchmarks.harness.results import write


@plain_errors()
def main() -> None:
    """Measure and print the tables."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default="transformer")
    add("--rates", type=lambda text: text.split(","), default=["1gbit"], help="of the links, by commas (1gbit)")
    add("--accumulate", type=positives, default=[1], help="micro-batches of a step, by commas (1)")
    add("--methods", type=some_of(METHODS), default=list(METHODS), help=f"of {', '.join(METHODS)}")
    add("--steps", type=positive, default=6, help="measured steps of a method (6)")
    add("--warm", type=positive, default=2, help="steps before these (2)")
    add("--json", type=file_to_write, help="write the medians here")
    arguments = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for rate in arguments.rates:
        for accumulate in arguments.accumulate:
            told = {name: getattr(arguments, name) for name in ("model", "methods", "steps", "warm")}
            with Lab(2, rate) as lab:
                found = run_ranks(lab, told | {"accumulate": accumulate}, "benchmarks._hsdp", each=SHARDS)[0]
            cells.append({"model": arguments.model, "rate": rate, "accumulate": accumulate} | found)
            title = f"{arguments.model}, 2 x 2, {rate}, {accumulate} batches a step; MB: of a host"
            show(cells[-1], title, "HSDP")
            write(arguments.json, {"cells": cells})


if __name__ == "__main__":
    main()
