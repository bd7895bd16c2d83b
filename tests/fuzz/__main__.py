"""A longer run: ``python -m tests.fuzz --seconds 600 --seed 7``, or one input again: ``--again NAME NUMBER ROUND``."""

import argparse

from tests.fuzz.decoding import randomness
from tests.fuzz.running import makers, run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--again", nargs=3, metavar=("NAME", "NUMBER", "ROUND"))
    arguments = parser.parse_args()
    if arguments.again:
        name, number, round = arguments.again
        random = randomness(arguments.seed, name, int(number), int(round))
        print("refused" if makers()[name, int(number)](name, int(number)).attempt(random) else "read")
        return 0
    tried, refused, failures = run(arguments.seed, arguments.seconds)
    for name in tried:
        print(f"{name:24} {tried[name]:8,} tried {refused[name]:8,} refused")
    print(f"{'together':24} {tried.total():8,} tried {refused.total():8,} refused, {len(failures)} failures")
    for each in failures:
        print(each)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
