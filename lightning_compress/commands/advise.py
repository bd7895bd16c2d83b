"""Predict what each method does for a training run, and say what to write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import TorchCollective
from lightning_compress.commands.called import called
from lightning_compress.engine.attach import BUCKET_CAP_MB
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import UNKNOWN, Link, Speeds
from lightning_compress.planning.link import kind_of, time_codec, time_link
from lightning_compress.planning.predict import BUCKET, Place, predict
from lightning_compress.settings.compensation import automatic, loss_of
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.run_state import RunState

Parameters = Sequence[tuple[str, Shape]]
Optimizer = Literal["sgd", "adam", "adamw", "muon"]
SIDE = 1024
"""Rows and columns of the matrices that stand for a model of which only the size is known."""
TCP = 0.94
"""Of the bits on an Ethernet, those that are data: the rest are headers, and acknowledgements of what arrived."""
PAYS = 0.9
"""A method pays if its step takes at most this part of DistributedDataParallel's."""
NEAR = 0.5
"""Percent of loss above float32's that is lost in the noise of seeds."""


@dataclass(frozen=True)
class Method:
    """A way to average gradients, with what it cost in quality.

    Args:
        name: for the table.
        compressor: as a user writes it; None: DistributedDataParallel.
        write: what to write into the script.
        adam: percent of held-out loss above float32's with AdamW, in our runs; None: not measured.
        sgd: the same with SGD and momentum.
        every: steps between two averages.
        local: ranks step alone between them; else gradients are accumulated.
    """

    name: str
    compressor: Any
    write: str
    adam: float | None
    sgd: float | None
    every: int = 1
    local: bool = False

    def loss(self, optimizer: Optimizer) -> float | None:
        """Return the percent of loss with this optimizer."""
        if optimizer != "muon" or self.compressor is None:
            return self.sgd if optimizer == "sgd" else self.adam
        method = RunState.of(self.compressor).method
        return None if self.local else loss_of(method, "muon", automatic(method, "muon"))


_QSGD_8, _TOPK = {"name": "qsgd", "bits": 8}, {"name": "topk", "density": 0.01}
METHODS = (
    Method("float32 (DDP)", None, 'strategy="ddp"', 0.0, 0.0),
    Method("DDP, 4 batches accumulated", None, "accumulate_grad_batches=4", None, None, every=4),
    Method("bf16", "bf16", 'strategy=CompressedDDPStrategy("bf16")', 0.0, 0.0),
    Method("qsgd, 8 bits", _QSGD_8, f"strategy=CompressedDDPStrategy({_QSGD_8})", 0.0, 0.0),
    Method("qsgd, 4 bits", "qsgd", 'strategy=CompressedDDPStrategy("qsgd")', 0.3, 0.0),
    Method("onebit", "onebit", 'strategy=CompressedDDPStrategy("onebit")', 2.4, 3.4),
    Method("topk, 1 %", _TOPK, f"strategy=CompressedDDPStrategy({_TOPK})", 21.5, 14.9),
    Method("8 local steps, rotated, 4 bits", "rotated", 'strategy=LocalSGDStrategy(sync_every=8, compressor="rotated")',
           1.8, 2.1, every=8, local=True),
    Method("16 local steps, rotated, 4 bits", "rotated",
           'strategy=LocalSGDStrategy(sync_every=16, compressor="rotated")', 5.7, 3.2, every=16, local=True),
)  # fmt: skip
"""What is predicted. Losses are those of docs/results/accuracy.md and docs/results/below-four-bits.md (a character LSTM
of 424,320 parameters)."""


