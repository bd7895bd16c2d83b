"""ResNet-20 on CIFAR-10 with two ranks on one GPU: what each method's accuracy is, epoch by epoch.

    python -m benchmarks._gpu.train --data data --epochs 60 --seconds 900 --json train.json

The recipe's model, images, augmentation and schedule, in a loop of its own with everything on the GPU, where neither
Hydra nor a data loader is needed. Each method has a share of the seconds, and trains fewer epochs where they are not
enough: then the learning rate reaches 0 earlier, and the table says so. ``dgc`` has ten times the weight decay, which
gets no momentum from it; its density falls over five epochs, and ``onebit`` begins with a dense one. Some of the six
files will do, and so will their first images, for a comparison on fewer (3,073 bytes each):

    for each in data_batch_1 test_batch; do
        head -c $((6000 * 3073)) data/cifar-10-batches-bin/$each.bin > few/$each.bin
    done
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks._gpu.echo import device_of
from benchmarks._gpu.machine import WIDTH, surroundings
from benchmarks.harness import tables
from benchmarks.harness.nccl import share_a_gpu
from benchmarks.harness.results import write
from lightning_compress import attach
from recipes.loading import draw
from recipes.resnet.data import crop_and_flip
from recipes.resnet.model import ResNet
from recipes.task import lr_factor, parameter_groups

Images = tuple[Tensor, Tensor]
Found = dict[str, Any]
REFERENCE = 128
"""Images of a minibatch that the learning rate of 0.1 is meant for."""
WARM_EPOCHS = 2
UNTIMED, TIMED = 10, 30
"""Steps before the speed is measured, and steps by which it is."""
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "rotated": {"compressor": {"name": "rotated", "bits": 4}, "exchange": "all_gather"},
    "topk": {"compressor": {"name": "topk", "density": 0.01}, "exchange": "all_gather"},
    "dgc": {"compressor": "dgc", "exchange": "all_gather", "schedule": "dgc", "decay": 10.0},
    "fft": {"compressor": "fft", "exchange": "all_gather"},
    "onebit": {"compressor": "onebit", "exchange": "all_gather", "dense_epochs": 1},
    "powersgd": {"compressor": {"name": "powersgd", "rank": 4}, "dense_epochs": 1},
}
START = 60.0
"""Seconds after which a back end over which the ranks have not met is given up."""


def rank_main(rank: int, told: dict[str, Any]) -> None:
    """Train; rank 0 writes what it finds to ``said.jsonl``, and every rank its errors.

    Args:
        rank: of this process.
        told: ``data``, ``device``, ``backend``, ``ranks``, ``batch``, ``epochs``, ``images`` (None: all),
            ``weight_decay``, ``seconds`` and ``folder``; of the method ``compressor``, ``exchange``, ``schedule``,
            ``dense_epochs`` and ``decay``.
    """
    folder = Path(told["folder"])
    try:
        if told["backend"] == "nccl":
            share_a_gpu(rank)
        if told["device"] == "cpu":
            torch.set_num_threads(1)
        begun = time.monotonic()
        store = f"file://{folder}/store"
        dist.init_process_group(told["backend"], init_method=store, rank=rank, world_size=told["ranks"])
        Loop(told, *_images(Path(told["data"]), told["images"]), begun).run()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc().strip().splitlines()[-1])
        traceback.print_exc()
        os._exit(1)


def files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Those of CIFAR-10's binary version that there are, to train on and to test on.

    Raises:
        ValueError: there are none of one kind, or one does not hold whole images.
    """
    from recipes.resnet.cifar10 import RECORD, TEST_FILES, TRAIN_FILES  # imports Lightning, which takes seconds

    train, test = (
        [folder / name for name in names if (folder / name).is_file()] for names in (TRAIN_FILES, TEST_FILES)
    )
    if not (train and test):
        lacking = TEST_FILES[0] if train else "data_batch_*.bin"
        raise ValueError(f"no training: there is no {lacking} of CIFAR-10's binary version in {folder}; see --data")
    for path in (*train, *test):
        if not path.stat().st_size or path.stat().st_size % RECORD:
            raise ValueError(f"no training: {path} has {path.stat().st_size} bytes; whole images have {RECORD} each")
    return train, test


def _images(folder: Path, count: int | None) -> tuple[Images, Images]:
    from recipes.resnet.cifar10 import read_records

    train, test = map(read_records, files(folder))
    return (train.images[:count], train.labels[:count]), (test.images, test.labels)


