"""Predict what each method does for a training run, and which to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_compress.commands.jobs import Optimizer, Parameters
from lightning_compress.commands.speeds import timed
from lightning_compress.engine.attach import BUCKET_CAP_MB, GPU_BUCKET_CAP_MB
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import Link, Speeds
from lightning_compress.planning.predict import BUCKET, CPU, Place, predict
from lightning_compress.settings.compensation import LOCAL_LOSS, automatic, loss_of
from lightning_compress.settings.compensation import Optimizer as Kind
from lightning_compress.settings.run_state import RunState

PAYS = 0.9
"""A method pays if its step takes at most this part of float32's."""
NEAR = 0.5
"""Percent of loss above float32's that is lost in the noise of seeds."""
SAME = 0.1
"""Percent up to which the loss is called the same."""


@dataclass(frozen=True)
class Method:
    """A way to average gradients, with what it cost in quality.

    Args:
        name: for the table.
        compressor: as a user writes it; None: float32, averaged by PyTorch.
        write: what to write into the script.
        every: steps between two averages.
        local: ranks step alone between them; else gradients are accumulated.
    """

    name: str
    compressor: Any
    write: str
    every: int = 1
    local: bool = False

    def loss(self, optimizer: Optimizer) -> float | None:
        """Return the percent of held-out loss above float32's in our runs; a gain counts as 0. None: not measured."""
        kind = _kind(optimizer)
        if self.local:
            return LOCAL_LOSS.get((self.every, kind))
        if self.compressor is None:
            return 0.0 if self.every == 1 else None
        method = RunState.of(self.compressor).method
        lost = loss_of(method, kind, automatic(method, kind))
        return None if lost is None else max(0.0, lost)


def _kind(optimizer: Optimizer) -> Kind:
    return "adam" if optimizer == "adamw" else optimizer


_QSGD_8, _TOPK = {"name": "qsgd", "bits": 8}, {"name": "topk", "density": 0.01}
METHODS = (
    Method("float32 (DDP)", None, 'strategy="ddp"'),
    Method("DDP, 4 batches accumulated", None, "accumulate_grad_batches=4", every=4),
    Method("bf16", "bf16", 'strategy=CompressedDDPStrategy("bf16")'),
    Method("qsgd, 8 bits", _QSGD_8, f"strategy=CompressedDDPStrategy({_QSGD_8})"),
    Method("qsgd, 4 bits", "qsgd", 'strategy=CompressedDDPStrategy("qsgd")'),
    Method("onebit", "onebit", 'strategy=CompressedDDPStrategy("onebit")'),
    Method("topk, 1 %", _TOPK, f"strategy=CompressedDDPStrategy({_TOPK})"),
    *(
        Method(
            f"{every} local steps, rotated, 4 bits",
            "rotated",
            f'strategy=LocalSGDStrategy(sync_every={every}, compressor="rotated")',
            every,
            local=True,
        )
        for every in (8, 16)
    ),
)
"""What is predicted."""
_NONE = 'strategy=CompressedFSDPStrategy("none")'
SHARDED = (
    Method("float32 (HSDP)", None, _NONE),
    Method("HSDP, 4 batches accumulated", None, f"{_NONE}, accumulate_grad_batches=4", every=4),
    *(replace(each, write=each.write.replace("DDP", "FSDP")) for each in METHODS if each.compressor and not each.local),
)
"""The same for replicas of a sharded model."""


def methods_of(shards: int | None) -> tuple[Method, ...]:
    """Return what is predicted, for shards of a model or for whole ones."""
    return SHARDED if shards else METHODS


@dataclass(frozen=True)
class Row:
    """What a method does.

    Args:
        method: its name.
        step_ms: predicted milliseconds of a step.
        speedup: the first method's step over this one.
        megabytes: that a rank sends in a step.
        loss: percent of loss above float32's, in our runs; None: not measured.
        write: what to write into the script.
    """

    method: str
    step_ms: float
    speedup: float
    megabytes: float
    loss: float | None
    write: str


