"""What is trained, how long, and with which learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks._target.characters import Characters
from benchmarks._target.training import MakeData

MOST = 1.5
"""Times the budget after which a run has missed its target."""


@dataclass(frozen=True)
class Task:
    """How long and with what a task is trained.

    Args:
        name: one letter.
        title: for people.
        data: takes the folder of the data; see ``training.Data``. Its module is a part of what cells depend on.
        ranks: how many train.
        budget: batches of a rank after which dense runs set the target; every run gets ``MOST`` times as many.
        rates: learning rates that every method tries; the grid grows by a factor of 2 where the best is at its edge.
        seeds: of runs at the best rate; the first one chooses it.
        every: batches between two evaluations.
        decay: of the moving average of the weights that is evaluated, per batch.
    """

    name: str
    title: str
    data: MakeData = Characters
    ranks: int = 4
    budget: int = 1000
    rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2)
    seeds: tuple[int, ...] = (0, 1, 2)
    every: int = 25
    decay: float = 0.99

    @property
    def most(self) -> int:
        """Batches after which a run has missed its target."""
        return int(MOST * self.budget)


TASKS = {"a": Task("a", "character LSTM, 0.43 M parameters, AdamW")}