class Loop:
    """The training of one rank.

    Args:
        told: see ``rank_main``.
        train: images uint8 [N, 3, H, W] and labels int64 [N] to train on, the same on all ranks.
        test: those to test on.
        begun: when the time began to count, by ``time.monotonic()``.
    """

    def __init__(self, told: dict[str, Any], train: Images, test: Images, begun: float) -> None:
        self._told, self._begun = told, begun
        self._rank, self._ranks, self._batch = dist.get_rank(), dist.get_world_size(), told["batch"]
        self._device = device = device_of(told["device"])
        self._images, self._labels = (each.to(device) for each in train)
        self._test = [each.to(device) for each in test]
        std, mean = torch.std_mean(self._images.float(), (0, 2, 3))
        self._mean, self._std = mean[:, None, None], std[:, None, None]
        self._per_epoch = len(self._labels) // (self._batch * self._ranks)
        torch.manual_seed(0)
        module = ResNet(20, zero_gamma=True).to(device)
        if device.type == "cuda":  # launching the model's hundreds of kernels one by one would take most of a step
            torch.cuda.make_graphed_callables(module, (self._normal(self._images[: self._batch]),))
        self._ddp = DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)
        self._compression = attach(
            self._ddp,
            told["compressor"],
            told.get("exchange", "auto"),
            schedule=told.get("schedule"),
            warmup_steps=self._per_epoch * told.get("dense_epochs", 0),
        )
        decay = told["weight_decay"] * told.get("decay", 1.0)
        self._optimizer = torch.optim.SGD(parameter_groups(module), lr=0.1, momentum=0.9, weight_decay=decay)
        self._step, self._epochs, self._since = 0, told["epochs"], 0.0

    def run(self) -> None:
        """All epochs, or those that there is time for."""
        if self._rank == 0:
            self._say(met=True)
        epoch = 0
        while epoch < self._epochs:
            loss = self._epoch(epoch)
            epoch += 1
            if self._rank == 0:
                seconds = time.monotonic() - self._begun
                self._say(epoch=epoch, loss=loss, accuracy=self._accuracy(), seconds=round(seconds, 1))
        if self._rank == 0:
            self._say(ratio=self._compression.stats()["ratio"])
        self._compression.close()

    def _epoch(self, epoch: int) -> float:
        self._compression.epoch = epoch
        self._ddp.train()
        order = torch.randperm(len(self._labels), generator=torch.Generator().manual_seed(epoch))
        rows = order[self._rank :: self._ranks].to(self._device)
        images = crop_and_flip(self._images[rows], draw(rows, epoch, 0))
        labels, total = self._labels[rows], torch.zeros((), device=self._device)
        for first in range(0, self._per_epoch * self._batch, self._batch):
            self._set_rate()
            part = slice(first, first + self._batch)
            self._optimizer.zero_grad()
            loss = F.cross_entropy(self._ddp(self._normal(images[part])), labels[part])
            loss.backward()
            self._optimizer.step()
            total += loss.detach()
            self._step += 1
            if self._step in (UNTIMED, UNTIMED + TIMED):
                self._look_at_the_clock()
        mean: float = total.item() / self._per_epoch
        return mean

    def _normal(self, images: Tensor) -> Tensor:
        return (images - self._mean) / self._std

    def _set_rate(self) -> None:
        peak = self._batch * self._ranks / REFERENCE
        warm = WARM_EPOCHS * self._per_epoch
        total = self._epochs * self._per_epoch
        factor = lr_factor(self._step, total, schedule="cosine", peak=peak, warmup=min(warm, total // 2))
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1 * factor

    def _look_at_the_clock(self) -> None:
        """Find out how many epochs there is time for; rank 0 decides."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.monotonic()
        if self._step == UNTIMED:
            self._since = now
            return
        each = (now - self._since) / TIMED
        left = 0.9 * (self._told["seconds"] - (now - self._begun))  # the rest is testing
        fit = max(1, int((left / each + self._step) / self._per_epoch))
        epochs = torch.tensor(min(self._epochs, fit), device=self._device)
        dist.broadcast(epochs, 0)
        self._epochs = int(epochs)
        if self._rank == 0:
            self._say(epochs=self._epochs, ms_per_step=1e3 * each)

    @torch.no_grad()
    def _accuracy(self) -> float:
        """Percent of the test images."""
        model = self._ddp.module.eval()
        parts = zip(*(each.split(2000) for each in self._test), strict=True)
        right = sum((model(self._normal(images)).argmax(1) == labels).sum() for images, labels in parts)
        return 100 * float(right) / len(self._test[1])

    def _say(self, **row: object) -> None:
        with Path(self._told["folder"], "said.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def train(told: Found, deadline: float, save: Callable[[Found], object]) -> Found:
    """Train with one method, in processes of their own.

    Args:
        told: see ``rank_main``.
        deadline: by ``time.monotonic()``.
        save: is given what there is after every epoch, so that nothing is lost where time is up.

    Returns:
        ``epochs``, ``ms_per_step``, ``ratio`` (how many times fewer bytes than float32 a step sends) and ``curve``: of
        each epoch its number, ``loss``, ``accuracy`` on the test images in percent, and ``seconds`` since the start;
        or an ``error`` beside what there is.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {**told, "folder": folder}
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=rank_main, args=(rank, told), daemon=True) for rank in range(told["ranks"])]
        for process in processes:
            process.start()
        begun, said = time.monotonic(), Path(folder, "said.jsonl")
        found = _read(said)
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            late = not said.exists() and time.monotonic() - begun > START
            if late or any(process.exitcode for process in processes):
                break
            time.sleep(0.1)
            now = _read(said)
            if len(now["curve"]) > len(found["curve"]):
                save(found := now)
        for process in processes:
            process.kill()
            process.join()
        found = _read(said)
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
    if len(found["curve"]) < found.get("epochs", 1):
        found["error"] = errors[0] if errors else "stopped: out of time" if found["curve"] else "it did not start"
    return found


