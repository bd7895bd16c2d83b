"""Time to the same quality, for every method on every link: batches to a target times what a batch takes.

    python -m benchmarks.time_to_target --part steps --root data --minutes 170
    sudo python -m benchmarks.time_to_target --part times --root data --minutes 90
    python -m benchmarks.time_to_target --part table --csv map.csv --plot map.png --front front.png

Task a: a character LSTM (0.43 M parameters, AdamW, 16 excerpts of 64 characters a rank and batch) reads the English
captions of Multi30k. Task b: a Transformer (16 M parameters, Adam, 256 pieces) translates them. Task c: an MLP (1.8 M
parameters, SGD, 16 pictures) learns CIFAR-10. All train on 4 ranks. Every run has a constant learning rate; a moving
average of the weights is evaluated every 25 batches. A method's rate is the one of three that reaches the final target
first with seed 0, on one half of the held-out data; where it is at the edge of the grid, the grid grows by a factor of
2. Everything else is told of the other half, with three seeds. (Task b has one rate and two seeds.) Targets come from
the dense runs: their loss at 80 % of the budget of 1,000 batches, and 1 % above their loss at its end. A run
ends after 1.5 times the budget; a miss counts as that, is shown, and never wins. A rate that is slower than another
one, with seed 0, is not run to its end; a method that misses the final target with seed 0 has no other seeds.

``steps`` trains over this machine's loopback interface, and times nothing. ``times`` measures every phase of every
method over links of a set speed, as ``benchmarks.network`` does (Linux, root, iproute2), and refuses a machine that is
busy. ``table`` composes both: the sum over phases of batches times the time of a batch. A phase is, for example,
PowerSGD's dense start. It takes the cells that are there, whichever code made them.

Each training run, and each link, is a JSON file in docs/results/time_to_target. It is found by its settings and holds
until the code that it depends on changes. What is there is not repeated, so every part may be interrupted. Training
runs of earlier code are kept if today's repeats the beginning of one of each method: losses within 0.1 %, as compiled
kernels round differently on another machine. Step times of earlier code are kept if six rows, measured again, differ by
15 % or less, as they are or over computing alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks._arguments import above_zero, described, file_to_write, plain_errors, some_of
from benchmarks._target.drawn import draw, draw_front
from benchmarks._target.parts import Clock, measure, table, train
from benchmarks._target.show import front_table, write_csv
from benchmarks._target.steps import Steps
from benchmarks._target.store import FOLDER, Store
from benchmarks._target.tasks import TASKS
from benchmarks._target.times import Times


def parse() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--part", choices=("steps", "times", "table"), required=True)
    add("--task", type=some_of(TASKS), default=["a"], help=f"some of {','.join(TASKS)}, by commas (a)")
    add("--root", type=Path, help="folder that holds multi30k, or cifar-10-batches-bin; for all but table")
    add("--minutes", type=above_zero, help="start nothing that will not end within so many")
    add("--folder", type=Path, default=FOLDER, help="of the cells (docs/results/time_to_target)")
    add("--links", type=lambda text: text.split(","), default=[], help="rates of links, by commas (all); for times")
    add("--plot", type=file_to_write, help="draw the map of the final target, a PNG; for table")
    add("--front", type=file_to_write, help="draw four lines of the first task, a PNG; for table")
    add("--csv", type=file_to_write, help="write every method on every link; for table")
    arguments = parser.parse_args()
    if arguments.part != "table" and arguments.root is None:
        parser.error(f"--root: give the folder that holds the data; --part {arguments.part} reads it")
    if arguments.part == "table" and (arguments.minutes or arguments.root):
        parser.error("--root and --minutes change nothing with --part table; leave them out")
    links = dict.fromkeys(link for name in arguments.task for link in TASKS[name].links)
    if (arguments.part != "times" and arguments.links) or set(arguments.links) - set(links):
        parser.error(f"--links {','.join(arguments.links)}: of --part times, some of {','.join(links)}")
    if arguments.part != "table" and (arguments.plot or arguments.front or arguments.csv):
        parser.error(f"--plot, --front and --csv are for --part table, not for {arguments.part}")
    return arguments


@plain_errors()
def main() -> None:
    """Do one part for each task."""
    arguments = parse()
    store = Store(arguments.folder, any_code=arguments.part == "table")
    clock, maps, failed = Clock(arguments.minutes), {}, 0
    for task in (TASKS[name] for name in arguments.task):
        steps, times = Steps(task, store), Times(task, store)
        if arguments.part == "steps":
            failed += train(steps, arguments.root, clock)
        elif arguments.part == "times":
            measure(times, arguments.root, clock, arguments.links)
        else:
            maps[task.title] = table(steps, times)
    if failed:
        raise RuntimeError(f"{failed} training runs failed; the others are kept")
    if arguments.csv:
        write_csv(maps, arguments.csv)
    if arguments.plot:
        draw(maps, "Time to the same loss on 4 ranks", arguments.plot)
    if arguments.front:
        print(front_table(maps))
        draw_front(maps[TASKS[arguments.task[0]].title][-1], arguments.front)


if __name__ == "__main__":
    main()
