"""The k largest elements of the sum, found by its owners with a threshold that is used again and again.

Li, Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, arXiv 2201.07598.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import World
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.base import Exchange, ExchangePlan
from lightning_compress.exchanges.compact import check_fed_back, check_selective
from lightning_compress.exchanges.owners import OwnersPlan
from lightning_compress.exchanges.regions import Memory, declared
from lightning_compress.layout import Layout
from lightning_compress.message import Section
from lightning_compress.state import Declared, States


@dataclass(frozen=True)
class OkTopK(Exchange):
    """All-to-all of what was selected to the owners of regions; these send on the sums that reach a threshold.

    A rank sends about ``4 k (W - 1) / W`` words of four bytes, whatever the number of ranks and however little their
    selections overlap: k is the most that any rank selected of a section, and about k sums of each section are kept.
    The threshold is exact in every ``evaluate_every``-th step, in which all sums travel, and is used in the steps
    between. Where it kept more than 4 k / 3, the next one is the k-th largest of these, which everybody has (the
    authors' is 0.8 % more, which is late while residuals still grow); where fewer than 2 k / 3, it is 0.8 % less.

    Regions are cut where ranks selected equally much, as counted every ``rebalance_every`` steps: in 64 parts of each
    parameter, added up over the ranks. (The authors average the ranks' own boundaries.) What is sent dense stays whole.

    A rank that sent an element that was not kept takes it back into its residual, so that the sum over the ranks is
    exact, and a method with a momentum of its own (``dgc``) forgets it only where it was applied. It is another
    algorithm than the sum of what was selected; ``auto`` never chooses it. State, the same on all ranks: thresholds,
    counts and clocks, at most 66 numbers a parameter.

    Args:
        evaluate_every: steps from one exact threshold to the next, at least 1; the authors' 32.
        rebalance_every: steps from one choice of regions to the next, at least 1; the authors' 64.

    Raises:
        ValueError: one of them is no such number.
    """

    evaluate_every: int = 32
    rebalance_every: int = 64

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "rebalance_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1000:
                raise ValueError(f"OkTopK({name}={value!r}): it must be a number of steps from 1 to 1000")

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        check_selective("ok_topk", codec)
        check_fed_back("ok_topk", codec)

    def state(self, layout: Layout) -> Mapping[str, Declared]:
        """Thresholds, counts and clocks."""
        return declared(layout)

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        assert states is not None
        memory = Memory(sections, states, world.device)
        periods = (self.evaluate_every, self.rebalance_every)
        return OwnersPlan(sections, memory, periods, world)

    def plan_dense(
        self, sections: Sequence[Section], world: World, states: States | None = None
    ) -> ExchangePlan | None:
        """An all-reduce that remembers."""
        assert states is not None
        dense = [replace(section, codec=Dense()) for section in sections]
        return _Remembering(AllReduce().plan(dense, world), Memory(sections, states, world.device))


class _Remembering(ExchangePlan):
    """Another exchange, after which everything is remembered as it was."""

    def __init__(self, inner: ExchangePlan, memory: Memory) -> None:
        self._inner, self._memory = inner, memory
        self.priced_as([inner], [1.0])
        self.description, self.dense_places = inner.description, inner.dense_places

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        self._memory.carry()
        self._inner.mean(vector, out, key, flag)
