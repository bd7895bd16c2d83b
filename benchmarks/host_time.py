"""Host time of a bucket on the path for GPUs, beside PyTorch's hook for bfloat16 in the same run; without a GPU.

    python -m benchmarks.host_time
    python -m benchmarks.host_time --methods qsgd --steps 100

The buckets are small tensors on a CPU, in a DistributedDataParallel over a process group to which nobody belongs.
Kernels are not launched, and nothing travels, but each launch and each collective is called. So the times are those of
the host alone, without the driver's, and only their ratios mean something on another machine. The least of all steps
counts.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness.host_time import ours, theirs

RANKS = 4
METHODS = ["qsgd", "rotated", "onebit", "efsign", "topk"]
TWICE = ["qsgd", "rotated", "onebit", "efsign"]
"""Those that travel by two_shot, too."""


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    least = theirs(arguments.steps)
    shown = Table("compressor", "exchange", "ordinary, us", "repeated, us", "times PyTorch's hook")
    shown.add_row("PyTorch's bf16", "all_reduce", f"{least:.0f}", "", "1.0")
    for exchange in ("all_gather", "two_shot"):
        for method in arguments.methods:
            if exchange == "all_gather" or method in TWICE:
                first, again = (ours(method, exchange, arguments.steps, recorded) for recorded in (False, True))
                shown.add_row(method, exchange, f"{first:.0f}", f"{again:.0f}", f"{again / least:.1f}")
    Console().print(shown)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
