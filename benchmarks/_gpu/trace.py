"""What a profiler's trace says of streams that work at the same time."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does, in a chrome trace."""
Span = tuple[float, float]


def overlap(path: Path) -> dict[str, Any]:
    """How much of what the second busiest stream does goes on while the busiest one works.

    Args:
        path: a chrome trace, as ``torch.profiler`` writes it; perhaps packed by gzip.

    Returns:
        ``main_ms`` and ``side_ms`` of work, ``overlapped``, the share of the side's that overlaps with the main
        stream's, and ``launches``, how many kernels and copies the side stream had; empty where one stream does all.
    """
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    streams: dict[Any, list[Span]] = defaultdict(list)
    for event in json.loads(text)["traceEvents"]:
        if event.get("cat") in WORK and "stream" in event.get("args", {}):
            streams[event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"]))
    busiest = sorted(streams.values(), key=total, reverse=True)
    if len(busiest) < 2:
        return {}
    main, side = merged(busiest[0]), busiest[1]
    together = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in side for begin, stop in main)
    figures = {"main_ms": total(main) / 1e3, "side_ms": total(side) / 1e3}
    return figures | {"overlapped": together / total(side), "launches": len(side)}


def total(spans: list[Span]) -> float:
    """Their lengths, added up."""
    return sum(end - start for start, end in spans)


def merged(spans: list[Span]) -> list[Span]:
    """The same time, without overlaps, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
