"""Ranks of a Lightning fit that are killed or stopped at random steps: what the others say, and when."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.forking import forking
from lightning_compress import AsyncGossipStrategy

RANKS, TIMEOUT_S, PATIENCE_S = 4, 2.0, 60.0
STEP_S = 0.02


class Net(pl.LightningModule):
    """A small network; one rank ends in the midst of a step."""

    def __init__(self, victim: int, step: int, number: int, told: Path) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
        self._fault = victim, step, number, told

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of a batch."""
        victim, step, number, told = self._fault
        time.sleep(STEP_S)
        if dist.get_rank() == victim and self.trainer.global_step == step:
            if number == signal.SIGSTOP:
                subprocess.Popen(["sh", "-c", f"sleep 15; kill -KILL {os.getpid()}"])
            told.write_text(str(time.time()))
            os.kill(os.getpid(), number)
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Have the ranks meet at the end of each epoch."""
        self.log("loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), 0.05)


def serve(rank: int, folder: str, victim: int, step: int, number: int, compressor: str | None) -> None:
    """What a rank does: train, and write down how it ended."""
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(RANKS), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE_S)
    )
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(640, 32), torch.randint(4, (640,)))
    loaders = DataLoader(data, 8, shuffle=True), DataLoader(data, 32)
    warnings.simplefilter("ignore")
    strategy = AsyncGossipStrategy(compressor=compressor, answer_timeout=TIMEOUT_S)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=4, enable_checkpointing=False, **quiet
    )
    told: dict[str, Any] = {}
    try:
        trainer.fit(Net(victim, step, number, Path(folder, "fault")), *loaders)
    except BaseException as error:
        told = {"at": time.time(), "error": type(error).__name__, "said": str(error)}
    Path(folder, f"ended{rank}").write_text(json.dumps(told))
    os._exit(0)


def trial(victim: int, step: int, number: int, compressor: str | None) -> tuple[list[float], list[bool], list[str]]:
    """Return, of the survivors, seconds from the fault to their error, whether it names the rank, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        context = forking((__name__,))
        given = folder, victim, step, number, compressor
        ranks = [context.Process(target=serve, args=(rank, *given)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        others = [rank for rank in range(RANKS) if rank != victim]
        for rank in others:
            ranks[rank].join(PATIENCE_S)
        for each in ranks:
            each.kill()
            each.join()
        begun = float(Path(folder, "fault").read_text()) if Path(folder, "fault").exists() else float("nan")
        ends = [Path(folder, f"ended{rank}") for rank in others]
        told: list[dict[str, Any]] = [
            json.loads(each.read_text()) if each.exists() else {"said": "did not end"} for each in ends
        ]
    seconds = [each.get("at", float("inf")) - begun for each in told]
    said = [each.get("said", "nothing: it ended without an error") for each in told]
    return seconds, [f"rank {victim} " in each.partition(": ")[2] for each in said], said


def measure(count: int, stops: int, out: Console) -> None:
    """Print a table of what survivors did, and what they said if it was not the name of the rank that was gone."""
    draw = random.Random(0)
    table = Table("fault", "tried", "survivors that name the rank", "seconds, median", "the longest")
    for number, tries in ((signal.SIGKILL, count), (signal.SIGSTOP, stops)):
        seconds, named, others = list[float](), list[bool](), Counter[str]()
        for _ in range(tries):
            fault = draw.randrange(RANKS), draw.randint(1, 50), number, draw.choice([None, "moniqua"])
            found = trial(*fault)
            seconds += found[0]
            named += found[1]
            others.update(said[:160] for said, known in zip(found[2], found[1], strict=True) if not known)
        if tries:
            share = f"{sum(named)} of {len(named)}"
            table.add_row(number.name, str(tries), share, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}")
        for said, times in others.most_common():
            out.print(f"{number.name}, {times} x: {said}", markup=False)
    out.print(table)
