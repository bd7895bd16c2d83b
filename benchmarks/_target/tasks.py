"""What is trained, how long, and with which learning rates."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks._target.training import Data, MakeData

MOST = 1.5
"""Times the budget after which a run has missed its target."""


@dataclass(frozen=True)
class Task:
    """How long and with what a task is trained, and on which links it is timed.

    Args:
        name: one letter.
        title: for people.
        of: where its ``training.Data`` is: a module of this package, a colon, and a class.
        lines: of the map, by their names in ``methods``; empty: all that train any model.
        ranks: how many train.
        budget: batches of a rank after which dense runs set the target; every run gets ``MOST`` times as many.
        rates: learning rates that every method tries; the grid grows by a factor of 2 where the best is at its edge.
        seeds: of runs at the best rate; the first one chooses it.
        every: batches between two evaluations.
        decay: of the moving average of the weights that is evaluated, per batch.
        links: rates of links, as tc writes them.
        round_trips: milliseconds that are added to each link's own.
        optimizer: which kind, for ``advise``.
        timed_s: seconds for which each row of step times is measured at least, in each round.
    """

    name: str
    title: str
    of: str = "characters:Characters"
    lines: tuple[str, ...] = ()
    ranks: int = 4
    budget: int = 1000
    rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2)
    seeds: tuple[int, ...] = (0, 1, 2)
    every: int = 25
    decay: float = 0.99
    links: tuple[str, ...] = ("10mbit", "20mbit", "50mbit", "100mbit", "200mbit", "500mbit", "1gbit")
    round_trips: tuple[float, ...] = (0.0, 10.0)
    optimizer: Literal["sgd", "adam"] = "adam"
    timed_s: float = 2.5

    def data(self, root: Path) -> Data:
        """Read the task's data from a folder."""
        # by name: no rank imports, and no cell depends on, what other tasks need
        make: MakeData = pkgutil.resolve_name(f"benchmarks._target.{self.of}")
        return make(root)

    @property
    def module(self) -> str:
        """Name of the module that has its data, which its cells depend on."""
        return f"benchmarks._target.{self.of.partition(':')[0]}"

    @property
    def most(self) -> int:
        """Batches after which a run has missed its target."""
        return int(MOST * self.budget)


FAST = ("100mbit", "200mbit", "500mbit", "1gbit")
TASKS = {
    "a": Task("a", "character LSTM, 0.43 M parameters, AdamW"),
    "b": Task(
        "b",
        "Transformer, 16 M parameters, Adam",
        "translation:Translation",
        (
            *("DDP 25 MB", "fp16 hook", "PowerSGD hook 4", "qsgd 4", "rotated 4", "onebit"),
            "DiLoCo 30, rotated 4",
        ),
        rates=(1e-3,),
        seeds=(0, 1),
        links=FAST,
        round_trips=(0.0,),
        timed_s=10.0,
    ),
    "c": Task(
        "c",
        "MLP, 1.8 M parameters, SGD",
        "pictures:Pictures",
        (
            *("DDP 25 MB", "fp16 hook", "PowerSGD hook 4", "post-local SGD 16", "sufficient factors"),
            *("sufficient factors, bf16", "rotated 4", "onebit", "topk 1 %", "local SGD 8, rotated 4"),
        ),
        rates=(1e-2, 2e-2, 4e-2),
        links=FAST,
        round_trips=(0.0,),
        optimizer="sgd",
    ),
}
"""B has one rate, the better of 0.0005 and 0.001 in 125 dense batches: a run takes two cores 15 minutes."""
