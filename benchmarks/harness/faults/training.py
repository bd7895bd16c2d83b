"""A small training run, of which every number follows from method, world size and step."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks._digits import digits
from benchmarks.harness.models import perceptron
from lightning_compress import CompressedDDPStrategy

METHODS: dict[str, dict[str, Any]] = {
    "topk": {"compressor": {"name": "topk", "density": 0.05}, "exchange": "all_gather"},
    "dgc": {"compressor": {"name": "dgc", "density": 0.05}, "exchange": "all_gather"},
    "onebit": {"compressor": "onebit", "exchange": "two_shot"},
    "powersgd": {"compressor": {"name": "powersgd", "rank": 2}},
}
SAVE_EVERY = 2
BATCH = 16


@dataclass(frozen=True)
class Job:
    """One run of one set of ranks.

    Args:
        folder: for outcomes, logs and checkpoints.
        method: of ``METHODS``.
        size: number of ranks.
        steps: at which it ends.
        timeout: of the process group, seconds.
        resume: path of the checkpoint to go on from, "last", or nothing.
        fault: its name, or nothing.
        victim: rank that it happens to.
        at: step in which it happens.
        seed: of what varies from trial to trial: moments in milliseconds, which one of two files.
        temporary: folder for temporary files, or nothing: beside the checkpoints.
    """

    folder: str
    method: str
    size: int
    steps: int = 12
    timeout: float = 30.0
    resume: str = ""
    fault: str = ""
    victim: int = 0
    at: int = 4
    seed: int = 0
    temporary: str = ""

    @property
    def checkpoints(self) -> str:
        """Where they are."""
        return f"{self.folder}/checkpoints"


class Net(pl.LightningModule):
    """Four layers; the batch of a rank follows from the step alone, so that a resumed run sees what it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron(64, 96, 64, 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of ten classes."""
        scores: Tensor = self.layers(images)
        return scores

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross entropy of this step's batch; what the loader gives is only a number."""
        step, ranks = self.trainer.global_step, self.trainer.world_size
        images, labels = digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))
        mine = order[: ranks * BATCH].view(ranks, BATCH)[self.global_rank]
        return nn.functional.cross_entropy(self(images[mine]), labels[mine])

    def on_train_start(self) -> None:
        """Remember what this rank begins with: the step, and the norm of each parameter's residual."""
        saved = self.trainer.strategy.compression.state_dict()  # type: ignore[attr-defined]
        residuals = [group["states"]["residual"] for group in saved["groups"] if "residual" in group["states"]]
        self.begun = {"step": self.trainer.global_step} | {
            name: float(part.norm())
            for one in residuals
            for name, part in zip(one["names"], one["numbers"].split(one["numels"]), strict=True)
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def fit(job: Job, callbacks: Sequence[pl.Callback] = ()) -> tuple[Net, CompressedDDPStrategy]:
    """Train on this rank, with a checkpoint every ``SAVE_EVERY`` steps; lost state is an error."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Net()
    settings = METHODS[job.method] | {"bucket_cap_mb": 0.01, "timeout": timedelta(seconds=job.timeout)}
    strategy = CompressedDDPStrategy(strict_state=True, **settings)
    keep = ModelCheckpoint(job.checkpoints, "{step}", every_n_train_steps=SAVE_EVERY, save_top_k=1, save_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=job.size,
            strategy=strategy,
            max_steps=job.steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[keep, *callbacks],
        )
        trainer.fit(model, DataLoader(range(1 << 20)), ckpt_path=job.resume or None)  # type: ignore[arg-type]
    return model, strategy


def digest(model: Net, strategy: CompressedDDPStrategy) -> dict[str, Any]:
    """What a run came to, bit for bit: parameters, and everything that the compression of this rank keeps."""
    parameters, state = hashlib.sha256(), hashlib.sha256()
    for parameter in model.parameters():
        parameters.update(parameter.detach().numpy().tobytes())
    saved = strategy.compression.state_dict()
    residual = 0.0
    for group in saved["groups"]:
        for kind, one in sorted(group["states"].items()):
            state.update(f"{kind} {one['names']}".encode() + one["numbers"].numpy().tobytes())
            residual += float(one["numbers"].norm()) if kind == "residual" else 0.0
    return {
        "begun": model.begun,
        "step": saved["step"],
        "groups": len(saved["groups"]),
        "parameters": parameters.hexdigest(),
        "state": state.hexdigest(),
        "residual": residual,
    }
