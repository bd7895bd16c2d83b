"""Everything that wants a GPU, in one go: tests, codecs, steps, and a training.

    python -m benchmarks.gpu --seconds 1500 --out found --data data
    python -m benchmarks.gpu --part large codecs --codecs onebit,efsign --seconds 540 --out found

Needs no network, and writes ``<part>.txt`` and ``<part>.json`` (of steps also ``trace.json.gz``) to a folder. A part
that fails, hangs or takes too long does not end the others: each is a process with a share of the seconds, and what one
leaves the next ones have. The ends of all texts are printed last; the exit status is 1 if a part that was named failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._arguments import described
from recipes.tables.lineage import exit_on_sigterm

SHARES = {"kernels": 2, "tests": 3, "large": 1, "codecs": 4, "step": 4, "train": 9}
"""Of the seconds, in the order in which the parts are run."""
TAIL = {"kernels": 25, "tests": 25, "large": 10, "codecs": 70, "step": 70, "train": 15}
"""Lines of each text that are printed."""
SPARE = 10.0
"""Seconds that a part is told to end before it is ended."""
TESTS = Path(__file__).parent.parent / "tests"
LARGE = TESTS / "gpu" / "test_large.py"


def commands(part: str, seconds: float, out: Path, data: Path, codecs: str | None = None) -> list[list[str]]:
    """What a part runs, one after the other.

    Args:
        part: one of ``SHARES``.
        seconds: for all of it.
        out: folder for JSON.
        data: folder that holds CIFAR-10.
        codecs: which ones, by commas; None: all.
    """
    if part in ("kernels", "tests", "large"):
        # Warnings of other versions are no errors here; and what was found is told before the time is up.
        told = ["-v", "--tb=short", "-W", "default", "--timeout=400", f"--session-timeout={max(1, seconds - 20):.0f}"]
        pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", *told]
        if part == "kernels":
            compiled = TESTS / "triton" / "test_compiled.py"  # which needs no GPU
            spread = ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal", "--ignore", str(compiled)]
            return [[*pytest, *spread, "-m", "", str(TESTS / "triton")]]  # the thorough ones too
        if part == "large":
            return [[*pytest, "-m", "gpu", str(LARGE)]]
        return [[*pytest, "-n", str(max(1, (os.cpu_count() or 1) // 3)), "-m", "gpu", *marked()]]
    limits = ["--seconds", f"{seconds:.0f}", "--json", str(out / f"{part}.json")]
    module = {"codecs": "benchmarks.codecs", "step": "benchmarks.step", "train": "benchmarks._gpu.train"}[part]
    extra = {
        "codecs": ["--device", "cuda", *(["--codecs", codecs] if codecs else [])],
        "step": ["--device", "cuda", "--trace", str(out / "trace.json.gz")],
        "train": ["--data", str(data)],
    }[part]
    return [["-m", module, *limits, *extra]]


def marked() -> list[str]:
    """Files with tests that need a GPU, but the large: others may need modules that a machine with a GPU has not."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    return [str(path) for path in files if path != LARGE]


def run(made: list[list[str]], deadline: float, text: Path) -> list[str]:
    """Run commands of Python with their output in a file, each for a share of the time; returns how they ended."""
    ends = []
    with text.open("w") as file:
        for number, command in enumerate(made):
            seconds = (deadline - time.monotonic()) / (len(made) - number)
            process = subprocess.Popen(
                [sys.executable, "-u", *command],
                cwd=TESTS.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ends.append(str(process.wait(max(1.0, seconds))))
            except subprocess.TimeoutExpired:
                ends.append("ended, out of time")
            finally:
                _end(process)
    return ends


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it, its own processes too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main(make: Callable[..., list[list[str]]] = commands) -> None:
    """Run the parts that were asked for, and print the end of what each said."""
    parser = described(__doc__)
    parser.add_argument("--part", nargs="+", choices=SHARES, help="which ones (default: all)")
    parser.add_argument("--seconds", type=float, default=1500, help="for all of it (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder to write to (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds CIFAR-10's binary version")
    parser.add_argument("--codecs", help="of the part codecs, which ones, by commas (default: all)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    out, data = arguments.out.resolve(), arguments.data.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    parts, ended = [part for part in SHARES if part in (arguments.part or SHARES)], {}
    for number, part in enumerate(parts):
        share = SHARES[part] / sum(SHARES[each] for each in parts[number:])
        seconds = share * (end - time.monotonic())
        made = make(part, max(5.0, seconds - SPARE), out, data, arguments.codecs)
        ended[part] = run(made, time.monotonic() + seconds, out / f"{part}.txt")
    for part in parts:
        lines = (out / f"{part}.txt").read_text(errors="replace").splitlines()
        print("\n".join([f"== {part}", *lines[-TAIL[part] :]]))
    print("ended with", "; ".join(f"{part}: {', '.join(each)}" for part, each in ended.items()))
    if arguments.part and any(set(each) != {"0"} for each in ended.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
