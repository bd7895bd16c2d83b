"""Training steps over links of a set speed: ours beside DistributedDataParallel and PyTorch's own hooks.

    sudo python -m benchmarks.network --ranks 4 --rate 1gbit
    sudo python -m benchmarks.network --rate 100mbit --model alexnet --methods 'DDP,dgc 0.1 %,{"compressor": "fft"}'
    sudo python -m benchmarks.network --ranks 2,4,8 --rates 100mbit,1gbit,10gbit --plot steps.png --json steps.json
    sudo python -m benchmarks.network --model alexnet --set 2_bits,4_bits,papers
    sudo python -m benchmarks.network --rate 100mbit --set local --model transformer --steps 60
    sudo python -m benchmarks.network --rate 1gbit --set delay              # averages applied at once and a step later
    sudo python -m benchmarks.network --model resnet20 --rate 100mbit --set delay --asleep-ms 100  # with cores to spare
    sudo python -m benchmarks.network --rate 100mbit --delay-ms 10          # a round trip of 10 ms: sites far apart

Linux and root: each rank gets a network namespace, a link to a bridge, and a token bucket (tc tbf) in both directions;
everything is taken down again, also after Ctrl-C. iproute2 is needed. Methods take turns, in rounds; medians of all
steps of rank 0, whose interface counts what it sends, TCP, IP and Ethernet headers included. A delay is made by a
process that carries frames from link to link; the table says what a byte there and back takes.
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
from typing import Any

from benchmarks._arguments import plain_errors
from benchmarks._network.arguments import parse
from benchmarks._network.cells import measure, record, replay
from benchmarks._network.plot import draw
from benchmarks._network.show import show, title
from benchmarks.harness.results import write


@plain_errors()
def main() -> None:
    """Measure and print the tables."""
    arguments = parse(__doc__)
    cells = arguments.cells if arguments.measured else run(arguments)
    for cell in cells:
        if arguments.measured and "wire_bytes" in cell:
            show(cell, title(cell))
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
                cells.append(cell | found)
                write(arguments.json, {"cells": cells})
    return cells


def results(arguments: argparse.Namespace, ranks: int, rate: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What one rank number and one rate give."""
    link = ranks, None if rate == "none" else rate, arguments.delay_ms
    told = {name: getattr(arguments, name) for name in ("model", "methods", "steps", "rounds", "warm")}
    if arguments.replay:
        how = f"computing {arguments.faster:g} x faster" if arguments.faster != 1 else "computing as recorded"
        return [({"how": f"replayed, {how}"}, played(arguments, arguments.recorded, rate))]
    if arguments.record:
        found = record(*link, one_by_one=not arguments.contended, **told)
        arguments.record.write_text(json.dumps(found))
        del found["traces"]
        return [({"how": "recorded"}, found)]
    if arguments.validate:
        return [({"how": "replayed"}, played(arguments, record(*link, one_by_one=False, **told), rate))]
    said = {"how": f"computing emulated by a sleep of {arguments.asleep_ms:g} ms"} if arguments.asleep_ms else {}
    return [(said, measure(*link, asleep_ms=arguments.asleep_ms, **told))]


def played(arguments: argparse.Namespace, recorded: dict[str, Any], rate: str) -> dict[str, Any]:
    """A replay, beside the steps that were recorded where they were such steps."""
    given = arguments.slow, arguments.faster, arguments.steps, arguments.methods, arguments.delay_ms
    found = replay(recorded, rate, *given)
    alike = recorded["rate"] == rate and not recorded["one_by_one"] and arguments.faster == 1
    return found | ({"real": recorded["ms"]} if alike else {})


if __name__ == "__main__":
    main()
