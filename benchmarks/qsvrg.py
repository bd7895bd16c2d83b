"""Distance from the optimum, epoch by epoch: SGD, QSGD, SVRG and QSVRG on a convex problem.

    python -m benchmarks.qsvrg
    python -m benchmarks.qsvrg --staleness 4 --rate 0.25

QSVRG (Alistarh et al., NIPS 2017, arXiv:1610.02132) is SVRG (Johnson and Zhang, NIPS 2013) whose ranks send their
corrected gradients through QSGD. The correction takes the same rows' gradient at the epoch's first point away, and adds
the full gradient there. So what is sent shrinks with the distance from the optimum, and with it the quantisation error:
a constant rate converges linearly. Without the correction, a constant rate ends at the noise of the minibatches. A
corrected step computes two gradients.

The problem is softmax regression on scikit-learn's digits with a squared penalty, 650 weights. Ranks are threads. Each
has its share of the rows. Gradients are encoded, travel by ``all_gather`` (float32: ``all_reduce``) and are decoded. An
epoch of SVRG begins with one full gradient in float32. Newton's method finds the optimum. With ``--staleness`` ranks do
not wait for each other in a step: each sends its steps to all others, and none is further ahead of the slowest than
that (``BoundedStaleness``). They meet at the end of an epoch.
"""

from __future__ import annotations

import torch

from benchmarks._arguments import above_zero, described, natural, plain_errors, positive
from benchmarks._qsvrg.problem import Problem
from benchmarks._qsvrg.training import Method, Training, distances, late_distances
from benchmarks.harness.tables import show
from lightning_compress.codecs import QSGD, Dense

METHODS = {
    "SGD": Method(Dense(), False),
    "QSGD 4 bits": Method(QSGD(4), False),
    "SVRG": Method(Dense(), True),
    "QSVRG 6 bits, l2": Method(QSGD(6, bucket=1024, norm="l2"), True),  # 31 levels > sqrt(650), as the paper's theorem
    "QSVRG 4 bits": Method(QSGD(4), True),
}


@plain_errors()
def main() -> None:
    """Train by every method and print the table."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--ranks", type=positive, default=4)
    add("--epochs", type=positive, default=Training.epochs)
    add("--steps", type=positive, default=Training.steps, help="of an epoch (default: %(default)s)")
    add("--batch", type=positive, default=Training.batch, help="rows of a rank and step (default: %(default)s)")
    add("--rate", type=above_zero, default=Training.rate, help="in units of 1 / smoothness (default: %(default)s)")
    add("--penalty", type=above_zero, default=0.1, help="of the squared weights (default: %(default)s)")
    add("--seed", type=natural, default=Training.seed)
    add("--staleness", type=natural, help="ranks may be so many steps ahead of the slowest; all at the same step")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    problem = Problem.of_digits(given.ranks, given.penalty)
    training = Training(given.epochs, given.steps, given.batch, given.rate, given.seed)
    found, bits = {}, {}
    for name in given.methods:
        what = problem, METHODS[name], given.ranks, training
        late = given.staleness is not None
        found[name], bits[name] = late_distances(*what, given.staleness) if late else distances(*what)
    title = f"{given.ranks} ranks, condition number {problem.smoothness / problem.penalty:.0f}"
    title += f", at most {given.staleness} steps ahead" if given.staleness is not None else ""
    epochs = [str(epoch) for epoch in range(1, given.epochs + 1)]
    rows = ((name, f"{bits[name]:.1f}", *(f"{value:.0e}" for value in each)) for name, each in found.items())
    head, caption = ("method", "bits", *epochs), "bits: what a rank sends for a weight and step, to all others together"
    show(head, rows, f"value above the optimum, by epoch: {title}", caption, width=130)


if __name__ == "__main__":
    main()
