"""What the compiler makes of the kernels for GPUs: registers, spills, widths of loads and stores. Needs no GPU.

python -m benchmarks.kernels --codecs onebit,rotated --capability 90
"""

from __future__ import annotations

import argparse

from benchmarks._arguments import some_of
from benchmarks._gpu.compiled import GROUP, report
from benchmarks.harness.tables import show
from lightning_compress.codecs import CODECS


def main() -> None:
    """Compile and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    few = ["onebit", "efsign", GROUP]
    parser.add_argument("--codecs", type=some_of([*CODECS, GROUP]), default=few, help="which ones, by commas")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, times ten (default: %(default)s)")
    args = parser.parse_args()
    rows, title = report(args.codecs, args.capability), f"compute capability {args.capability / 10}"
    show(list(rows[0]) if rows else (), (map(str, row.values()) for row in rows), title)


if __name__ == "__main__":
    main()
