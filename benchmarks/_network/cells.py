"""One cell of a table: measured, taken down, or played again."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks._network.trace import quicker
from benchmarks.harness.lab import Lab, bits_per_second
from benchmarks.harness.launch import run_ranks

Found = dict[str, Any]


def measure(ranks: int, rate: str | None, delay_ms: float = 0.0, **told: Any) -> Found:
    """Median milliseconds of a step, bytes on the wire and by formula, by method; the round trip, measured.

    Args:
        ranks: how many.
        rate: of each link; None: not limited.
        delay_ms: that a round trip takes at least.
        **told: see ``rank.Measuring``.

    Raises:
        RuntimeError: a rank failed; carries what it wrote.
    """
    with Lab(ranks, rate, delay_ms) as lab:
        found = run_ranks(lab, told)[0]
    found.pop("traces", None)
    return found


def record(ranks: int, rate: str | None, delay_ms: float = 0.0, *, one_by_one: bool, **told: Any) -> Found:
    """``measure``, and ``traces``: by method, of each rank.

    With ``one_by_one`` ranks take turns to compute, so that each is timed as if it had the machine for itself.

    Raises:
        RuntimeError: a rank failed; carries what it wrote.
        ValueError: a rank could not take a method down.
    """
    with tempfile.NamedTemporaryFile() as turn, Lab(ranks, rate, delay_ms) as lab:
        found = run_ranks(lab, told | {"record": True, "turn": turn.name if one_by_one else None})
    traces = {name: [each["traces"][name] for each in found] for name in told["methods"]}
    of = {"model": told["model"], "ranks": ranks, "rate": rate, "one_by_one": one_by_one}
    return found[0] | {"traces": traces} | of


def replay(
    recorded: Found,
    rate: str,
    slow: float,
    faster: float,
    steps: int,
    methods: list[str],
    delay_ms: float = 0.0,
) -> Found:
    """Play what ``record`` found over links of ``rate``.

    Args:
        recorded: what ``record`` returned.
        rate: of the links that are stood for.
        slow: everything, the links too, takes so many times as long; the times are divided by it again.
        faster: computing takes so many times less than it was recorded.
        steps: to take the median of.
        methods: to play; all of them were recorded.
        delay_ms: a round trip over the links that are stood for.

    Raises:
        RuntimeError: a rank failed; carries what it wrote.
    """
    traces = {name: [quicker(each, faster) for each in recorded["traces"][name]] for name in methods}
    told = {"model": recorded["model"], "traces": traces, "factor": slow, "steps": steps}
    with Lab(recorded["ranks"], f"{bits_per_second(rate) / slow:.0f}bit", delay_ms * slow) as lab:
        found = run_ranks(lab, told)
    return (
        found[0]
        | {"ping_ms": found[0]["ping_ms"] and found[0]["ping_ms"] / slow}
        | {"late": {name: max(each["late"][name] for each in found) for name in found[0]["late"]}}
    )
