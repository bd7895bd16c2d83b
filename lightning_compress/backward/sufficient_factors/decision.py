"""How the gradients of layers travel, decided when the number of their rows is known: Poseidon's rule.

A layer goes by factors where that sends less, and is expected to take less time. Zhang et al., "Poseidon: An Efficient
Communication Architecture for Distributed Deep Learning on GPU Clusters", USENIX ATC 2017, arXiv:1706.03292, with a
ring all-reduce in place of its parameter server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from lightning_compress.backward.sufficient_factors.layers import FactorSettings, Layer
from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_gather_rounds, all_reduce_rounds, least_ms
from lightning_compress.exchanges.exchange import Cost
from lightning_compress.planning import link as links
from lightning_compress.planning.cost import Link, wire_seconds

SHOWN = 3
"""Names in a line, at most."""
REPEATS = 3
"""Of a product, whose least time counts."""


@dataclass(frozen=True, eq=False)
class _Case:
    """A layer with ``rows`` on each of ``ranks``, the most that one has, in numbers of ``size`` bytes."""

    layer: Layer
    rows: int
    ranks: int
    size: int

    @property
    def sent(self) -> int:
        """Bytes of a rank by factors: K (M + N) (P - 1) numbers."""
        return self.rows * self.layer.width * self.size * (self.ranks - 1)

    @property
    def sends_less(self) -> bool:
        """Whether factors do: K P < 2 M N / (M + N), where both travel as float32."""
        return self.rows * self.ranks * self.layer.width * self.size < 2 * self.layer.weight.nbytes

    def seconds(self, link: Link) -> list[float]:
        """What a step is expected to take by factors, and the ordinary way; runs the products."""
        gather = Cost(self.sent, 2 * all_gather_rounds(self.ranks))  # their number goes first
        reduce = Cost(self.layer.matrix_bytes(self.ranks), all_reduce_rounds(self.ranks))
        return [
            wire_seconds(gather, link) + product_seconds(self.layer, self.rows * self.ranks),
            wire_seconds(reduce, link) + product_seconds(self.layer, self.rows),
        ]


def decide(
    layers: Sequence[Layer],
    settings: FactorSettings,
    collective: Collective,
    sizes: Mapping[str, int],
    device: torch.device,
) -> str:
    """Set each layer's ``way`` by its rows; a collective call, and all ranks decide alike.

    Args:
        layers: whose ``counts`` are known.
        settings: what the user chose.
        collective: the ranks; what goes over it is not counted.
        sizes: bytes of a number of a row, by the layer's name.
        device: where rows are.

    Returns:
        What was decided, in a line.

    Raises:
        ValueError: factors are forced on a layer for which they send more than the matrix; on every rank.
    """
    cases = [_Case(each, max(each.counts or [0]), collective.size, sizes[each.name]) for each in layers]
    more = [case for case in cases if not case.sends_less]
    faster, slower, times = cases, list[_Case](), ""
    if settings.force and more:
        raise ValueError(_refusal(more[0]))
    if not settings.force:
        less = [case for case in cases if case.sends_less]
        expected = _expected(less, settings, collective, device)
        won = [factors < ordinary for factors, ordinary in expected]
        faster, slower = list(compress(less, won)), [case for case, each in zip(less, won, strict=True) if not each]
        takes, took = (1e3 * sum(each[place] for each in compress(expected, won)) for place in (0, 1))
        times = f", {takes:.3g} ms in place of {took:.3g} expected"
    for case in cases:
        case.layer.way = "factors" if case in faster else "ordinary"
    return _line(faster, more, slower, times)


def _expected(
    cases: Sequence[_Case], settings: FactorSettings, collective: Collective, device: torch.device
) -> list[list[float]]:
    """Seconds by factors and the ordinary way: rank 0's figures, on every rank."""
    if not cases:
        return []
    link = settings.link
    if link is None:
        measured = links.time_link(collective, device)
        link = Link(*links.agreed([measured.latency_s, measured.bytes_per_s], collective, device))
    assert isinstance(link, Link)
    figures = links.agreed([each for case in cases for each in case.seconds(link)], collective, device)
    return [figures[start : start + 2] for start in range(0, len(figures), 2)]


def product_seconds(layer: Layer, rows: int) -> float:
    """How long the gradient of so many rows takes to be formed."""
    outer, inner = layer.weight.shape
    out = layer.memory()
    inputs, gradients = out.new_ones(rows, inner), out.new_ones(rows, outer)
    return least_ms(out.device, REPEATS, lambda: out.addmm_(gradients.t(), inputs, beta=0), lambda: None) / 1e3


def _refusal(case: _Case) -> str:
    layer, limit = case.layer, 2 * case.layer.weight.nbytes / (case.layer.width * case.size)
    return (
        f"force=True: {layer.name} has {case.rows} rows on each of {case.ranks} ranks, so that factors would send more "
        f"than its {layer.weight.shape[0]} x {layer.weight.shape[1]} matrix: K P = {case.rows * case.ranks} is not "
        f"below 2 M N / (M + N) = {limit:.4g}. Exclude it (exclude={[layer.name]!r}), or leave force=False, which "
        "sends each layer the cheaper way"
    )


def _line(faster: Sequence[_Case], more: Sequence[_Case], slower: Sequence[_Case], times: str) -> str:
    said = []
    if faster:
        ranks = faster[0].ranks
        sent = sum(case.sent for case in faster)
        dense = sum(case.layer.matrix_bytes(ranks) for case in faster)
        least, most = min(case.rows for case in faster), max(case.rows for case in faster)
        many = f"{least}" if least == most else f"{least} to {most}"
        said.append(
            f"sufficient factors for {_names(faster)} ({many} rows on each of {ranks} ranks: {sent / 1e6:,.3g} MB in "
            f"place of {dense / 1e6:,.3g} a rank and step{times})"
        )
    for cases, why in ((more, "factors would send more"), (slower, "factors would take longer")):
        if cases:
            said.append(f"the ordinary way for {_names(cases)} ({why})")
    return ", ".join(said)


def _names(cases: Sequence[_Case]) -> str:
    names = [case.layer.name or "the model" for case in cases]
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
