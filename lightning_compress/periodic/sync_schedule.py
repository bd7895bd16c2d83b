"""When the fragments of a model are sent and used. Everything here depends on the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError if ``value`` is not an integer, or is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer, {least} or more")


@dataclass(frozen=True)
class Rounds:
    """The rounds of local steps. Steps count from 1. Fragments synchronise in turn, evenly spread over a round.

    Args:
        sync_every: local steps in a round, in which every fragment is sent once.
        fragments: parts of the model that are sent at different steps (Streaming DiLoCo, Douillard et al., 2025,
            arXiv:2501.18512). The last one is sent at the end of a round.
        delay: local steps that continue while a fragment travels, in [0, ``sync_every``). With 0, the ranks wait.
        alpha: weight of the replica when a fragment is used after ``delay`` steps, in [0, 1); the anchor has the rest.
            0 uses the synchronised fragment alone.

    Raises:
        ValueError: a value is out of range.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        check_integer("sync_every", self.sync_every, 1)
        check_integer("fragments", self.fragments, 1)
        check_integer("delay", self.delay, 0)
        if self.fragments > self.sync_every:
            raise ValueError(
                f"fragments={self.fragments} must be at most sync_every={self.sync_every}: each step sends one fragment"
            )
        if self.delay >= self.sync_every:
            raise ValueError(
                f"delay={self.delay} must be less than sync_every={self.sync_every}: a fragment must arrive before it "
                "is sent again"
            )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 <= self.alpha < 1:
            raise ValueError(f"alpha={self.alpha!r} must be in [0, 1); 0 uses the synchronised fragment alone")
        if self.alpha and not self.delay:
            raise ValueError(f"alpha={self.alpha!r} needs a delay: it keeps a share of the delayed steps; set alpha=0")

    def sent(self, step: int) -> list[int]:
        """Return the indices of the fragments that are sent after this step."""
        if step < 1:
            return []
        place, every, parts = step % self.sync_every, self.sync_every, self.fragments
        return [number for number in range(parts) if ((number + 1) * every // parts) % every == place]

    def due(self, step: int) -> list[int]:
        """Return the indices of the fragments that are used after this step."""
        return self.sent(step - self.delay)


def split(sizes: Sequence[int], parts: int) -> list[slice]:
    """Cut a list into non-empty runs of about equal sums.

    Args:
        sizes: the numbers to add up.
        parts: number of runs, 1 or more.

    Returns:
        ``parts`` slices of ``sizes``, in order.

    Raises:
        ValueError: there are more parts than sizes.
    """
    if parts > len(sizes):
        raise ValueError(f"fragments={parts} must be at most {len(sizes)}, the number of trained parameters")
    runs: list[slice] = []
    start, total, whole = 0, 0, sum(sizes)
    for place, size in enumerate(sizes):
        total += size
        left = parts - len(runs) - 1
        full = total * parts >= whole * (len(runs) + 1)
        if left and (full or len(sizes) - place - 1 == left):
            runs.append(slice(start, place + 1))
            start = place + 1
    return [*runs, slice(start, len(sizes))]