def _read(said: Path) -> dict[str, Any]:
    """What rank 0 has said so far, in whole lines."""
    found: dict[str, Any] = {"curve": []}
    for line in said.read_text().splitlines(keepends=True) if said.exists() else ():
        if line.endswith("\n"):
            row = json.loads(line)
            found["curve"].append(row) if "epoch" in row else found.update(row)
    return found


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    title = f"ResNet-20, CIFAR-10, {result['ranks']} ranks x {result['batch']} images on one {result['device']}"
    head = ("method", "epochs", "test accuracy %", "the best", "ms a step", "fewer bytes", "over", "")
    rows = []
    for name, row in result["methods"].items():
        curve = row["curve"]
        last, best = (
            (f"{curve[-1]['accuracy']:.2f}", f"{max(e['accuracy'] for e in curve):.2f}") if curve else ("-", "-")
        )
        speed = f"{row['ms_per_step']:.1f}" if "ms_per_step" in row else "-"
        ratio = f"{row['ratio']:.1f} x" if "ratio" in row else "-"
        rows.append((name, str(len(curve)), last, best, speed, ratio, row["backend"], row.get("error", "")[:60]))
    tables.show(head, rows, title, f"wanted: {result['epochs']} epochs; {result['software']}", width=WIDTH)


def main() -> None:
    """Train with one method after the other, and write JSON after each."""
    from recipes.resnet.cifar10 import FOLDER  # imports Lightning, which takes seconds

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help=f"folder that holds {FOLDER}/, or its files")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--backends", nargs="+", choices=("nccl", "gloo"), default=["nccl", "gloo"], help="tried in turn")
    add("--ranks", type=int, default=2)
    add("--batch", type=int, default=128, help="images a rank and step (default: %(default)s)")
    add("--epochs", type=int, default=60, help="at the most (default: %(default)s)")
    add("--images", type=int, help="train on the first so many only")
    add("--weight-decay", type=float, default=5e-4)
    add("--seconds", type=float, default=1800, help="for all of it (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the curves there")
    arguments = parser.parse_args()
    nested = arguments.data / FOLDER
    data = nested if nested.is_dir() else arguments.data
    try:
        files(data)
    except ValueError as error:
        parser.error(str(error))
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here")
    told = {**vars(arguments), "data": str(data), "json": None}
    shared = {name: told[name] for name in ("ranks", "batch", "epochs", "weight_decay")}
    result = {**surroundings(torch.device(arguments.device)), **shared, "methods": {}}
    deadline = time.monotonic() + arguments.seconds
    usable = ["gloo"] if arguments.device == "cpu" else list(arguments.backends)
    for number, name in enumerate(arguments.methods):

        def save(found: dict[str, Any], name: str = name) -> None:
            result["methods"][name] = found
            write(arguments.json, result)

        save(_try(told | METHODS[name], usable, deadline, len(arguments.methods) - number, save))
    show(result)


def _try(told: Found, backends: list[str], deadline: float, left: int, save: Callable[[Found], object]) -> Found:
    """Train over the first back end that works; those that do not are dropped."""
    while True:
        seconds = (deadline - time.monotonic()) / left
        if seconds <= 0:
            return {"curve": [], "backend": "-", "error": "not trained: out of time"}
        found = train({**told, "backend": backends[0], "seconds": seconds}, time.monotonic() + seconds, save)
        found["backend"] = backends[0]
        if found["curve"] or len(backends) == 1:
            return found
        print(f"{backends.pop(0)}: {found['error']}")


if __name__ == "__main__":
    main()
