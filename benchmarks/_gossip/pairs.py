"""What an average of two models costs the CPUs of both ranks, without a network between them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.contrib.asynchronous.links import Links, Message
from lightning_compress.contrib.asynchronous.modulo_pairs import ModuloAverage
from lightning_compress.contrib.asynchronous.pairwise import CODES, MODEL, PairwiseAverage
from lightning_compress.contrib.asynchronous.shared_model import SharedModel
from lightning_compress.gossip.moniqua import Moniqua

CPU = torch.device("cpu")
FLOAT = "float32"
METHODS: dict[str, tuple[Callable[[SharedModel], PairwiseAverage], int]] = {
    FLOAT: (PairwiseAverage, MODEL),
    "Moniqua, 8 bits": (lambda model: ModuloAverage(model, Moniqua(8)), CODES),
    "Moniqua, 4 bits": (lambda model: ModuloAverage(model, Moniqua(4)), CODES),
}
"""How an average is made, and the kind of its questions. Moniqua's first question, and some later ones, are MODEL."""
PARTS = ("ask", "answer", "move")
"""The asker reads its model and makes a question; the other rank answers and moves; the asker moves, too."""
APART = 1e-3
"""Largest difference of a parameter between the two models."""
WARM = 3
"""Averages that do not count: the first is in float32, in the second one kernels are compiled."""


class _Loop:
    """A link to a rank of this process, that keeps the time between the parts apart.

    Args:
        other: the average of the rank that is asked.

    Attributes:
        kind: of the last question.
    """

    rank = 0

    def __init__(self, other: PairwiseAverage) -> None:
        self._other, self.kind, self._marks = other, 0, list[float]()

    def ask(self, peer: int, kind: int, clock: int = 0, number: float = 0.0, parts: Sequence[Tensor] = ()) -> Message:
        """See ``Links.ask``."""
        asked, body = time.process_time(), _joined(parts)
        start = time.process_time()
        reply = self._other.answer(self.rank, Message(kind, clock, number, body))
        answered, body, self.kind = time.process_time(), _joined(reply.parts), kind
        self._marks = [asked, start, answered, time.process_time()]
        return Message(reply.kind, reply.clock, reply.number, body)

    def time(self, pairs: PairwiseAverage) -> list[float]:
        """Ask once, and return the milliseconds of ``PARTS``."""
        begin = time.process_time()
        pairs.ask(cast(Links, self), 1)
        asked, start, answered, received = self._marks
        return [1e3 * each for each in (asked - begin, answered - start, time.process_time() - received)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.view(-1).view(torch.uint8) for each in parts])


def measure(numel: int, rounds: int, path: Path | None) -> dict[str, Any]:
    """Time all methods by kernels (numba) and by tensor operations (torch); printed, and written to a JSON file.

    Args:
        numel: parameters of a model.
        rounds: questions of each method; a copy of a model is timed before each.
        path: of the JSON file.

    Returns:
        ``numel``, ``rounds``, milliseconds of the least copy (``copy_ms``), and ``rows``: the method, what it was
        computed ``by``, and for each of ``PARTS`` the ``least`` and the ``median`` of its milliseconds of CPU time.
    """
    copies, rows = list[float](), []
    fast = [(method, "auto", "numba") for method in METHODS if kernels.compiler(CPU) and method != FLOAT]
    for method, choice, by in [*fast, *((method, "torch", "torch") for method in METHODS)]:
        with kernels.using(choice):
            times = zip(*_time(method, numel, rounds, copies), strict=True)
        parts = {
            part: {"least": min(each), "median": statistics.median(each)}
            for part, each in zip(PARTS, times, strict=True)
        }
        rows.append({"method": method, "by": by, **parts})
    found = {"numel": numel, "rounds": rounds, "copy_ms": min(copies), "rows": rows}
    Console(width=110).print(_table(found))
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")
    return found


def _time(method: str, numel: int, rounds: int, copies: list[float]) -> list[list[float]]:
    """Return the milliseconds of ``PARTS`` in each round, and add those of copies."""
    make, kind = METHODS[method]
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(numel, generator=generator)
    change = APART * (2 * torch.rand(numel, generator=generator) - 1)
    room, theirs = torch.empty_like(own), own + change
    loop, pairs = _Loop(make(SharedModel([theirs]))), make(SharedModel([own]))
    for _ in range(WARM):
        loop.time(pairs)
        own.add_(change.neg_())
    found: list[list[float]] = []
    while len(found) < rounds:
        start = time.process_time()
        room.copy_(own)
        copies.append(1e3 * (time.process_time() - start))
        spans = loop.time(pairs)
        if loop.kind == kind:
            found.append(spans)
        own.add_(change.neg_())
    return found


def _table(found: dict[str, Any]) -> Table:
    title = (
        f"one average of {found['numel']:,} parameters: CPU time in ms, least (median) of {found['rounds']} rounds; "
        f"a copy takes {found['copy_ms']:.1f} ms"
    )
    table = Table("method", "by", *PARTS, *(f"{part} / copy" for part in PARTS), title=title)
    for row in found["rows"]:
        times = [row[part] for part in PARTS]
        shown = [f"{each['least']:.1f} ({each['median']:.1f})" for each in times]
        ratios = [f"{each['least'] / found['copy_ms']:.1f}" for each in times]
        table.add_row(row["method"], row["by"], *shown, *ratios)
    return table