@dataclass(frozen=True)
class Row:
    """What a method does.

    Args:
        method: its name.
        step_ms: predicted milliseconds of a step.
        speedup: DistributedDataParallel's step over this one.
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


def advise(
    params: float | None = None,
    model: str | None = None,
    profile: str | None = None,
    compute_ms: float | None = None,
    ranks: int | None = None,
    gbit: float | None = None,
    latency_us: float = 100.0,
    optimizer: Optimizer | None = None,
    cores_per_rank: float = 1.0,
    json: bool = False,
) -> None:
    """Predict the step time of nine ways to average on your link, and say what to write into your script.

    Say what trains by ``params`` or ``model`` with ``compute_ms``, or by ``profile``. Say where by ``ranks`` and
    ``gbit``; or start it with torchrun on your hosts, where it measures the link and the codecs.

    Args:
        params: number of parameters, such as 25e6.
        model: class or function that makes the model, such as train:Net.
        profile: file that the callback StepProfile wrote.
        compute_ms: milliseconds of a step without communication, all processes of a host at work.
        ranks: processes that train together, 2 or more.
        gbit: speed of each process's link, in Gbit/s.
        latency_us: microseconds until a small message has arrived; ping says twice this.
        optimizer: that you use, on which the cost in quality depends. The default is adamw, or the profile's.
        cores_per_rank: CPU cores of each process.
        json: print JSON instead of a table.
    """
    job = _job(params, model, profile, compute_ms, optimizer)
    _above_zero("cores_per_rank", cores_per_rank)
    if not any(prod(shape) for _, shape in job.parameters):
        raise ValueError(f"{model or profile} has no parameter to train, so nothing would be sent")
    if ranks is None and gbit is None and "WORLD_SIZE" in os.environ:
        count, link, speeds, rank = _measured(cores_per_rank)
    else:
        if ranks is None or gbit is None:
            raise ValueError("give --ranks and --gbit, or start it with torchrun on your hosts, where it measures both")
        link = link_of(_above_zero("gbit", gbit), _above_zero("latency_us", latency_us))
        count, speeds, rank = ranks, None, 0
    if count < 2:
        raise ValueError(f"--ranks {count}: one process sends nothing; use 2 or more")
    if rank:
        return
    rows = predicted(job.parameters, count, link, job.compute_ms, job.optimizer, cores_per_rank, speeds)
    if json:
        print(dumps({"rows": [asdict(row) for row in rows], "advice": advice(rows)}, indent=2))
    else:
        numel = sum(prod(shape) for _, shape in job.parameters)
        title = f"{numel / 1e6:,.3g} M parameters, {count} ranks, {link}, computing {job.compute_ms:.3g} ms"
        show(rows, title, job.optimizer)


def link_of(gbit: float, latency_us: float) -> Link:
    """Return the link that a network card of ``gbit`` Gbit/s gives to TCP's data, after ``latency_us`` microseconds."""
    return Link(latency_us * 1e-6, TCP * gbit * 1.25e8)


@dataclass(frozen=True)
class Job:
    """What trains.

    Args:
        parameters: names and shapes, in the model's order.
        compute_ms: milliseconds of a step without communication.
        optimizer: its kind.
    """

    parameters: Parameters
    compute_ms: float
    optimizer: Optimizer


def _job(
    params: float | None, model: str | None, profile: str | None, compute_ms: float | None, optimizer: Optimizer | None
) -> Job:
    if sum(each is not None for each in (params, model, profile)) != 1:
        raise ValueError("give one of --params, such as 25e6, --model, such as train:Net, and --profile")
    if profile is None:
        return Job(parameters_of(params, model), _above_zero("compute_ms", compute_ms), optimizer or "adamw")
    try:
        saved = loads(Path(profile).read_text())
        parameters = [(str(name), tuple(map(int, shape))) for name, shape in saved["parameters"]]
        took = _above_zero("compute_ms", saved["compute_ms"] if compute_ms is None else compute_ms)
        kind: Optimizer = optimizer or saved["optimizer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--profile {profile} is not a file that StepProfile wrote ({error})") from error
    return Job(parameters, took, kind)


def _measured(cores_per_rank: float) -> tuple[int, Link, dict[str, Speeds], int]:
    """Return the number of ranks, their link, their codecs' speeds, and this process's rank; all measure at once."""
    dist.init_process_group("gloo")
    try:
        ranks = TorchCollective()
        if ranks.size < 2:
            return 1, UNKNOWN, {}, 0
        link = time_link(ranks, torch.device("cpu"))
        every = [RunState.of(method.compressor) for method in METHODS if method.compressor]
        settings = [each.stepped_by(kind) for each in every for kind in ("sgd", "adam", "muon")]
        return ranks.size, link, _speeds(settings, ranks.size, 1 / cores_per_rank), ranks.rank
    finally:
        dist.destroy_process_group()


