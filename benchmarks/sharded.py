"""What compression between the replicas of a sharded model costs in loss: 2 replicas of 2 shards, in a Trainer.

    python -m benchmarks.sharded --root data --json sharded.json
    python -m benchmarks.sharded --root data --json sharded.json --methods dense onebit --seeds 0

The ranks are 4 processes. A decoder with 112,000 parameters learns the characters of Multi30k's English captions with
AdamW, from the same batches with every method. The learning rate falls linearly to 0. The loss is that of held-out
text. Runs that the JSON file has are not repeated.
"""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks._arguments import described
from benchmarks.harness.methods import METHODS, ONLY
from benchmarks.harness.tasks import Task
from benchmarks.harness.training import Run, run_missing, table
from lightning_compress import CompressedFSDPStrategy

RANKS, REPLICAS, RATE = 4, 2, 3e-3
MODEL = "small decoder, 8 excerpts"
DEFAULT = ("dense", "rotated 4 bits", "qsgd 4 bits", "onebit", "powersgd", "topk 1 %")


class Learner(pl.LightningModule):
    """A model of the task, sharded layer by layer."""

    def __init__(self, run: Run, task: Task) -> None:
        super().__init__()
        self.model, self._run = task.model(), run
        self._batches = task.batches(run["seed"], dist.get_rank())

    def configure_model(self) -> None:
        """Shard it."""
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]  # the strategy has set it
        for layer in self.model.layers.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Take the next batch of this rank."""
        loss: torch.Tensor = self.model(next(self._batches))
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, whose rate falls linearly to 0 from step to step."""
        optimizer = torch.optim.AdamW(self.parameters(), self._run["rate"])
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self._run["steps"])
        return [optimizer], [{"scheduler": falling, "interval": "step"}]


def train(run: Run, task: Task) -> dict[str, float]:
    """One run, on this rank: ``held_out``, the loss; ``ratio`` of bytes between replicas; and ``seconds``."""
    start = time.perf_counter()
    torch.manual_seed(run["seed"])
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = CompressedFSDPStrategy(
        **METHODS[run["method"]],
        exchange={"name": "auto", "fallback": "never"},
        replicate_size=REPLICAS,
        seed=run["seed"],
    )
    off: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer: Any = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, use_distributed_sampler=False, **off
    )
    learner = Learner(run, task)
    trainer.fit(learner, DataLoader(range(run["steps"])))  # type: ignore[arg-type]  # numbers of batches
    total = task.losses(learner.model, dist.get_rank(), RANKS).sum(0)
    dist.all_reduce(total)
    loss, count = total.tolist()
    return {
        "held_out": loss / count,
        "ratio": strategy.comm_stats()["ratio"],
        "seconds": time.perf_counter() - start,
    }


def named(run: Run) -> Run:
    """A run, by the name that the results have for it."""
    return run | {"name": "{method}/seed {seed}/{steps} steps".format(**run)}


def main() -> None:
    """Run what is missing in processes of one group, and print the table."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--root", type=Path, required=True, help="folder that holds multi30k")
    add("--json", type=Path, required=True, help="results so far; written after every run")
    add("--methods", nargs="+", choices=sorted(METHODS.keys() - ONLY), default=list(DEFAULT), help="dense always runs")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, default=600)
    arguments = parser.parse_args()
    same = {"model": MODEL, "rate": RATE, "steps": arguments.steps}
    methods = dict.fromkeys(["dense", *arguments.methods])
    runs = [named({"method": each, "seed": seed} | same) for seed in arguments.seeds for each in methods]
    results = run_missing(RANKS, runs, arguments.root, arguments.json, train)
    table(results, runs, ("method",), f"{MODEL}, AdamW {RATE}")


if __name__ == "__main__":
    main()
