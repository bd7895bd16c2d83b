"""Decide which layers travel as factors: those that the user names, where that is expected to take less time.

How many rows a layer has is known at its first backward. Then Poseidon's rule decides: a layer goes by factors if that
sends less and is expected to be faster. Zhang et al., "Poseidon: An Efficient Communication Architecture for
Distributed Deep Learning on GPU Clusters", USENIX ATC 2017, arXiv:1706.03292, with a ring all-reduce in place of its
parameter server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_compress.backward.layer_swap import pattern_of, shared_parameters, weight_problem
from lightning_compress.backward.sufficient_factors.factored_layer import Layer, known_as
from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_gather_rounds, all_reduce_rounds, least_ms
from lightning_compress.core.errors import listed
from lightning_compress.exchanges.exchange import Cost
from lightning_compress.planning import link as links
from lightning_compress.planning.cost import Link, link_of, wire_seconds
from lightning_compress.settings import parsing

LEAST = 1 << 16
"""Weights of a layer that is taken without being named: a smaller one is cheap in a bucket with others."""
REPEATS = 3
"""Of a product. The least time counts."""
Sent = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class FactorSettings:
    """Which layers travel as factors, and how.

    Args:
        layers: shell-style patterns of module names, such as ``["classifier.*"]``. None: every linear layer of 65,536
            weights or more for which factors can pay at this number of ranks.
        exclude: patterns of module names that are left out.
        dtype: "float32": rows travel without loss, in the dtype in which backward has them. "bfloat16": they are
            rounded, and take half as many bytes.
        force: all these layers go by factors, without a measurement. Layers for which factors would send more are
            refused.
        link: the ranks' link, in place of a measurement: see ``Link``.

    Raises:
        ValueError: a value is not allowed.
    """

    layers: Sequence[str] | str | None = None
    exclude: Sequence[str] | str = ()
    dtype: Sent = "float32"
    force: bool = False
    link: Link | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", _patterns("layers", self.layers))
        object.__setattr__(self, "exclude", _patterns("exclude", self.exclude))
        if self.layers == ():
            raise ValueError("layers=[] names no layer; name some, as in ['classifier.*'], or give None for all")
        parsing.one_of(*get_args(Sent))("dtype", self.dtype)
        parsing.truth("force", self.force)
        if self.link is not None:
            object.__setattr__(self, "link", link_of(self.link))


def _patterns(name: str, given: object) -> tuple[str, ...]:
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, Sequence) or not all(isinstance(each, str) and each for each in given):
        raise ValueError(f"{name}={given!r} must be a pattern of module names, or a list of them")
    return tuple(given)


def choose(module: nn.Module, settings: FactorSettings, ranks: int) -> list[Layer]:
    """Return the layers that these settings name, in the module's order.

    Args:
        module: the model, before DistributedDataParallel wraps it.
        settings: what the user chose.
        ranks: that average.

    Raises:
        ValueError: a pattern matches no module or no layer that can travel as factors, or no layer is left.
    """
    shared = shared_parameters(module)
    modules = {known_as(path): (path, each) for path, each in module.named_modules()}
    problems = {name: _problem(each, shared) for name, (_, each) in modules.items()}
    fit = {name: Layer(*modules[name]) for name, problem in problems.items() if not problem}
    there = f"layers that can travel as factors: {', '.join(fit) or 'none'}"
    for setting, patterns in (("exclude", settings.exclude), ("layers", settings.layers or ())):
        for pattern in patterns:
            matched = [name for name in modules if pattern_of(name, [pattern])]
            if not matched:
                raise ValueError(f"{setting}={[*patterns]}: {pattern!r} matches no module; {there}")
            bad = [name for name in matched if "tied" in problems[name]] or matched
            if setting == "layers" and ("tied" in problems[bad[0]] or not fit.keys() & matched):
                raise ValueError(f"{setting}={[*patterns]}: {bad[0]!r}: {problems[bad[0]]}; {there}")
    left = [layer for name, layer in fit.items() if pattern_of(name, settings.exclude) is None]
    if settings.layers is None:
        chosen = [layer for layer in left if _may_pay(layer, ranks)]
        if not chosen:
            raise ValueError(
                f"sufficient factors: no linear layer has {LEAST:,} weights or more and pays at {ranks} ranks; linear "
                f"layers are {', '.join(fit) or 'none'} (layers that configure_model makes come too late)"
            )
    else:
        chosen = [layer for layer in left if pattern_of(layer.name, settings.layers) is not None]
        if not chosen:
            raise ValueError(f"exclude={[*settings.exclude]} leaves nothing of layers={[*settings.layers]}")
    return chosen


def _problem(module: nn.Module, shared: set[int]) -> str:
    """Say why a module cannot travel as factors; empty if it can."""
    if type(module) is not nn.Linear:  # others may use the weight elsewhere, as nn.MultiheadAttention does
        return f"it is a {type(module).__name__}, and only nn.Linear itself can travel as factors"
    if {*module._parameters} != {"weight", "bias"}:
        return "its weight or bias is computed from others (weight_norm, spectral_norm, pruning)"
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    if problem := weight_problem(module, parameters, shared):
        return problem
    if not module.weight.requires_grad:
        return "its weight is frozen (requires_grad=False)"
    if len({each.dtype for each in parameters.values()}) > 1:
        return f"its weight is {module.weight.dtype} and its bias {module.bias.dtype}"
    for parameter in parameters.values():
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if hooks or hasattr(parameter, "_in_backward_optimizers"):
            return "its parameters have hooks on their gradients, which would not be called"
        if getattr(parameter, "_ddp_ignored", False):
            return "DistributedDataParallel ignores it already"
    return ""


def _may_pay(layer: Layer, ranks: int) -> bool:
    """Tell whether one row a rank would send less than the matrix."""
    return layer.weight.numel() >= LEAST and ranks * layer.width < 2 * layer.weight.numel()


@dataclass(frozen=True, eq=False)
class _Case:
    """A layer, the most rows that a rank has of it, the number of ranks, and the bytes of a number of a row."""

    layer: Layer
    rows: int
    ranks: int
    size: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends by factors: K (M + N) (P - 1) numbers."""
        return self.rows * self.layer.width * self.size * (self.ranks - 1)

    @property
    def sends_less(self) -> bool:
        """Whether factors send less than the matrix: K P < 2 M N / (M + N), if both travel as float32."""
        return self.rows * self.ranks * self.layer.width * self.size < 2 * self.layer.weight.nbytes

    def seconds(self, link: Link) -> list[float]:
        """Return the expected time by factors and the ordinary way; runs the products."""
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
    """Set each layer's ``way`` by its rows, the same on all ranks. A collective call.

    Args:
        layers: whose ``counts`` are known.
        settings: what the user chose.
        collective: the ranks; does not count bytes.
        sizes: bytes of a number of a row, by the layer's name.
        device: where rows are.

    Returns:
        one line that says what was decided.

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
    """Return seconds by factors and the ordinary way: rank 0's figures, on every rank."""
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
    """Measure the time to form the gradient of this many rows."""
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
    return listed([case.layer.name or "the model" for case in cases])
