"""How long collectives over Gloo take, in multiples of what their bytes take on the link: 1 is full duplex.

    sudo python -m benchmarks.duplex --ranks 2,4 --rates 50mbit,1gbit --megabytes 4

Each rank has a network namespace and a link with a token bucket in each direction (``benchmarks.network`` says more).
The time is the slowest rank's, a median; the bytes are those that its interface counted, headers included.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from benchmarks._arguments import above_zero, plain_errors, positive, positives
from benchmarks._network.collective_times import COLLECTIVES
from benchmarks._network.lab import Lab, bits_per_second
from benchmarks._network.launch import run_ranks

MODULE = "benchmarks._network.collective_times"


@plain_errors()
def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positives, default=[2, 4], help="how many, by commas (default: 2,4)")
    parser.add_argument("--rates", default="50mbit,1gbit", help="of the links, by commas (default: %(default)s)")
    parser.add_argument("--megabytes", type=above_zero, default=4.0, help="of each message (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="of each collective (default: %(default)s)")
    arguments = parser.parse_args()
    table = Table("ranks", "rate", *COLLECTIVES, title=f"time over bytes, {arguments.megabytes:g} MB")
    for ranks in arguments.ranks:
        for rate in arguments.rates.split(","):
            found = ratios(ranks, rate, int(arguments.megabytes * 1e6), arguments.repeats)
            table.add_row(str(ranks), rate, *(f"{found[name]:.2f}" for name in COLLECTIVES))
    Console().print(table)


def ratios(ranks: int, rate: str, size: int, repeats: int) -> dict[str, float]:
    """The time of each collective, divided by the time that its bytes take.

    Args:
        ranks: how many, from 2 on.
        rate: of each link, such as ``"1gbit"``.
        size: bytes of a message.
        repeats: how often each is measured.

    Raises:
        ValueError: there is one rank, or no such rate.
        RuntimeError: there can be no lab here.
    """
    if ranks < 2:
        raise ValueError(f"--ranks={ranks}: one rank sends nothing; give 2 or more")
    with Lab(ranks, rate) as lab:
        told = {"size": size, "repeats": repeats, "interface": lab.interface}
        found = run_ranks(lab, told, MODULE)
    worst = {name: [max(rank[name][place] for rank in found) for place in (0, 1)] for name in COLLECTIVES}
    return {name: seconds * bits_per_second(rate) / 8 / sent for name, (seconds, sent) in worst.items()}


if __name__ == "__main__":
    main()
