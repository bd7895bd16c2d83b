"""What ``lightning-compress advise --script`` measures of a script, as its processes write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WARM, FEWEST, MOST = 5, 5, 30
"""Steps that do not count; those that do, at least and at most."""
SECONDS = 20.0
"""Steps that count may take this long, beyond ``FEWEST``."""


@dataclass(frozen=True)
class ScriptSteps:
    """What a script's steps showed.

    Args:
        compute_ms: milliseconds of an optimizer step without communication.
        optimizer: its kind, as ``advise`` takes it.
        parameters: names and shapes of what is trained.
        ready: the part of a step after which each gradient is complete, 0 to 1; None: it was not used.
        steps: that were measured.
        batches: that are accumulated in a step.
        dtype: of the parameters.
        device: "cpu", or the name of the GPU.
        cores_per_rank: CPU cores of each process.
        rank: of this process.
        ranks: that trained.
        link: of the ranks, ``latency_s`` and ``bytes_per_s``; None: there was one rank.
        one_machine: no message left this machine.
    """

    compute_ms: float
    optimizer: str
    parameters: Sequence[tuple[str, Sequence[int]]]
    ready: Sequence[float | None]
    steps: int
    batches: int
    dtype: str
    device: str
    cores_per_rank: float
    rank: int
    ranks: int
    link: Mapping[str, float] | None = None
    one_machine: bool = False