def predicted(
    parameters: Parameters,
    ranks: int,
    link: Link,
    compute_ms: float,
    optimizer: Optimizer,
    cores_per_rank: float = 1.0,
    speeds: Mapping[str, Speeds] | None = None,
) -> list[Row]:
    """Return a row for each method.

    Args:
        parameters: names and shapes, in the model's order.
        ranks: 2 or more.
        link: of each rank.
        compute_ms: milliseconds of a step without communication.
        optimizer: on which the loss depends.
        cores_per_rank: CPU cores of each rank.
        speeds: of codecs, see ``Measured``; None: they are measured here.
    """
    settings = {
        method.name: RunState.of(method.compressor).stepped_by("adam" if optimizer == "adamw" else optimizer)
        for method in METHODS
        if method.compressor
    }
    speeds = speeds or _speeds(settings.values(), ranks, 1 / cores_per_rank)
    bucket_bytes = BUCKET if cores_per_rank < 1 else BUCKET_CAP_MB << 20
    place = Place(ranks, Auto.knowing({"ranks": link}, speeds), bucket_bytes, hides=cores_per_rank > 1)
    rows: list[Row] = []
    for method in METHODS:
        running = settings.get(method.name)
        step = predict(running, parameters, place, compute_ms / 1e3)
        if method.local:  # a round's exchange follows its last step, with nothing beside it
            step_ms = compute_ms + 1e3 * step.exchange_s / method.every
        else:
            step_ms = compute_ms + (1e3 * step.step_s - compute_ms) / method.every
        sent = step.bytes_sent / method.every / 1e6
        first = rows[0].step_ms if rows else step_ms
        rows.append(Row(method.name, step_ms, first / step_ms, sent, method.loss(optimizer), method.write))
    return rows


def best(rows: Sequence[Row]) -> Row:
    """Return the fastest method that costs no quality, DistributedDataParallel unless another one pays."""
    dense, *others = rows
    lossless = [row for row in others if row.loss is not None and row.loss <= NEAR]
    fastest = min(lossless, key=lambda row: row.step_ms)
    return fastest if fastest.step_ms <= PAYS * dense.step_ms else dense


def advice(rows: Sequence[Row]) -> str:
    """Return what to write, in plain words."""
    chosen, dense = best(rows), rows[0]
    if chosen is dense:
        text = "Keep DistributedDataParallel: no method that keeps the loss saves a tenth of a step."
    else:
        text = f"Write {chosen.write}: a step is {chosen.speedup:.1f} times as fast, at the same loss."
    faster = [row for row in rows[1:] if row.loss is not None and row.step_ms <= PAYS * chosen.step_ms]
    if faster:
        row = min(faster, key=lambda row: (row.loss or 0.0, row.step_ms))
        text += f" If you can accept {row.loss:.1f} % more loss, {row.write} is {row.speedup:.1f} times as fast as DDP."
    return text


def show(rows: Sequence[Row], title: str, optimizer: Optimizer) -> None:
    """Print the table and the advice."""
    table = Table(title=title, title_justify="left")
    for name in ("method", "step, ms", "faster", "MB a step", f"more loss ({optimizer})"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        loss = "not measured" if row.loss is None else f"{row.loss:.1f} %"
        table.add_row(row.method, f"{row.step_ms:,.1f}", f"{row.speedup:.2f} x", f"{row.megabytes:,.2f}", loss)
    console = Console()
    console.print(table)
    console.print(advice(rows), highlight=False)


def _speeds(settings: Iterable[RunState], ranks: int, crowd: float) -> dict[str, Speeds]:
    """Measure the codecs of these settings, and of their sums, on this machine's CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {kind_of(each): time_codec(each, torch.device("cpu"), crowd) for each in codecs_of(settings, ranks)}
    finally:
        torch.set_num_threads(threads)


def codecs_of(settings: Iterable[RunState], ranks: int) -> list[Codec]:
    """Return a codec of each kind that these settings run on so many ranks, and that of float32."""
    found: dict[str, Codec] = {kind_of(Dense()): Dense()}
    for running in settings:
        for section in running.rules.sections([("weight", (SIDE, SIDE))])[1]:
            fed = running.fed(section)
            found |= {kind_of(each): each for each in (fed.codec, fed.codec_of_sums(ranks))}
    return list(found.values())


def parameters_of(params: float | None, model: str | None) -> list[tuple[str, Shape]]:
    """Return names and shapes: of a model that ``module:Class`` names, or of squares with so many parameters in all."""
    if model is not None:
        return [(name, tuple(each.shape)) for name, each in _made(model).named_parameters() if each.requires_grad]
    count = round(_above_zero("params", params) / SIDE)
    rows = [min(SIDE, count - start) for start in range(0, count, SIDE)]
    if not rows:
        raise ValueError(f"--params {params:g}: so few parameters are not compressed; use {SIDE} or more")
    return [(f"weight {number}", (row, SIDE)) for number, row in enumerate(rows)]


def _made(model: str) -> nn.Module:
    """Return the model that a class or a function of a module makes."""
    made = called(model, f"--model {model} cannot be made", "use module:Class, whose arguments all have defaults")
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {model} makes a {type(made).__name__}, not a torch.nn.Module")
    return made


def _above_zero(name: str, value: float | None) -> float:
    if value is None or not 0 < value < float("inf"):
        raise ValueError(f"--{name.replace('_', '-')} {value}: it must be a number above 0")
    return float(value)
