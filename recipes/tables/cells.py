"""Sweep files, their cells, and one training as a process of its own."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from recipes.config import nearest, quoted
from recipes.tables.lineage import start_lineage
from recipes.tables.record import FILE, read_result

__all__ = ["Cell", "Outcome", "Sweep", "overrides", "read_sweep", "run", "spelled"]

Cell = dict[str, Any]
"""One value for each parameter of a sweep."""

KEYS: tuple[str, ...] = (
    "program",
    "command",
    "method",
    "metric",
    "parameters",
    "name",
    "description",
    "project",
    "entity",
)
KEYS += ("early_terminate", "run_cap")
"""What a sweep file may have; all of them are W&B's."""
AXIS = ("value", "values", "min", "max", "distribution")
DISTRIBUTIONS = ("uniform", "int_uniform", "log_uniform_values", "categorical", "constant")
MACROS = ("${env}", "${interpreter}", "-m", "recipes.train")
ARGUMENTS = "${args_no_hyphens}"
DRAWN = 20
"""Cells of a random sweep that does not say how many."""
LAUNCHED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
"""Set by launchers for their ranks; a cell is a run of its own."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Args:
        path: of the file.
        method: ``grid`` or ``random``; ``bayes``, which only W&B's server can.
        metric: name of what is to be best, and whether more is better.
        fixed: overrides that every cell has.
        axes: of each parameter, by its dotted name, what it may be.
        count: how many cells there are at most, as W&B's agent takes it; of ``random`` 20 if not given.
        seed: from which.
    """

    path: Path
    method: Literal["grid", "random", "bayes"]
    metric: tuple[str, Literal["maximize", "minimize"]]
    fixed: tuple[str, ...]
    axes: Mapping[str, Mapping[str, Any]]
    count: int | None = None
    seed: int = 0

    def cells(self) -> list[Cell]:
        """The cells of a grid, in the file's order, or drawn ones, the same each time; ``count`` at most.

        Raises:
            ValueError: the method, or a range in a grid, needs W&B's server.
        """
        if self.method == "bayes":
            raise ValueError(
                f"{self.path}: method=bayes needs W&B's server; write method: grid or random to run it here"
            )
        if self.method == "random":
            generator = random.Random(self.seed)
            return [
                {key: _drawn(axis, generator) for key, axis in self.axes.items()} for _ in range(self.count or DRAWN)
            ]
        ranges = [key for key, axis in self.axes.items() if not {"value", "values"} & set(axis)]
        if ranges:
            raise ValueError(f"{self.path}: parameters.{ranges[0]} has no values, which method: grid needs")
        choices = [axis["values"] if "values" in axis else [axis["value"]] for axis in self.axes.values()]
        cells = itertools.islice(itertools.product(*choices), self.count)
        return [dict(zip(self.axes, cell, strict=True)) for cell in cells]


def _drawn(axis: Mapping[str, Any], generator: random.Random) -> Any:
    if "value" in axis:
        return axis["value"]
    if "values" in axis:
        return generator.choice(axis["values"])
    least, most = axis["min"], axis["max"]
    kind = axis.get("distribution") or (
        "int_uniform" if isinstance(least, int) and isinstance(most, int) else "uniform"
    )
    if kind == "int_uniform":
        return generator.randint(least, most)
    if kind == "log_uniform_values":
        return math.exp(generator.uniform(math.log(least), math.log(most)))
    return generator.uniform(least, most)


