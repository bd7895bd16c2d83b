"""Training steps over links of a set speed: ours beside DistributedDataParallel and PyTorch's own hooks.

    sudo python -m benchmarks.network --ranks 4 --rate 1gbit
    sudo python -m benchmarks.network --rate 100mbit --model alexnet --methods 'DDP,dgc 0.1 %,{"compressor": "fft"}'
    sudo python -m benchmarks.network --ranks 2,4,8 --rates 100mbit,1gbit,10gbit --plot steps.png --json steps.json
    sudo python -m benchmarks.network --model alexnet --set 2_bits,4_bits,papers
    sudo python -m benchmarks.network --rate 100mbit --set local --model transformer --steps 60
    sudo python -m benchmarks.network --rate 1gbit --set delay              # averages applied at once and a step later
    sudo python -m benchmarks.network --model resnet20 --rate 100mbit --set delay --asleep-ms 100  # with cores to spare
    sudo python -m benchmarks.network --rate 100mbit --delay-ms 10          # a round trip of 10 ms: sites far apart
    sudo python -m benchmarks.network --trainer --model resnet20 --methods bf16,onebit --delay-ms 10

Linux and root: each rank gets a network namespace, a link to a bridge, and a token bucket (tc tbf) in both directions;
everything is taken down again, also after Ctrl-C. iproute2 is needed. Methods take turns, in rounds; medians of all
steps of rank 0, whose interface counts what it sends, TCP, IP and Ethernet headers included. A delay is made by a
process that carries frames from link to link; the table says what a byte there and back takes. With ``--trainer`` our
methods train by Lightning, each with and without its broadcast of a flag in every batch, which the strategy replaces.
A title's kappa is the time that DDP's bytes take at the links' rate, over that of a step without communication: far
below 1 messages can hide behind computing, far above 1 a step costs what it sends.

Ranks that share two cores wait for each other, and cannot fill a fast link. So steps can be recorded, each rank
computing alone, and played again with sleeps in place of computing, over links of any speed, all slowed by one factor:

    sudo python -m benchmarks.network --record mlp.json --ranks 4
    sudo python -m benchmarks.network --replay mlp.json --rates 1gbit,10gbit,25gbit
    sudo python -m benchmarks.network --replay mlp.json --rates 10gbit,25gbit --faster 8   # if computed 8 times faster
    sudo python -m benchmarks.network --validate --rate 1gbit                              # played against measured
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks._arguments import above_zero, file_to_write, natural, plain_errors, positive, positives
from benchmarks._network.cells import measure, record, replay
from benchmarks._network.hooks import PYTORCH
from benchmarks._network.methods import BESIDE_LOCAL, FACTORS, OURS, SETS, delayed, make, settings
from benchmarks._network.plot import draw, panels
from benchmarks._network.show import show, show_paper, title
from benchmarks._network.trace import DENSE
from benchmarks.harness.lab import bits_per_second, check_delay
from benchmarks.harness.models import MODELS

REPLAYED = [*DENSE, "bf16", "onebit", "rotated", "topk 1 %", "dgc 0.1 %", "powersgd 1"]
ONLY_WITH = {"contended": {"record"}, "slow": {"replay", "validate"}, "faster": {"replay", "validate"}}
"""Options, and the tasks that they are for."""
NOT_WITH = [
    ("methods", "set"),
    *((name, "replay") for name in ("ranks", "model", "rounds", "warm")),
    *(("asleep_ms", name) for name in ("trainer", "record", "replay", "validate", "rounds")),
]
"""Options that do not go together: a recording has its ranks and its model; what sleeps does so in one round."""


@plain_errors()
def main() -> None:
    """Measure and print the tables."""
    arguments = parse()
    cells = arguments.cells if arguments.measured else run(arguments)
    if arguments.plot:
        draw(cells, arguments.plot)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All the cells that were asked for, each printed, and written to the JSON file, when it is there."""
    cells = []
    for ranks in arguments.ranks:
        for rate in arguments.rates:
            for how, found in results(arguments, ranks, rate):
                cell = {"model": arguments.model, "ranks": ranks, "rate": rate, "delay_ms": arguments.delay_ms} | how
                show(found, title(cell | found))
                if any(name.startswith("fft, ") for name in arguments.methods):
                    show_paper(found, title(cell | found))
                cells.append(cell | found)
                if arguments.json:
                    arguments.json.write_text(json.dumps({"cells": cells}, indent=2))
    return cells


