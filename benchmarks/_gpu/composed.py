"""What a step would take on a cluster, composed of a GPU's codec times, the bytes of messages and a link's rate.

    python -m benchmarks._gpu.composed                   # the FFT paper's cluster: 8 GPUs, InfiniBand FDR
    python -m benchmarks._gpu.composed --gbits 10

One formula: computing + encoding + decoding 8 messages + 7 messages / rate, without overlap. DDP sends 7/4 of its
gradient, and encodes nothing. Nobody measured such a step.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks._arguments import above_zero, described, plain_errors, positive
from benchmarks._network.methods import PAPER
from benchmarks.harness.tables import show

NUMEL = 61_100_840
"""AlexNet's parameters."""
METHODS: dict[str, tuple[str, float | None]] = {
    "fft": ("fft", None),
    "qsgd": ("qsgd", None),
    "terngrad": ("qsgd", 2.0),
    "topk": ("topk", 64 * 0.15),
}
"""Whose times stand for a method, and its bits if they are others: TernGrad has no kernels, so QSGD's stand for them;
top-k was timed at 1 %, not at the paper's density. Both are too short."""
RANKS = 8
"""As many messages as were decoded."""
FASTER = {name: float(factor) for name, factor in PAPER.items()}


@plain_errors()
def main() -> None:
    """Print milliseconds of the parts, and by what factor a step with fft is faster."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--gbits", type=above_zero, default=54.5, help="that a rank sends in a second; InfiniBand FDR's data rate")
    add("--numel", type=positive, default=NUMEL)
    add("--measured", type=Path, default=Path("docs/results/gpu/codecs_25mb.json"), help="codec times")
    given = parser.parse_args()
    measured = {row["codec"]: row for row in json.loads(given.measured.read_text())["rows"]}
    ms = 8e3 / (1e9 * given.gbits)  # of a byte
    parts = {"DDP": (32.0, 0.0, ms * 8 * given.numel * (RANKS - 1) / RANKS)}
    for name, (codec, bits) in METHODS.items():
        row = measured[codec]
        times = sum(row["kernels"][part]["ms"] for part in ("encode_sum", "decode_8"))
        bits = bits or row["kernels"]["bits"]
        parts[name] = bits, times * given.numel / row["numel"], ms * given.numel * bits / 8 * (RANKS - 1)
    totals = {name: codec + sent for name, (_, codec, sent) in parts.items()}
    computing = (totals["DDP"] - FASTER["DDP"] * totals["fft"]) / (FASTER["DDP"] - 1)
    rows = []
    for name in parts:
        ratios = ((more + totals[name]) / (more + totals["fft"]) for more in (0.0, max(0.0, computing)))
        said = (f"{each:.2f} x" for each in (*ratios, *([FASTER[name]] if name in FASTER else [])))
        rows.append((name, *(f"{each:.1f}" for each in parts[name]), *said))
    head = ("method", "bits", "codec, ms", "sent, ms", "/ fft", f"and {computing:.1f} ms computing", "in the paper")
    title = f"composed, not measured: {RANKS} ranks, {given.gbits:g} Gbit/s, {given.numel:,} parameters"
    show(head, [(*row, "")[: len(head)] for row in rows], title, width=110)


if __name__ == "__main__":
    main()
