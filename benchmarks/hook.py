"""What the hook itself costs: float32 through it, against DistributedDataParallel alone, on a small model.

    python -m benchmarks.hook --ranks 2 --steps 40 --model resnet20

The second table is what makes a step safe: what no rank uses is looked for, the commit, and the drift guard in the
one step in ``check_drift_every`` that it looks in. The last one is one core's time to average 12.5 million gradients on
one of so many ranks, in copies of them, least of 15; nothing travels, and every message is this rank's own.

The models take turns in one run, a step each in changing order, in the same processes; medians of all steps. The
monitor measures one step in log_every_n_steps: its cost is that share of what measuring every step costs.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._arguments import described, file_to_write, positive
from benchmarks._hook import copies, hooked, safety, step
from benchmarks._network.hooks import PYTORCH
from benchmarks.harness.launch import run_beside
from benchmarks.harness.models import MODELS
from benchmarks.harness.results import write
from benchmarks.harness.tables import show
from lightning_compress.settings.run_state import RunState


def measure(steps: int, batch: int, name: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Measure on one rank: the times of each model's steps, and those of what makes a step safe."""
    torch.manual_seed(0)
    module, (_, *shape) = MODELS[name]
    models: dict[str, Callable[[], nn.Module]] = {
        "DDP": lambda: DistributedDataParallel(module()),
        "none, through the hook": lambda: hooked(module(), "none"),
        "bf16": lambda: hooked(module(), "bf16"),
        "onebit": lambda: hooked(module(), "onebit"),
        "onebit, measured in every step": lambda: hooked(module(), "onebit", sample_every=1),
        "topk": lambda: hooked(module(), "topk"),
        "PyTorch bf16": lambda: PYTORCH["PyTorch bf16"](module())[0],
        "PyTorch PowerSGD 1": lambda: PYTORCH["PyTorch PowerSGD 1"](module())[0],
    }
    built = {name: make() for name, make in models.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.01) for name, model in built.items()}
    inputs = torch.randn(batch, *shape)
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(steps + 3):
        for name in random.Random(number).sample(list(times), len(times)):  # the same order on all ranks
            elapsed = step(built[name], optimizers[name], inputs)
            if number >= 3:  # buckets are rebuilt after the first step
                times[name].append(elapsed)
    return times, safety(steps, module(), inputs)


def main() -> None:
    """Run the ranks and print the table."""
    parser = described(__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--batch", type=positive, default=64, help="examples a rank and step")
    parser.add_argument("--model", choices=MODELS, default="resnet20")
    parser.add_argument("--json", type=file_to_write, help="write the medians here")
    arguments = parser.parse_args()
    times, parts = run_beside(arguments.ranks, measure, arguments.steps, arguments.batch, arguments.model)[0]
    medians = {name: statistics.median(values) for name, values in times.items()}
    # Of pairs, since what disturbs the machine disturbs neighbours alike.
    extra = {
        name: statistics.median(mine / ddp for mine, ddp in zip(values, times["DDP"], strict=True)) - 1
        for name, values in times.items()
    }
    rows = ((name, f"{median:.1f}", f"{100 * extra[name]:+.1f} %") for name, median in medians.items())
    show(("averaging", "ms a step", "beyond DDP"), rows, f"{arguments.model}, {arguments.ranks} ranks")
    every = RunState.of("onebit").options.check_drift_every
    step_ms = parts.pop("step") - parts["guard"] * (1 - 1 / every)
    parts["guard"] /= every
    share = {name: spent / step_ms for name, spent in parts.items()}
    parts_shown = ((name, f"{100 * value:.2f} %") for name, value in [*share.items(), ("all", sum(share.values()))])
    show(("part", "share of a step"), parts_shown, f"onebit, {step_ms:.0f} ms a step, the guard every {every} steps")
    found = copies()
    copies_shown = ((name, f"{value:.2f}") for name, value in found.items())
    show(("average", "copies"), copies_shown, "a core's time, 12.5 million gradients in 50 matrices")
    write(arguments.json, {"ms": medians, "beyond_ddp": extra, "safety": share, "copies": found})


if __name__ == "__main__":
    main()
