"""Time a codec in one process, and in several at once: ranks that share cores wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from lightning_compress.commands.host import Crowd

LIMIT = 120.0
"""Seconds after which the processes are killed."""
TRIES = 3
"""Times that each figure is measured; the median counts."""


def measured(ranks: int) -> Crowd:
    """Return the codec's times in one of ``ranks`` processes and in all of them.

    Raises:
        RuntimeError: a process ended or took too long.
    """
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun's default
    words = [sys.executable, "-m", __name__]
    started = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(ranks)
    ]
    limit = threading.Timer(LIMIT, _kill, [started])
    limit.start()
    try:
        threads = [int(_heard(each)) for each in started]
        alone = [_milliseconds(started[:1]) for _ in range(TRIES)]
        together = [_milliseconds(started) for _ in range(TRIES)]
    finally:
        limit.cancel()
        _kill(started)
        for each in started:
            each.communicate()
    return Crowd(ranks, len(os.sched_getaffinity(0)), threads[0], sorted(alone)[1], sorted(together)[1])


def _milliseconds(processes: list[subprocess.Popen[str]]) -> float:
    """Return the slowest process's time when all of these begin at once."""
    for each in processes:
        assert each.stdin
        try:
            each.stdin.write("go\n")
            each.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError("a process that timed a codec ended early") from error
    return max(float(_heard(each)) for each in processes)


def _kill(processes: list[subprocess.Popen[str]]) -> None:
    for each in processes:
        each.kill()


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process that timed a codec ended early, or ran longer than {LIMIT:g} s")
    return line


def _work() -> None:
    """Say the number of threads, and then the milliseconds of a codec for each line that comes in."""
    import torch

    from lightning_compress.codecs import Codec
    from lightning_compress.planning.link import LARGE, time_codec
    from lightning_compress.settings.parsing import build_compressor

    device, codec = torch.device("cpu"), build_compressor("rotated")
    assert isinstance(codec, Codec)
    time_codec(codec, device)
    print(torch.get_num_threads(), flush=True)
    for _ in sys.stdin:
        speeds = time_codec(codec, device)
        print(1e3 * LARGE * (speeds.encode_s + speeds.decode_s), flush=True)


if __name__ == "__main__":
    _work()
