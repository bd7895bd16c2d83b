"""Everything that wants a GPU, in one go: tests, codecs, steps, and a training.

    python -m benchmarks.gpu --seconds 1500 --out found --data data
    python -m benchmarks.gpu --part codecs step --seconds 540 --out found

Needs no network, and writes ``<part>.txt`` and ``<part>.json`` (of steps also ``trace.json.gz``) to a folder. A part
that fails, hangs or takes too long does not end the others: each is a process with a share of the seconds, and what one
leaves the next ones have. The ends of all texts are printed last.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SHARES = {"tests": 3, "codecs": 4, "step": 4, "train": 9}
"""Of the seconds, in the order in which the parts are run."""
TAIL = {"tests": 25, "codecs": 70, "step": 70, "train": 15}
"""Lines of each text that are printed."""
SPARE = 10.0
"""Seconds that a part is told to end before it is ended."""
TESTS = Path(__file__).parent.parent / "tests"


def commands(part: str, seconds: float, out: Path, data: Path) -> list[list[str]]:
    """What a part runs, one after the other.

    Args:
        part: one of ``SHARES``.
        seconds: for all of it.
        out: folder for JSON.
        data: folder that holds CIFAR-10.
    """
    if part == "tests":
        # Warnings of other versions are no errors here; and what was found is told before the time is up.
        told = [
            "-v",
            "--tb=short",
            "-W",
            "default",
            "--timeout=400",
            f"--session-timeout={max(1, seconds / 2 - 20):.0f}",
        ]
        pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", *told]
        own = [[*pytest, "-m", "gpu", *files]] if (files := marked()) else []
        compiled = TESTS / "triton" / "test_compiled.py"  # which needs no GPU
        spread = ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal", "--ignore", str(compiled)]
        return [*own, [*pytest, *spread, str(TESTS / "triton")]]
    limits = ["--seconds", f"{seconds:.0f}", "--json", str(out / f"{part}.json")]
    module = {"codecs": "benchmarks.codecs", "step": "benchmarks.step", "train": "benchmarks._gpu.train"}[part]
    extra = {
        "codecs": ["--device", "cuda"],
        "step": ["--device", "cuda", "--trace", str(out / "trace.json.gz")],
        "train": ["--data", str(data)],
    }[part]
    return [["-m", module, *limits, *extra]]


def marked() -> list[str]:
    """Files with tests that need a GPU: others may need modules that a machine with a GPU has not."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    folder = TESTS / "gpu"
    return [str(path) for path in files if folder not in path.parents] + ([str(folder)] if folder.is_dir() else [])


def run(part: str, made: list[list[str]], deadline: float, text: Path) -> str:
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
    return f"{part}: {', '.join(ends)}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it, its own processes too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main(make: Callable[[str, float, Path, Path], list[list[str]]] = commands) -> None:
    """Run the parts that were asked for, and print the end of what each said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--seconds", type=float, default=1500, help="for all of it (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder to write to (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds CIFAR-10's binary version")
    arguments = parser.parse_args()
    out, data = arguments.out.resolve(), arguments.data.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    left, ended = [part for part in SHARES if part in arguments.part], []
    for part in list(left):
        share = SHARES[part] / sum(SHARES[each] for each in left)
        seconds = share * (end - time.monotonic())
        left.remove(part)
        made = make(part, max(5.0, seconds - SPARE), out, data)
        ended.append(run(part, made, time.monotonic() + seconds, out / f"{part}.txt"))
    for part in (each for each in SHARES if each in arguments.part):
        lines = (out / f"{part}.txt").read_text(errors="replace").splitlines()
        print("\n".join([f"== {part}", *lines[-TAIL[part] :]]))
    print("ended with", "; ".join(ended))


if __name__ == "__main__":
    main()