def read_sweep(path: Path, *, count: int | None = None, seed: int | None = None) -> Sweep:
    """Read a sweep file and check it, before anything runs.

    Args:
        path: a file that ``wandb sweep`` takes.
        count: stronger than the file's own, where given.
        seed: likewise.

    Raises:
        ValueError: it cannot be read, or has an unknown or missing key, a nested parameter, or a value that Hydra would
            misread.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"sweep file {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"sweep file {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"sweep file {path} holds {type(content).__name__}: write method, metric, command and parameters"
        )
    _known(f"{path}: ", content, KEYS)
    for key in ("method", "metric", "command", "parameters"):
        if not content.get(key):
            raise ValueError(f"{path}: {key} is missing; see recipes/resnet/sweeps for a whole file")
    name, count = ("run_cap", content.get("run_cap")) if count is None else ("count", count)
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(f"{path}: {name}={count!r}: at least 1 cell, a whole number, or none given for all of a grid")
    metric = content["metric"]
    if not isinstance(metric, dict) or "name" not in metric or metric.get("goal") not in ("maximize", "minimize"):
        raise ValueError(f"{path}: metric={metric}: write {{name: test/acc, goal: maximize}} (or minimize)")
    if content["method"] not in ("grid", "random", "bayes"):
        raise ValueError(f"{path}: method={content['method']}: choose grid, random or bayes")
    if not isinstance(content["parameters"], dict):
        raise ValueError(f"{path}: parameters must be a mapping of dotted names")
    for key, axis in content["parameters"].items():
        _check_axis(f"{path}: parameters.{key}", axis)
    return Sweep(
        path,
        content["method"],
        (metric["name"], metric["goal"]),
        _fixed(path, content["command"]),
        content["parameters"],
        count,
        seed or 0,
    )


def _known(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            meant = nearest(str(key), known) or f"choose from {', '.join(known)}"
            raise ValueError(f"{where}unknown key {key!r}; {meant}")


def _check_axis(where: str, axis: Any) -> None:
    if not isinstance(axis, dict):
        raise ValueError(f"{where}={axis!r}: write {{values: [...]}}, {{value: ...}} or {{min: ..., max: ...}}")
    if "parameters" in axis:
        raise ValueError(
            f"{where}: nested parameters reach the program as one text; write dotted names, {where.split('.')[-1]}.x"
        )
    _known(f"{where}: ", axis, AXIS)
    if not ({"value"} <= set(axis) or axis.get("values") or {"min", "max"} <= set(axis)):
        raise ValueError(f"{where}: write {{values: [...]}}, {{value: ...}} or {{min: ..., max: ...}}")
    if axis.get("distribution", "constant") not in DISTRIBUTIONS:
        raise ValueError(f"{where}: distribution={axis['distribution']}: choose from {', '.join(DISTRIBUTIONS)}")
    if not isinstance(axis.get("values", []), list):
        raise ValueError(f"{where}: values={axis['values']!r} is no list; write values: [a, b], or value: a for one")
    _check_range(where, axis)
    for value in [*axis.get("values", []), axis.get("value")]:
        if isinstance(value, dict):
            raise ValueError(f"{where}: the mapping {value} would arrive as Python's text; write dotted names")
        if (
            isinstance(value, str)
            and re.search(r"[,{}\[\]():=\s]", value)
            and not re.fullmatch(r"'.*'|\".*\"|\[.*\]|\{.*\}", value)
        ):
            raise ValueError(f"{where}: Hydra would take {value!r} apart; quote it once more: \"'{value}'\"")


def _check_range(where: str, axis: Mapping[str, Any]) -> None:
    """``min`` and ``max``, of which YAML reads 1e-4, without a point, as a text."""
    ends = [axis[end] for end in ("min", "max") if end in axis]
    kind = axis.get("distribution")
    wanted = (int,) if kind == "int_uniform" else (int, float)
    if wrong := [end for end in ends if isinstance(end, bool) or not isinstance(end, wanted)]:
        number = "a whole number" if kind == "int_uniform" else "a number; YAML wants a point in it, as in 1.0e-4"
        raise ValueError(f"{where}: min and max: {wrong[0]!r} is not {number}")
    if len(ends) == 2 and ends[0] > ends[1]:
        raise ValueError(f"{where}: min={ends[0]} is above max={ends[1]}; swap them")
    if kind == "log_uniform_values" and ends and min(ends) <= 0:
        raise ValueError(f"{where}: min={min(ends)}: log_uniform_values is for numbers above 0")


def _fixed(path: Path, command: Any) -> tuple[str, ...]:
    usual = f"[{', '.join(MACROS)}, ..., {ARGUMENTS}]"
    if not isinstance(command, list) or tuple(command[:4]) != MACROS or command[-1] != ARGUMENTS:
        raise ValueError(f"{path}: command must be {usual}, so that parameters arrive as Hydra's overrides")
    fixed = tuple(str(each) for each in command[4:-1])
    for each in fixed:
        if each.startswith("${") or "=" not in each:
            raise ValueError(f"{path}: command: {each!r} is no override, such as logger=wandb")
    return fixed


def overrides(sweep: Sweep, cell: Cell) -> list[str]:
    """What Hydra is given for a cell, exactly as W&B's agent gives it: ``None`` for null, ``True`` for true."""
    return [*sweep.fixed, *(f"{key}={value}" for key, value in cell.items())]


class Outcome(NamedTuple):
    """What became of a training: the content of its ``result.json``, or the line that says why there is none."""

    result: dict[str, Any] | None
    failure: str | None


def run(arguments: Sequence[str], folder: Path, timeout: float | None = None) -> Outcome:
    """Train in a process of its own, which ends with this one; what it says goes to ``log.txt``.

    Args:
        arguments: Hydra's overrides for ``recipes.train``.
        folder: of the run; made where it is not there.
        timeout: seconds after which it is ended, with its ranks; None: never.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).unlink(missing_ok=True)
    start_lineage()
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
    command = [sys.executable, "-m", "recipes.train", *arguments, f"hydra.run.dir={quoted(str(folder))}"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Outcome(None, f"ended after {timeout:g} s")
        except BaseException:
            process.terminate()
            raise
    if code == 0 and (result := read_result(folder)) is not None:
        return Outcome(result, None)
    return Outcome(None, _why(folder / "log.txt", code))


def _why(log: Path, code: int) -> str:
    """The line that says what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [
        line for line in lines if "HYDRA_FULL_ERROR=1 for a complete" not in line and not line.startswith("wandb:")
    ]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b|In '[^']*':|Could not", line)]
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    return (errors or lines or [ended])[-1].removesuffix(" (HYDRA_FULL_ERROR=1 shows where)")


def spelled(cell: Cell) -> str:
    """A cell for people: ``compressor.density=0.01 seed=1``."""
    return " ".join(f"{key}={value}" for key, value in cell.items())
