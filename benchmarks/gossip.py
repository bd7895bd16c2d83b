"""Gossip: what it does to accuracy, and what it costs on a slow link.

    python -m benchmarks.gossip accuracy --root data --csv docs/results/gossip_accuracy.csv --ranks 4,8 --seeds 0,1,2

    sudo python -m benchmarks.gossip network --ranks 8 --rate 100mbit --delays 0,10 --json gossip.json
    sudo python -m benchmarks.gossip network --ranks 8 --rate 100mbit --last 10mbit --delays 0     # uneven links

For accuracy ranks are threads of one process. A run is a row of the CSV file, written when it ends; those that are
there are not run again, so that it may be interrupted. All methods have the same steps, batches, first weights and
learning rates. Titles of ``network`` say kappa, as those of ``benchmarks.network``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks._arguments import above_zero, file_to_write, plain_errors, positive, positives
from benchmarks._gossip import accuracy, network
from benchmarks._gossip.methods import METHODS


@plain_errors()
def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    torch.set_num_threads(1)
    if arguments.what == "network":
        delays = [float(each) for each in arguments.delays.split(",")]
        given = arguments.numel, arguments.compute_ms, arguments.steps, arguments.json, arguments.last
        network.measure(arguments.ranks, arguments.rate, delays, *given)
        return
    settings = {name: getattr(arguments, name) for name in ("steps", "images", "batch", "rate", "tested")}
    seeds, methods = [int(each) for each in arguments.seeds.split(",")], arguments.methods or list(METHODS)
    accuracy.measure(arguments.csv, arguments.root, methods, arguments.ranks, seeds, **settings)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    large = parts.add_parser("accuracy", help="ResNet-20 on CIFAR-10")
    add = large.add_argument
    add("--root", type=Path, required=True, help="folder that holds cifar-10-batches-bin")
    add("--csv", type=Path, required=True, help="results so far")
    add("--methods", nargs="+", choices=METHODS)
    add("--ranks", type=positives, default=[4, 8], help="by commas (4,8)")
    add("--seeds", default="0,1,2", help="by commas")
    add("--steps", type=positive, default=800, help="optimizer steps of each rank")
    add("--images", type=positive, default=10_000, help="of the training set")
    add("--tested", type=positive, default=10_000, help="of the test set")
    add("--batch", type=positive, default=128, help="images a step, over all ranks")
    add("--rate", type=above_zero, default=0.1, help="the first learning rate; it falls to 0 as a cosine")
    links = parts.add_parser("network", help="steps over slow links, in the network lab")
    add = links.add_argument
    add("--ranks", type=positive, default=8)
    add("--rate", default="100mbit", help="of each link, as tc writes it")
    add("--last", help="of the last rank's link, if it is another one")
    add("--delays", default="0,10", help="milliseconds that a round trip takes at least, by commas")
    add("--numel", type=positive, default=269_722, help="parameters; ResNet-20 has 269,722, ResNet-110 1.7 million")
    add("--compute-ms", type=float, default=50.0, help="what a step computes, asleep")
    add("--steps", type=positive, default=64)
    add("--json", type=file_to_write, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
