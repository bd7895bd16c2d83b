"""How the gradients of layers travel, decided when the number of their rows is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_compress.backward.sufficient_factors.layers import Layer
from lightning_compress.backward.sufficient_factors.rule import factor_bytes, limit, matrix_bytes, seconds, sends_less
from lightning_compress.backward.sufficient_factors.settings import FactorSettings
from lightning_compress.collectives import Collective
from lightning_compress.exchanges import probe
from lightning_compress.exchanges.cost import Link

SHOWN = 3
"""Names in a line, at most."""


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
    ranks = collective.size
    more = [each for each in layers if not sends_less(each, _rows(each), ranks, sizes[each.name])]
    if settings.force:
        if more:
            raise ValueError(_refusal(more[0], ranks, sizes[more[0].name]))
        for layer in layers:
            layer.way = "factors"
        return _line(layers, [], [], ranks, sizes, "")
    less = [layer for layer in layers if layer not in more]
    expected = _expected(less, settings, collective, sizes, device)
    for layer in layers:
        layer.way = (
            "factors" if layer.name in expected and expected[layer.name][0] < expected[layer.name][1] else "ordinary"
        )
    faster = [layer for layer in less if layer.way == "factors"]
    slower = [layer for layer in less if layer.way == "ordinary"]
    took, takes = (1e3 * sum(expected[layer.name][place] for layer in faster) for place in (1, 0))
    return _line(faster, more, slower, ranks, sizes, f", {takes:.3g} ms in place of {took:.3g} expected")


def _rows(layer: Layer) -> int:
    """Of a rank, as they travel: the others pad to the most that one has."""
    assert layer.counts is not None
    return max(layer.counts)


def _expected(
    layers: Sequence[Layer],
    settings: FactorSettings,
    collective: Collective,
    sizes: Mapping[str, int],
    device: torch.device,
) -> dict[str, tuple[float, float]]:
    """Seconds by factors and the ordinary way, by name: rank 0's figures, on every rank."""
    if not layers:
        return {}
    link = settings.link
    if link is None:
        measured = probe.time_link(collective, device)
        link = Link(*probe.agreed([measured.latency_s, measured.bytes_per_s], collective, device))
    assert isinstance(link, Link)
    own = [seconds(layer, _rows(layer), collective.size, sizes[layer.name], link) for layer in layers]
    figures = probe.agreed([each for pair in own for each in pair], collective, device)
    return {layer.name: (figures[2 * at], figures[2 * at + 1]) for at, layer in enumerate(layers)}


def _refusal(layer: Layer, ranks: int, size: int) -> str:
    return (
        f"force=True: {layer.name} has {_rows(layer)} rows on each of {ranks} ranks, so that factors would send more "
        f"than its {layer.weight.shape[0]} x {layer.weight.shape[1]} matrix: K P = {_rows(layer) * ranks} is not below "
        f"2 M N / (M + N) = {limit(layer, size):.4g}. Exclude it (exclude={[layer.name]!r}), or leave force=False, "
        "which sends each layer the cheaper way"
    )


def _line(
    faster: Sequence[Layer],
    more: Sequence[Layer],
    slower: Sequence[Layer],
    ranks: int,
    sizes: Mapping[str, int],
    times: str,
) -> str:
    said = []
    if faster:
        sent = sum(factor_bytes(each, _rows(each), ranks, sizes[each.name]) for each in faster)
        dense = sum(matrix_bytes(each, ranks) for each in faster)
        rows = sorted({_rows(each) for each in faster})
        many = f"{rows[0]}" if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
        said.append(
            f"sufficient factors for {_names(faster)} ({many} rows on each of {ranks} ranks: {sent / 1e6:,.3g} MB in "
            f"place of {dense / 1e6:,.3g} a rank and step{times})"
        )
    for layers, why in ((more, "factors would send more"), (slower, "factors would take longer")):
        if layers:
            said.append(f"the ordinary way for {_names(layers)} ({why})")
    return ", ".join(said)


def _names(layers: Sequence[Layer]) -> str:
    names = [layer.name or "the model" for layer in layers]
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
