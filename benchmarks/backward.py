"""Speed of sparse backward passes (meProp) against PyTorch's own.

    python -m benchmarks.backward                                # speed, on the CPU or --device cuda
    python -m benchmarks.backward --only 4096 --rounds 20        # cases whose label has this in it

Dense and sparse steps take turns in one process. Columns: the least milliseconds of each, their ratio, and the median
of the rounds' ratios, of the backward pass alone and of the whole training step (forward, backward, SGD).
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import nn

from benchmarks._arguments import above_zero, described, plain_errors, positive
from benchmarks._backward import speed
from benchmarks.harness.tables import show

CASES = [
    *(speed.linear(width, batch, 0.01) for width in (512, 1024, 2048, 4096) for batch in (32, 256, 1024)),
    speed.linear(8192, 32, 0.01),
    speed.linear(4096, 1024, 0.05),
    speed.linear(4096, 1024, 0.01, memory=0.5),
    speed.linear(8192, 1024, 8),
    speed.conv(128, 28, 32, 0.05),
    *(
        speed.recurrent(cell, width, batch, steps, 0.05, once)
        for cell in (nn.LSTM, nn.GRU)
        for width, batch, steps in ((512, 32, 20), (1024, 64, 10))
        for once in (False, True)
    ),
    speed.paper(500, 10, 80),
    speed.paper(500, 100, 80),
    speed.paper(500, 100, 80, memory=0.5),
    speed.paper(8192, 100, 80),
]
PAPERS = """The papers' figures: meProp, GPU, width 8192, batch 1024, k 8: backward 36.8 x; MNIST MLP with k 80, CPU: \
backward 5.9 x; with memory (arXiv:1905.10194), MNIST: backward 10.2 x, whole step 2.14 x. A whole step gains \
at most 3 x where the forward pass is a third of it."""


@plain_errors()
def main() -> None:
    """Measure what was asked for, and print tables."""
    parser = described(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="cases whose label contains this")
    parser.add_argument("--rounds", type=positive, default=30)
    parser.add_argument("--seconds", type=above_zero, default=6.0, help="of each case")
    given = parser.parse_args()
    head = ("case", *(f"{of} {what}" for of in ("backward", "step") for what in ("dense", "sparse", "x", "~x")))
    cases = [case for case in CASES if given.only in case.label]
    device = torch.device(given.device)
    show(head, [speed.measure(case, given.rounds, given.seconds, device) for case in cases], width=140)
    Console(width=140).print(PAPERS)


if __name__ == "__main__":
    main()
