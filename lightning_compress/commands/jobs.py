"""What trains and where, as the options of ``advise`` say, or as it measures."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from math import prod
from pathlib import Path
from typing import Any, Literal

from torch import nn

from lightning_compress.commands import script as scripts
from lightning_compress.commands.called import called
from lightning_compress.commands.ranks import between_ranks
from lightning_compress.commands.words import above_zero
from lightning_compress.planning.cost import Link
from lightning_compress.settings.rules import Shape

Parameters = Sequence[tuple[str, Shape]]
Optimizer = Literal["sgd", "adam", "adamw", "muon"]
SIDE = 1024
"""Rows and columns of the matrices that stand for a model of which only the size is known."""
TCP = 0.94
"""Of the bits on an Ethernet, those that are data: the rest are headers, and acknowledgements of what arrived."""
POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}


@dataclass(frozen=True)
class Job:
    """What trains.

    Args:
        parameters: names and shapes, in the model's order.
        compute_ms: milliseconds of a step without communication.
        optimizer: its kind.
        ready: the part of a step after which each gradient is complete, by name; empty: not known.
        cores_per_rank: CPU cores of each process; None: not known.
        gpu: the name of the GPU that trains; empty: a CPU does, or it is not known.
        ranks: of the script that was measured; 1: it trained alone.
        link: between them; None: it was not measured.
        one_machine: no message leaves this machine.
        notes: what the user should know about the measurement.
    """

    parameters: Parameters
    compute_ms: float
    optimizer: Optimizer
    ready: Mapping[str, float] = field(default_factory=dict)
    cores_per_rank: float | None = None
    gpu: str = ""
    ranks: int = 1
    link: Link | None = None
    one_machine: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Where:
    """Where it trains.

    Args:
        ranks: how many processes average a gradient: all, or one of each replica of a sharded model.
        link: of each.
        words: the link, as a user calls it.
        prints: this process prints the table; others of the job have helped to measure.
        shards: ranks of a replica, which share its host's link; None: the model is not sharded.
    """

    ranks: int
    link: Link
    words: str
    prints: bool = True
    shards: int | None = None


def of(
    script: str | None,
    args: Sequence[str],
    params: str | None,
    model: str | None,
    profile: str | None,
    compute_ms: float | None,
    optimizer: Optimizer | None,
) -> Job | None:
    """Return what trains; None: another host's process says it.

    Raises:
        ValueError: an option is wrong, or the script did not train.
    """
    if script is not None:
        job = _scripted(script, args, optimizer)
    elif profile is not None:
        job = _profiled(profile, compute_ms, optimizer)
    else:
        job = Job(parameters_of(params, model), compute_ms or 0.0, optimizer or "adamw")
    if job is not None and not any(prod(shape) for _, shape in job.parameters):
        raise ValueError(f"{script or model or profile} has no parameter to train, so nothing would be sent")
    return job


def where(job: Job, ranks: int | None, gbit: float | None, latency_us: float, replicas: int | None = None) -> Where:
    """Return where a job trains: as the options say, as its script measured, or as this job's ranks measure now.

    Raises:
        ValueError: there is one rank.
    """
    if ranks is not None and gbit is not None:
        shards = ranks // replicas if replicas else None
        link = link_of(gbit / (shards or 1), latency_us)
        speed = f"{gbit:g} Gbit/s" if gbit >= 1 else f"{1e3 * gbit:g} Mbit/s"
        data = 8e-6 * link.bytes_per_s
        digits = f"{data:,.0f}" if data >= 100 else f"{data:.2g}"
        speed += f" for the {shards} ranks of a host" if shards else ""
        words = f"{speed} ({digits} Mbit/s of data{' for each' * bool(shards)}), {latency_us:g} us"
        return Where(replicas or ranks, link, words, shards=shards)
    if job.link is not None:
        memory = ", the memory of this machine; give --ranks and --gbit for a network" if job.one_machine else ""
        return Where(job.ranks, job.link, f"{job.link} (measured{memory})")
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("the script trained in one process, which sends nothing: give --ranks and --gbit")
    link, rank, count = between_ranks("there is one rank, which sends nothing: start two or more")
    return Where(count, link, f"{link} (measured)", rank == 0)


def link_of(gbit: float, latency_us: float) -> Link:
    """Return the link that a network card of ``gbit`` Gbit/s gives to TCP's data, after ``latency_us`` microseconds."""
    return Link(latency_us * 1e-6, TCP * gbit * 1.25e8)


def _scripted(script: str, args: Sequence[str], optimizer: Optimizer | None) -> Job | None:
    found = scripts.measured(script, args)
    if found is None:
        return None
    names = [name for name, _ in found.parameters]
    kind: Any = found.optimizer
    batches = f", each of {found.batches} batches" if found.batches > 1 else ""
    on = "the CPU" if found.device == "cpu" else found.device
    notes = [f"Computing: the median of {found.steps} steps of {script}{batches}, on {on}, without averaging."]
    if found.dtype != "float32":
        notes.append(f"Its parameters are {found.dtype}: DDP sends half of the bytes above, and gains that much.")
    return Job(
        parameters=[(name, tuple(shape)) for name, shape in found.parameters],
        compute_ms=found.compute_ms,
        optimizer=optimizer or kind,
        ready={name: part or 0.0 for name, part in zip(names, found.ready, strict=True)},
        cores_per_rank=found.cores_per_rank,
        gpu="" if found.device == "cpu" else found.device,
        ranks=found.ranks,
        link=Link(**found.link) if found.link else None,
        one_machine=found.one_machine,
        notes=tuple(notes),
    )


def _profiled(profile: str, compute_ms: float | None, optimizer: Optimizer | None) -> Job:
    try:
        saved = loads(Path(profile).read_text())
        parameters = [(str(name), tuple(map(int, shape))) for name, shape in saved["parameters"]]
        took = above_zero("compute_ms", float(saved["compute_ms"])) if compute_ms is None else compute_ms
        return Job(parameters, took, optimizer or saved["optimizer"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--profile {profile} is not a file that StepProfile wrote ({error})") from error


def parameters_of(params: str | float | None, model: str | None) -> list[tuple[str, Shape]]:
    """Return names and shapes: of a model that ``module:Class`` names, or of squares with so many parameters in all."""
    if model is not None:
        return [(name, tuple(each.shape)) for name, each in _made(model).named_parameters() if each.requires_grad]
    count = round(count_of(str(params)) / SIDE)
    rows = [min(SIDE, count - start) for start in range(0, count, SIDE)]
    if not rows:
        raise ValueError(f"--params {params}: so few parameters are not compressed; use {SIDE} or more")
    return [(f"weight {number}", (row, SIDE)) for number, row in enumerate(rows)]


def count_of(text: str) -> float:
    """Return a number of parameters as people write it: 25e6, 25M, 1.5B, 25_000_000.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([\d_.,]+(?:e\+?\d+)?) ?([kmbg]?)", text.strip(), re.IGNORECASE)
    try:
        return above_zero("params", float(match[1].replace("_", "").replace(",", "")) * POWERS[match[2].upper()])  # type: ignore[index]
    except (TypeError, ValueError) as error:
        raise ValueError(f"--params {text}: it must be a number above 0, such as 25M, 1.5B or 25e6") from error


def _made(model: str) -> nn.Module:
    """Return the model that a class or a function of a module makes."""
    made = called(model, f"--model {model} cannot be made", "use module:Class, whose arguments all have defaults")
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {model} makes a {type(made).__name__}, not a torch.nn.Module")
    return made
