"""Speed of the codecs on one thread of a CPU, or on a GPU, against ``copy_`` of the vector.

    python -m benchmarks.codecs --codecs onebit,topk --json codecs.json
    python -m benchmarks.codecs --device cuda --seconds 300 --json codecs.json

All that is measured takes turns. On a CPU the least thread CPU time counts, so that a busy machine does little harm. On
a GPU the median counts, for a bucket of 25 MB and a vector of 1 GB, with kernels and with tensor operations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._arguments import above_zero, file_to_write, positive, some_of
from benchmarks._codecs import CASES, ON_CPUS, Case, plan_of, transforms_of
from benchmarks._gpu import codecs_table
from benchmarks._gpu.machine import surroundings
from benchmarks.harness.results import write
from benchmarks.harness.tables import show
from lightning_compress.codecs import Plan
from lightning_compress.core.layout import Layout


def measure(cases: dict[str, Case], numel: int, repeats: int) -> dict[str, Any]:
    """Time every case on N(0, 1).

    Args:
        cases: codecs and corrected codecs by the name to show.
        numel: length of the vector, which is laid out as one parameter.
        repeats: rounds; the least time of all counts.

    Returns:
        Milliseconds of ``copy_``, and of each case ``encode_ms`` (residual included), ``decode_ms`` (accumulating one
        message), ``four_ms`` (accumulating four), all as ratios to ``copy_`` too; of a spectral codec ``forward_ms``
        and ``inverse_ms``, the transforms that these include; bits per element, and the relative squared error.
    """
    source = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    vector, out = torch.empty_like(source), torch.zeros_like(source)
    device, layout = torch.device("cpu"), Layout.of([("weight", (numel,))])
    plans = {name: plan_of(case, layout, device) for name, case in cases.items()}
    messages = {name: torch.empty(4, plan.message_size, dtype=torch.uint8) for name, plan in plans.items()}
    transforms = {name: transforms_of(case, numel) for name, case in cases.items()}
    times: dict[tuple[str, str], list[float]] = {}
    errors = {}
    for key in range(repeats):
        _time(times, ("copy", ""), vector.copy_, source)
        for name, plan in plans.items():
            vector.copy_(source)
            _time(times, (name, "encode"), _encode, plan, vector, messages[name][0], key)
            if key == 0:
                errors[name] = float(vector.double().square().sum() / source.double().square().sum())
            messages[name][1:] = messages[name][0]
            _time(times, (name, "decode"), plan.decode, messages[name][:1, : plan.used], out, 1.0, True)
            _time(times, (name, "four"), plan.decode, messages[name][:, : plan.used], out, 1.0, True)
            for part, transform in transforms[name].items():
                _time(times, (name, part), transform)
    copy = min(times["copy", ""])
    rows = []
    for name, plan in plans.items():
        least = {part: min(times[name, part]) for part in ("encode", "decode", "four", *transforms[name])}
        rows.append(
            {
                "codec": name,
                "settings": repr(cases[name]),
                **{f"{part}_ms": ms for part, ms in least.items()},
                **{f"{part}_ratio": ms / copy for part, ms in least.items()},
                "bits_per_element": 8 * plan.used / numel,
                "relative_error": errors[name],
            }
        )
    return {"copy_ms": copy, "codecs": rows}


def main() -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--numel", type=positive, help="elements of the vector (default: 2^23; on a GPU 25 MB and 1 GB)")
    add("--repeats", type=positive, default=20, help="rounds, at the most on a GPU (default: 20)")
    add("--seconds", type=above_zero, default=600, help="for all of it, on a GPU (default: %(default)s)")
    add("--json", type=file_to_write, metavar="FILE", help="write the figures there too")
    every = CASES | ON_CPUS
    add("--codecs", type=some_of(every), help=f"some of {', '.join(every)}, by commas (default: all)")
    args = parser.parse_args()
    if args.device == "cuda" and set(args.codecs or ()) & set(ON_CPUS):
        parser.error(f"--codecs {', '.join(ON_CPUS)}: these run on a CPU only")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here; --device cpu measures on the CPU")
    if args.device == "cuda":
        codecs_table.main(args.codecs, args.numel, args.repeats, args.seconds, args.json)
        return
    torch.set_num_threads(1)
    numel = args.numel or 1 << 23
    result = surroundings(torch.device("cpu")) | {"numel": numel, "repeats": args.repeats}
    result |= measure({name: every[name] for name in args.codecs or every}, numel, args.repeats)
    _show(result)
    write(args.json, result)


def _encode(plan: Plan, vector: Tensor, message: Tensor, key: int) -> None:
    """As in a step, in which all ranks draw the same first."""
    plan.share(key)
    plan.encode(vector, message, key)


def _time(
    times: dict[tuple[str, str], list[float]], name: tuple[str, str], function: Callable[..., object], *args: object
) -> None:
    start = time.thread_time()
    function(*args)
    times.setdefault(name, []).append(1e3 * (time.thread_time() - start))


def _show(result: dict[str, Any]) -> None:
    title = f"{result['numel']:,} elements, one thread; copy_ takes {result['copy_ms']:.2f} ms"
    caption = f"bits per element, squared error on N(0, 1); {result['device']}, {result['software']}"
    rows = (
        (
            row["codec"],
            *(f"{row[f'{part}_{unit}']:.2f}" for part in ("encode", "decode", "four") for unit in ("ms", "ratio")),
            *(f"{row[f'{part}_ratio']:.2f}" if f"{part}_ratio" in row else "" for part in ("forward", "inverse")),
            f"{row['bits_per_element']:.3f}",
            f"{row['relative_error']:.2g}",
        )
        for row in result["codecs"]
    )
    times = (f"{part} {unit}" for part in ("encode", "decode", "decode 4") for unit in ("ms", "/ copy_"))
    transforms = "forward / copy_", "inverse / copy_"
    show(("codec", *times, *transforms, "bits", "error"), rows, title, caption, words=1)


if __name__ == "__main__":
    main()
