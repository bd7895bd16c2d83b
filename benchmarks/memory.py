"""What each method keeps in memory, in bytes per parameter: beside parameters, gradients and the optimizer's state.

    python -m benchmarks.memory --ranks 2,8,64

Eight square layers in buckets of two, three steps, as threads of one process; afterwards every tensor and array that is
alive is counted once. "State" is what has to be saved (the residual, velocities, ...), in two buffers; "work" is
messages and scratch; a residual in bfloat16 beside it. ``none`` leaves all to DistributedDataParallel: 0. Then
the most that tensors of one rank took at a time, state and work, in the first step, in which exchanges are chosen and
plans are made, and in the second; the garbage collector does not come. Nothing is measured: the link has 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._arguments import file_to_write, positive, positives
from lightning_compress.collectives import Collective, run_threads
from lightning_compress.engine.compression import Compression
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import UNKNOWN
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.run_state import RunState

LAYERS, PER_BUCKET = 8, 2
SMALL = 1 << 12
"""Bytes of a tensor that is not counted in a peak."""


class Peak(TorchDispatchMode):
    """Bytes of the tensors that were made in it and are not freed yet, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what was made."""
        made = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor) and each.untyped_storage().nbytes() > SMALL:
                storage = each.untyped_storage()
                if storage.data_ptr() not in given:  # of which it is a view
                    self._look(storage)
        return made

    def _look(self, storage: torch.UntypedStorage) -> None:
        mine = StorageWeakRef(storage)
        self._held = [(each, size) for each, size in self._held if not each.expired()]
        if all(each.cdata != mine.cdata for each, _ in self._held):
            self._held.append((mine, storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self._held))

    def restart(self) -> int:
        """The most since the last time."""
        most, self.most = self.most, 0
        return most


def alive() -> dict[int, int]:
    """Bytes of each block of memory that some tensor or array holds, by its address."""
    blocks: dict[int, int] = {}
    for each in _reachable():
        if issubclass(type(each), Tensor):  # isinstance wakes modules up that warn
            storage = cast(Tensor, each).untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
        elif issubclass(type(each), np.ndarray):
            array = cast("np.ndarray[Any, Any]", each)
            blocks |= {array.ctypes.data: array.nbytes} if array.base is None else {}
    return blocks


def _reachable() -> Iterator[object]:
    for each in gc.get_objects():
        yield each
        yield from gc.get_referents(each)


def measure(compressor: str, dtype: str, ranks: int, width: int) -> list[float]:
    """Bytes per parameter of state, of work, and of both at the most in the first and in the second step."""
    gc.collect()
    before = alive()
    found: list[int] = []

    def train(collective: Collective) -> None:
        layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        parameters = [layer.weight for layer in layers]
        settings = RunState.of(compressor, Auto("never", UNKNOWN), error_feedback={"dtype": dtype}, check_drift_every=0)
        compression = Compression(nn.Sequential(*layers), settings, collective)
        compression.epoch, compression.active = 99, True  # after any warm-up
        optimizer = torch.optim.SGD(parameters, 1e-3)
        compression.stepped_by([optimizer])
        peak, peaks = Peak(), []
        for _ in range(3):
            for start in range(0, LAYERS, PER_BUCKET):
                bucket = parameters[start : start + PER_BUCKET]
                for parameter in bucket:
                    parameter.grad = torch.randn_like(parameter)
                gradients = [each.grad.view(-1) for each in bucket if each.grad is not None]
                with peak if collective.rank == 0 else contextlib.nullcontext():
                    compression.reduce(bucket, gradients)
            optimizer.step()
            peaks.append(peak.restart())
        optimizer.zero_grad()
        done = torch.zeros(1)
        collective.all_reduce(done)  # all ranks are here
        if collective.rank == 0:
            blocks = {place: size for place, size in alive().items() if place not in before}
            kept = [each for state in compression.groups.states() for each in (state.committed, state.pending)]
            state = sum(each.numel() * each.element_size() for each in kept)
            weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
            found.extend((state, sum(blocks.values()) // ranks - state - weights, *peaks[:2]))
        collective.all_reduce(done)
        compression.close()

    gc.disable()
    try:
        run_threads(ranks, train, timeout=600.0)
    finally:
        gc.enable()
    return [each / (LAYERS * width * width) for each in found]


def main() -> None:
    """Measure every method and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positives, default=[2, 8, 64], help="by commas (2,8,64)")
    parser.add_argument("--width", type=positive, default=1024, help="of the layers; each rank has a model of its own")
    known = [each for each in COMPRESSORS.offered if each not in ("auto", "none")]
    parser.add_argument("--compressors", default=",".join(known), help="names, separated by commas")
    parser.add_argument("--json", type=file_to_write, help="write the figures here")
    arguments = parser.parse_args()
    names = arguments.compressors.split(",")
    if unknown := [each for each in names if each not in known]:
        parser.error(f"--compressors {unknown[0]} is none of {', '.join(known)}")
    columns = ("state", "work", "step 1", "step 2", "state, bfloat16", "work, bfloat16")
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for ranks in arguments.ranks:
        table = Table("method", *columns, title=f"bytes per parameter, {ranks} ranks")
        for name in names:
            found = measure(name, "float32", ranks, arguments.width)
            halved = [] if name == "ef21" else measure(name, "bfloat16", ranks, arguments.width)[:2]  # has no residual
            found += halved or found[:2]
            figures.setdefault(name, {})[str(ranks)] = dict(zip(columns, found, strict=True))
            table.add_row(name, *(f"{value:.1f}" for value in found))
        Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
