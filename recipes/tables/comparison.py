"""What ``recipes.tables.results`` compares: an entry of ``results.yaml``, and the trainings that it stands for."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["Comparison", "Run"]

SHARED = ["trainer=cpu_2proc"]
"""Overrides of every run: two processes on this machine's CPU."""


@dataclass(frozen=True)
class Comparison:
    """One entry of ``recipes/tables/results.yaml``, whose head says what each field is."""

    name: str
    title: str
    run: list[str]
    methods: dict[str, list[str]]
    seeds: list[int]
    more_seeds: dict[str, list[int]] = field(default_factory=dict)
    note: str = ""
    data: list[str] = field(default_factory=list)
    needs: str = ""
    quick: list[str] = field(default_factory=list)

    def shortened(self) -> Comparison:
        """What stands for it with ``--quick``, where that has anything to show."""
        title, seeds = f"{self.title}: its quick form, which only shows that it runs", self.seeds[:1]
        return replace(self, title=title, note="", run=self.quick, seeds=seeds, more_seeds={}, data=[], needs="")

    def runs(self, data: Path | None) -> list[Run]:
        """All trainings, seed by seed; ``data`` is the folder of the public data sets."""
        private = [each.format(data=data) for each in self.data]
        further = sorted({seed for seeds in self.more_seeds.values() for seed in seeds})
        return [
            Run(self.name, method, settings, seed, [*SHARED, *self.run, *settings, f"seed={seed}"], private)
            for seed in [*self.seeds, *further]
            for method, settings in self.methods.items()
            if seed in self.seeds or seed in self.more_seeds.get(method, ())
        ]


@dataclass(frozen=True)
class Run:
    """One training of a comparison."""

    comparison: str
    method: str
    settings: list[str]
    """Overrides of the method alone."""
    seed: int
    overrides: list[str]
    """All that matter to the figures, in the order of the command line."""
    private: list[str]
    """Where this machine has the data."""

    @property
    def command(self) -> str:
        """What a reader would type: the run's key. It does not say where the data is."""
        return shlex.join(["python", "-m", "recipes.train", *self.overrides])