def settings_of(optimizer: Optimizer, shards: int | None = None) -> dict[str, RunState]:
    """Return what runs beside an optimizer, by method; DistributedDataParallel is missing."""
    kind = _kind(optimizer)
    return {each.name: RunState.of(each.compressor).stepped_by(kind) for each in methods_of(shards) if each.compressor}


def predicted(
    parameters: Parameters,
    ranks: int,
    link: Link,
    compute_ms: float,
    optimizer: Optimizer,
    cores_per_rank: float = 1.0,
    speeds: Mapping[str, Speeds] | None = None,
    ready: Mapping[str, float] | None = None,
    device: torch.device = CPU,
    shards: int | None = None,
) -> list[Row]:
    """Return a row for each method.

    Args:
        parameters: names and shapes, in the model's order.
        ranks: that average a gradient, 2 or more.
        link: of each rank.
        compute_ms: milliseconds of a step without communication.
        optimizer: on which the loss depends.
        cores_per_rank: CPU cores of each rank.
        speeds: of codecs, see ``Measured``; None: they are measured here, on a CPU.
        ready: the part of a step after which each gradient is complete, by name; None: not known.
        device: that encodes.
        shards: of the model, of which each rank averages one; None: the model is not sharded.
    """
    settings = settings_of(optimizer, shards)
    if shards:
        settings = {name: each.bound({}, dict(parameters)) for name, each in settings.items()}
        parameters = [(name, (*(-(-rows // shards) for rows in shape[:1]), *shape[1:])) for name, shape in parameters]
    speeds = speeds or timed(settings.values(), ranks, CPU, 1 / cores_per_rank)
    gpu = device.type == "cuda"
    bucket_bytes = GPU_BUCKET_CAP_MB << 20 if gpu else BUCKET if cores_per_rank < 1 else BUCKET_CAP_MB << 20
    planner = Auto.knowing({"ranks": link}, speeds)
    place = Place(ranks, planner, bucket_bytes, hides=gpu or (cores_per_rank > 1 and not shards), device=device)
    rows: list[Row] = []
    for method in methods_of(shards):
        step = predict(settings.get(method.name), parameters, place, compute_ms / 1e3, ready)
        if method.local:  # a round's exchange follows its last step, with nothing beside it
            step_ms = compute_ms + 1e3 * step.exchange_s / method.every
        else:
            step_ms = compute_ms + (1e3 * step.step_s - compute_ms) / method.every
        sent = step.bytes_sent / method.every / 1e6
        first = rows[0].step_ms if rows else step_ms
        rows.append(Row(method.name, step_ms, first / step_ms, sent, method.loss(optimizer), method.write))
    return rows


def best(rows: Sequence[Row]) -> Row:
    """Return the fastest method that costs no quality, the first one unless another one pays."""
    dense, *others = rows
    lossless = [row for row in others if row.loss is not None and row.loss <= NEAR]
    fastest = min(lossless, key=lambda row: row.step_ms)
    return fastest if fastest.step_ms <= PAYS * dense.step_ms else dense


def advice(rows: Sequence[Row]) -> str:
    """Return what to write, in plain words."""
    chosen, dense = best(rows), rows[0]
    if chosen is dense:
        text = f"Keep {dense.method}: no method that keeps the loss saves a tenth of a step."
    else:
        loss = chosen.loss or 0.0
        quality = "at the same loss" if loss <= SAME else f"and in our runs the loss was {loss:.1f} % higher"
        text = f"Write {chosen.write}: a step is {chosen.speedup:.1f} times as fast, {quality}."
    faster = [row for row in rows[1:] if row.loss is not None and row.step_ms <= PAYS * chosen.step_ms]
    if faster:
        row = min(faster, key=lambda row: (row.loss or 0.0, row.step_ms))
        text += f" If you can accept {row.loss:.1f} % more loss, {row.write} is {row.speedup:.1f} times as fast as "
        text += f"{dense.method}."
    return text
