"""When fragments of a model are sent, and when what comes back is used: functions of the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number, or less."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer, {least} or more")


@dataclass(frozen=True)
class Rounds:
    """The rounds of local steps. Steps count from 1; fragments synchronise in turn, evenly spread over a round.

    Args:
        sync_every: local steps in a round, in which every fragment is sent once.
        fragments: parts of the model that are sent at different steps (Streaming DiLoCo, Douillard et al., 2025,
            arXiv:2501.18512); the last one at the end of a round.
        delay: steps that go on while a fragment travels, less than ``sync_every``; 0: the ranks wait for it.
        alpha: the share of what the rank has by then, in what it goes on from: 0 takes the synchronised fragment.

    Raises:
        ValueError: a value is out of range.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        whole("sync_every", self.sync_every, 1)
        whole("fragments", self.fragments, 1)
        whole("delay", self.delay, 0)
        if self.fragments > self.sync_every:
            raise ValueError(
                f"fragments={self.fragments} must be at most sync_every={self.sync_every}: one is sent in a step"
            )
        if self.delay >= self.sync_every:
            raise ValueError(
                f"delay={self.delay} must be less than sync_every={self.sync_every}: a fragment has to be back before "
                "it is sent again"
            )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 <= self.alpha < 1:
            raise ValueError(f"alpha={self.alpha!r} must be in [0, 1); 0 takes what was synchronised")
        if self.alpha and not self.delay:
            raise ValueError(f"alpha={self.alpha!r} blends with what was learned during delay=0 steps; set alpha=0")

    def sent(self, step: int) -> list[int]:
        """Numbers of the fragments that are sent after this step."""
        if step < 1:
            return []
        place, every, parts = step % self.sync_every, self.sync_every, self.fragments
        return [number for number in range(parts) if ((number + 1) * every // parts) % every == place]

    def due(self, step: int) -> list[int]:
        """Numbers of the fragments that are used after this step."""
        return self.sent(step - self.delay)


def split(sizes: Sequence[int], parts: int) -> list[slice]:
    """Runs of about equal sums, none of them empty.

    Args:
        sizes: at least as many as parts.
        parts: how many runs.

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
