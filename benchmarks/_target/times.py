"""Step times: a cell is a link's rate and its round trip, with all rows measured in turn in the network lab."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._target.methods import DENSE, FREE, Run, rows_of
from benchmarks._target.store import Store, digest
from benchmarks._target.tasks import Task
from benchmarks.harness.lab import Lab, bits_per_second
from benchmarks.harness.launch import run_ranks

BUSY = 0.1
"""Share of the machine's time that others may take when a measurement begins."""
PATIENCE = 30
"""Seconds to wait until they take less."""
AGAIN = (FREE, DENSE, "PowerSGD hook 4", "rotated 4", "onebit", "local SGD 8, rotated 4")
"""Rows that are measured again where the code has changed."""
SAME = 0.15
"""Share by which they may differ: so do two measurements of one row."""
GUESS_S = 600.0
"""Seconds of a cell, as long as none was measured."""


@dataclass(frozen=True)
class Place:
    """A link, and how long each row is measured on it.

    Args:
        rate: as tc writes it.
        delay_ms: that a round trip takes at least.
        rounds: in which all rows take turns.
        warm: cycles of each round that do not count.
        seconds: of a row's round at least, after its warm cycles.
    """

    rate: str
    delay_ms: float
    rounds: int = 2
    warm: int = 3
    seconds: float = 2.5

    @property
    def name(self) -> str:
        """For people, and the beginning of the file's name."""
        return f"{self.rate}, {self.delay_ms:g} ms"


class Times:
    """The step times of a task.

    Args:
        task: which.
        store: where cells are.
    """

    def __init__(self, task: Task, store: Store) -> None:
        self.task, self._store = task, store
        self.places = [Place(rate, ms, seconds=task.timed_s) for ms in task.round_trips for rate in task.links]
        self.rows: dict[str, Run] = rows_of(task)

    def get(self, place: Place) -> dict[str, Any] | None:
        """Return what was measured on a link, None if it is missing."""
        if self._store.any_code:
            return self._store.of_any_code(*self._named(place))[1]
        return self._store.get(*self._key(place))

    def missing(self) -> Iterator[Place]:
        """Yield links that are not measured."""
        yield from (place for place in self.places if self.get(place) is None)

    def kept(self, place: Place, root: Path) -> bool:
        """Return whether a few rows take as long as earlier code took on a link; what it measured then stays.

        Raises:
            RuntimeError: see ``measure``.
        """
        _, earlier = self._store.of_any_code(*self._named(place))
        if earlier is None:
            return False
        again = self._timed(place, root, [name for name in AGAIN if name in self.rows])["ms"]
        same = all(_alike(again, earlier["ms"], name) for name in again)
        if same:
            self._store.put(*self._key(place), earlier)
        return same

    def measure(self, place: Place, root: Path) -> dict[str, Any]:
        """Measure all rows on a link, and keep it.

        Raises:
            RuntimeError: the machine is busy, the lab cannot be built, or a rank failed.
        """
        found = self._timed(place, root, list(self.rows))
        self._store.put(*self._key(place), found)
        return found

    def _timed(self, place: Place, root: Path, names: list[str]) -> dict[str, Any]:
        lab = Lab(self.task.ranks, place.rate, place.delay_ms)
        wait_until_idle()
        told = {"task": self.task.name, "rows": names, "root": str(root.absolute())}
        told |= {name: value for name, value in asdict(place).items() if name not in ("rate", "delay_ms")}
        start = time.perf_counter()
        with lab:
            found = run_ranks(lab, told, "benchmarks._target.rank")[0]
        return found | {"seconds": round(time.perf_counter() - start, 1), "cores": os.cpu_count() or 1}

    def _named(self, place: Place) -> tuple[str, str, Any]:
        settings = {"task": self.task.name, "ranks": self.task.ranks, **asdict(place), "rows": self.rows}
        return f"{self.task.name}/times", place.name, settings

    def _key(self, place: Place) -> tuple[str, str, Any, str]:
        by = sorted({f"_target.{run['by']}" for run in self.rows.values()})
        parts = ("_target.rank", *by, "harness.lab", "harness.launch", "harness.rank")
        code = digest(self.task.module, *(f"benchmarks.{each}" for each in parts))
        return *self._named(place), code


def _alike(now: dict[str, float], earlier: dict[str, float], name: str) -> bool:
    """Return whether a row takes as long as before, or as many times as long as computing does: machines vary."""
    ratio = now[name] / earlier[name]
    return min(abs(ratio - 1), abs(ratio * earlier[FREE] / now[FREE] - 1)) <= SAME


def kappa(place: Place, found: dict[str, Any], ranks: int) -> float:
    """Return how long float32's bytes take on the link, over how long a batch computes."""
    sent: float = 2 * (ranks - 1) / ranks * 4 * found["parameters"]
    alone: float = found["ms"][FREE]
    return 8e3 * sent / bits_per_second(place.rate) / alone


def wait_until_idle() -> None:
    """Wait for a while until other programs leave the machine alone.

    Raises:
        RuntimeError: they do not.
    """
    if all((share := busy()) > BUSY for _ in range(PATIENCE)):
        raise RuntimeError(f"other programs take {share:.0%} of this machine; step times need it idle")


def busy(seconds: float = 1.0) -> float:
    """Return the share of all cores' time that was not idle; 0 where the kernel does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0

    def ticks() -> tuple[int, int]:
        fields = [int(each) for each in stat.read_text().split("\n", 1)[0].split()[1:]]
        return sum(fields[:8]), fields[3] + fields[4]

    whole, idle = ticks()
    time.sleep(seconds)
    later, idle_later = ticks()
    return 1 - (idle_later - idle) / max(1, later - whole)