def results(arguments: argparse.Namespace, ranks: int, rate: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What one rank number and one rate give."""
    limit = None if rate == "none" else rate
    what = (arguments.model, arguments.methods, arguments.steps, arguments.rounds, arguments.warm)
    task = (ranks, limit, *what, arguments.delay_ms)
    if arguments.replay:
        how = f"computing {arguments.faster:g} x faster" if arguments.faster != 1 else "computing as recorded"
        return [({"how": f"replayed, {how}"}, played(arguments, arguments.recorded, rate))]
    if arguments.record:
        found = record(*task, one_by_one=not arguments.contended)
        arguments.record.write_text(json.dumps(found))
        del found["traces"]
        return [({"how": "recorded"}, found)]
    if arguments.validate:
        return [({"how": "replayed"}, played(arguments, record(*task, one_by_one=False), rate))]
    said = {"how": f"computing emulated by a sleep of {arguments.asleep_ms:g} ms"} if arguments.asleep_ms else {}
    return [(said, measure(*task, "fit" if arguments.trainer else "rank", arguments.asleep_ms))]


def played(arguments: argparse.Namespace, recorded: dict[str, Any], rate: str) -> dict[str, Any]:
    """A replay, beside the steps that were recorded where they were such steps."""
    given = arguments.slow, arguments.faster, arguments.steps, arguments.methods, arguments.delay_ms
    found = replay(recorded, rate, *given)
    alike = recorded["rate"] == rate and not recorded["one_by_one"] and arguments.faster == 1
    return found | ({"real": recorded["ms"]} if alike else {})


def command_line() -> argparse.ArgumentParser:
    """What may be given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, everything = parser.add_argument, ",".join([*PYTORCH, *OURS, *FACTORS])
    add("--ranks", type=positives, default=[4], help="one number or several, by commas (4)")
    add("--rates", "--rate", default="1gbit", help="of each link, as tc writes it, by commas; none: not limited")
    add("--delay-ms", type=float, default=0.0, help="that a round trip takes at least; 0: none is added")
    add("--asleep-ms", type=above_zero, help="computing is a sleep of so long, so that cores are free for messages")
    add("--trainer", action="store_true", help="train by Lightning, with and without its broadcast in every batch")
    add("--model", choices=MODELS, default="mlp")
    add("--methods", help=f"names, or JSON of attach()'s arguments, by commas; {everything}".replace("%", "%%"))
    add("--set", help=f"methods to compare, in place of --methods: {', '.join(SETS)} (at equal bits), local; by commas")
    add("--steps", type=positive, default=20)
    add("--rounds", type=positive, default=2, help="the steps are done in so many rounds")
    add("--warm", type=natural, default=4, help="steps in each round before those that count")
    add("--json", type=file_to_write, help="write the figures here, after each cell")
    add("--plot", type=file_to_write, help="draw step time against rate and ranks, a PNG")
    add("--measured", type=Path, help="draw the figures that --json wrote to this file, in place of measuring")
    add("--record", type=file_to_write, help="take the steps of one cell down to this file")
    add("--contended", action="store_true", help="recorded ranks compute at once, not one by one")
    add("--replay", type=Path, help="play a recorded file")
    add("--validate", action="store_true", help="record as ranks contend, replay, and compare")
    add("--slow", type=above_zero, help="factor of a replay; 10 x --faster, if not given")
    add("--faster", type=above_zero, default=1.0, help="a replayed machine computes so many times faster")
    return parser


def parse() -> argparse.Namespace:
    """The command line, checked before anything is built."""
    parser = command_line()
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
    if "trainer" in given and tasks:
        raise ValueError("--trainer measures, and records and replays nothing; give one of them")
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
    if arguments.trainer and not arguments.warm:
        raise ValueError("--warm 0: with --trainer a step counts from the end of the one before it; give 1 or more")
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
        chosen = named if arguments.trainer else [*rivals, *named]
    elif arguments.methods:
        chosen = names(arguments.methods)
    elif arguments.replay:
        chosen = list(arguments.recorded["traces"])
    else:
        chosen = REPLAYED if taking else list(OURS) if arguments.trainer else [*PYTORCH, *OURS, *FACTORS]
    for name in chosen:
        make(name)
        check_method(name, arguments)
    return chosen


def check_method(name: str, arguments: argparse.Namespace) -> None:
    """Refuse a method that is none of the task's.

    Raises:
        ValueError: it is so.
    """
    if arguments.trainer and settings(name) is None:
        raise ValueError(f"{name} is none of CompressedDDPStrategy's; with --trainer, these are: {', '.join(OURS)}")
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


if __name__ == "__main__":
    main()
