"""What ``benchmarks.network`` may be told, and what goes together."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks._arguments import above_zero, described, file_to_write, natural, positive, positives
from benchmarks._network.hooks import PYTORCH
from benchmarks._network.methods import BESIDE_LOCAL, FACTORS, OURS, SETS, delayed, make, settings
from benchmarks._network.plot import panels
from benchmarks._network.trace import DENSE
from benchmarks.harness.lab import bits_per_second, check_delay
from benchmarks.harness.models import MODELS

REPLAYED = [*DENSE, "bf16", "onebit", "rotated", "topk 1 %", "dgc 0.1 %", "powersgd 1"]
ONLY_WITH = {"contended": {"record"}, "slow": {"replay", "validate"}, "faster": {"replay", "validate"}}
"""Options, and the tasks that they are for."""
NOT_WITH = [
    ("methods", "set"),
    *((name, "replay") for name in ("ranks", "model", "rounds", "warm")),
    *(("asleep_ms", name) for name in ("record", "replay", "validate", "rounds")),
]
"""Options that do not go together: a recording has its ranks and its model; what sleeps does so in one round."""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """What may be given."""
    parser = described(description)
    add, everything = parser.add_argument, ",".join([*PYTORCH, *OURS, *FACTORS])
    add("--ranks", type=positives, default=[4], help="one number or several, by commas (4)")
    add("--rates", "--rate", default="1gbit", help="of each link, as tc writes it, by commas; none: not limited")
    add("--delay-ms", type=float, default=0.0, help="that a round trip takes at least; 0: none is added")
    add("--asleep-ms", type=above_zero, help="computing is a sleep of so long, so that cores are free for messages")
    add("--model", choices=MODELS, default="mlp")
    add("--methods", help=f"names, or JSON of attach()'s arguments, by commas; {everything}".replace("%", "%%"))
    add("--set", help=f"methods to compare, in place of --methods: {', '.join(SETS)} (at equal bits), local; by commas")
    add("--steps", type=positive, default=20)
    add("--rounds", type=positive, default=2, help="the steps are done in so many rounds")
    add("--warm", type=natural, default=4, help="steps in each round before those that count")
    add("--json", type=file_to_write, help="write the figures here, after each cell")
    add("--plot", type=file_to_write, help="draw step time against rate and ranks, a PNG")
    add("--measured", type=Path, help="show the figures that --json wrote to this file, in place of measuring")
    add("--record", type=file_to_write, help="take the steps of one cell down to this file")
    add("--contended", action="store_true", help="recorded ranks compute at once, not one by one")
    add("--replay", type=Path, help="play a recorded file")
    add("--validate", action="store_true", help="record as ranks contend, replay, and compare")
    add("--slow", type=above_zero, help="factor of a replay; 10 x --faster, if not given")
    add("--faster", type=above_zero, default=1.0, help="a replayed machine computes so many times faster")
    return parser


def parse(description: str | None = None) -> argparse.Namespace:
    """The command line, checked before anything is built."""
    parser = command_line(description)
    arguments = parser.parse_args()
    given = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
    try:
        check_effects(given)
        check(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return arguments


def check_effects(given: set[str]) -> None:
    """Refuse what would change nothing.

    Args:
        given: names of the options that are not as they are by default.

    Raises:
        ValueError: one of them has no effect beside the others.
    """
    if len(tasks := sorted(given & {"record", "replay", "validate"})) > 1:
        raise ValueError(f"--{' and --'.join(tasks)} are different tasks; give one")
    for name, needed in ONLY_WITH.items():
        if name in given and not given & needed:
            raise ValueError(f"--{name} changes nothing without --{' or --'.join(sorted(needed))}")
    for name, other in NOT_WITH:
        if {name, other} <= given:
            raise ValueError(f"--{name} changes nothing beside --{other}; leave one of them out")


def check(arguments: argparse.Namespace) -> None:
    """Turn what was given into lists, and refuse what cannot be run.

    Raises:
        ValueError: an argument is none of those allowed.
    """
    arguments.rates = arguments.rates.split(",")
    check_delay(arguments.delay_ms)
    arguments.slow = arguments.slow or 10 * arguments.faster
    if arguments.replay:
        arguments.recorded = recording(arguments.replay)
        arguments.ranks, arguments.model = [arguments.recorded["ranks"]], arguments.recorded["model"]
    elif arguments.steps < arguments.rounds:
        raise ValueError(f"--steps {arguments.steps}: at least one a round, so --rounds {arguments.steps} at most")
    if (arguments.record or arguments.validate) and arguments.warm < 2:
        raise ValueError(f"--warm {arguments.warm}: the ranks rebuild their buckets in the second step; give 2 or more")
    for rate in arguments.rates:
        if rate != "none":
            bits_per_second(rate)
        elif arguments.replay or arguments.validate:
            raise ValueError("a replay needs links of a set speed, --rates 1gbit")
    cells = [{"ranks": ranks, "rate": rate} for ranks in arguments.ranks for rate in arguments.rates]
    if arguments.record and len(cells) > 1:
        raise ValueError("--record keeps one cell; give one number of --ranks and one of --rates")
    if arguments.measured:
        cells = arguments.cells = json.loads(arguments.measured.read_text())["cells"]
    if arguments.plot:
        panels(cells)
    arguments.methods = chosen_methods(arguments)


def recording(path: Path) -> dict[str, Any]:
    """What ``--record`` wrote.

    Raises:
        ValueError: something else is in the file.
    """
    try:
        found: Any = json.loads(path.read_text())
    except ValueError:  # no JSON
        found = None
    if not isinstance(found, dict) or "traces" not in found:
        raise ValueError(f"--replay {path}: it holds no recorded steps; give a file that --record wrote")
    return found


def chosen_methods(arguments: argparse.Namespace) -> list[str]:
    """The methods that were asked for, or that there are for the task.

    Raises:
        ValueError: one of them is none, or none of the task's.
    """
    sets = arguments.set.split(",") if arguments.set else []
    if unknown := [each for each in sets if each not in (*SETS, "local")]:
        raise ValueError(f"--set {unknown[0]} is none of {', '.join(SETS)}, local")
    taking = arguments.record or arguments.validate
    if sets:
        named = [name for each in sets for name in (BESIDE_LOCAL if each == "local" else SETS[each])]
        rivals = [*DENSE] if taking or arguments.replay else [*DENSE, "PyTorch PowerSGD 1"]
        chosen = [*rivals, *named]
    elif arguments.methods:
        chosen = names(arguments.methods)
    elif arguments.replay:
        chosen = list(arguments.recorded["traces"])
    else:
        chosen = REPLAYED if taking else [*PYTORCH, *OURS, *FACTORS]
    for name in chosen:
        make(name)
        check_method(name, arguments)
    return chosen


def check_method(name: str, arguments: argparse.Namespace) -> None:
    """Refuse a method that is none of the task's.

    Raises:
        ValueError: it is so.
    """
    if (arguments.record or arguments.validate) and settings(name) is None and name not in DENSE:
        raise ValueError(
            f"{name} cannot be recorded; of those that are none of attach's, these can: {', '.join(DENSE)}"
        )
    if (arguments.record or arguments.validate or arguments.replay) and delayed(name):
        raise ValueError(
            f"{name} cannot be recorded or replayed, because its averages travel beside the next step; measure it "
            "without --record, --validate and --replay"
        )
    if arguments.replay and name not in arguments.recorded["traces"]:
        raise ValueError(f"{name} was not recorded in {arguments.replay}: {', '.join(arguments.recorded['traces'])}")


def names(given: str) -> list[str]:
    """Split at commas that are not inside of JSON."""
    parts, depth = [""], 0
    for letter in given:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
