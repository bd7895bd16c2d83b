"""Which layers can travel as factors, and what each of them has at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from threading import Event
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from lightning_compress.backward.gradient_buffer import Buffer
from lightning_compress.backward.layer_swap import shared_parameters
from lightning_compress.backward.sufficient_factors.linear import FactoredLinear, Rows, Stash
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.planning.cost import Link, link_of

LEAST = 1 << 16
"""Weights of a layer that is taken without being named: what is smaller is cheap in a bucket with others."""
Way = Literal["factors", "ordinary"]
Sent = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class FactorSettings:
    """What the user chose: which layers, and how.

    Args:
        layers: shell-style patterns of module names, such as ``["classifier.*"]``; None: every linear layer of 65,536
            weights or more for which so many ranks can pay at all.
        exclude: patterns of module names that are left out.
        dtype: "float32": rows travel in the dtype in which backward has them, without loss; "bfloat16": in half as many
            bytes, rounded.
        force: every one of these layers goes by factors, measured or not; refused where they would send more.
        link: what is taken for the ranks' link, in place of a measurement: see ``Link``.

    Raises:
        ValueError: a value is none of these.
    """

    layers: Sequence[str] | str | None = None
    exclude: Sequence[str] | str = ()
    dtype: Sent = "float32"
    force: bool = False
    link: Link | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        if self.layers == ():
            raise ValueError("layers=[] names no layer; name some, as in ['classifier.*'], or give None for all")
        if self.dtype not in get_args(Sent):
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(map(repr, get_args(Sent)))}")
        if not isinstance(self.force, bool):
            raise ValueError(f"force={self.force!r} must be true or false")
        if self.link is not None:
            object.__setattr__(self, "link", link_of(self.link))


def _patterns(name: str, given: object) -> tuple[str, ...] | None:
    if given is None and name == "layers":
        return None
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, Sequence) or not all(isinstance(each, str) and each for each in given):
        raise ValueError(f"{name}={given!r} must be a pattern of module names, or a list of them")
    return tuple(given)


class Layer:
    """One layer, between its forward and its optimizer's step.

    Args:
        path: of the module.
        module: the layer.

    Attributes:
        names: of its parameters that leave DistributedDataParallel, as a user knows them.
        paths: likewise, as the model has them.
        stash: where backward leaves its rows, also that of a forward before ``switch``.
        way: how its gradient travels; None as long as that was not decided.
        rows: that backward has left and that were not sent yet.
        arrived: backward is through with it, in this pass; with nested backwards perhaps not for the last time.
        returns: some pass came to it more than once.
        local: ``grad`` holds this rank's own gradient (the ordinary way).
        counts: rows of each rank in this pass, once they are known.
        gathered: inputs ``[sum of counts, N]`` and output gradients ``[sum of counts, M]`` of all ranks.
        done: this pass's exchange is over.
        marks: on CUDA, events: rows are ready; what was gathered is ready.
    """

    def __init__(self, path: str, module: nn.Linear) -> None:
        self.path, self.module = path, module
        self.weight = cast("nn.Parameter", module.weight)
        self.bias = cast("nn.Parameter | None", module.bias)
        self.stash = Stash(name=self.name)
        self.way: Way | None = None
        self.rows: Rows = []
        self.arrived = self.returns = self.local = False
        self.counts: list[int] | None = None
        self.gathered: tuple[Tensor, Tensor] | None = None
        self.done = Event()
        self.marks: list[torch.cuda.Event] = []
        self._buffer: Buffer | None = None
        self._marked: Tensor | None = None

    @property
    def name(self) -> str:
        """Of the module, as a user knows it."""
        return known_as(self.path)

    @property
    def paths(self) -> list[str]:  # noqa: D102  # see above
        dot = "." if self.path else ""
        return [f"{self.path}{dot}weight", *([f"{self.path}{dot}bias"] if self.bias is not None else [])]

    @property
    def names(self) -> list[str]:  # noqa: D102  # see above
        return [path.replace("_orig_mod.", "") for path in self.paths]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those parameters."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def width(self) -> int:
        """Numbers of a row: of an input and of an output's gradient, M + N."""
        return sum(self.weight.shape)

    def switch(self, on: bool) -> None:
        """Let the module leave rows, or be an ordinary one."""
        if on and type(self.module) is nn.Linear:
            self.stash.weight, self.stash.bias = self.weight, self.bias is not None
            vars(self.module)["factors"] = self.stash
            self.module.__class__ = FactoredLinear
        elif not on and type(self.module) is FactoredLinear:
            self.stash.weight = None
            self.module.__class__ = nn.Linear  # type: ignore[assignment]
            del self.module.factors

    def add(self, inputs: Tensor, gradients: Tensor, ranks: int) -> None:
        """Add the gradient that these rows make up, over ``ranks``, to ``grad``."""
        inputs, gradients = inputs.to(self.weight.dtype), gradients.to(self.weight.dtype)
        if self.weight.requires_grad:
            fresh = self.weight.grad is None
            if fresh:
                self.weight.grad = self.memory()
            assert self.weight.grad is not None
            self.weight.grad.addmm_(gradients.t(), inputs, beta=0 if fresh else 1, alpha=1 / ranks)
        if self.bias is not None and self.bias.requires_grad:
            summed = gradients.sum(0).div_(ranks)
            self.bias.grad = summed if self.bias.grad is None else self.bias.grad.add_(summed)

    def matrix_bytes(self, ranks: int) -> int:
        """What a rank sends to all-reduce the parameters: 2 M N (P - 1) / P numbers, and those of the bias."""
        return all_reduce_bytes(sum(each.nbytes for each in self.parameters), ranks)

    def memory(self) -> Tensor:
        """For a gradient of the weight: that of the last step, unless somebody still holds it."""
        # fresh memory costs more than the product: its pages come one by one
        if self._buffer is None or not self._buffer.is_free() or self._buffer.tensor.dtype != self.weight.dtype:
            self._buffer = Buffer(self.weight)
        return self._buffer.tensor.detach()

    def keep(self) -> None:
        """Keep the rows for a later pass, as long as nobody drops or zeroes ``grad``, which they are a part of."""
        if self.weight.grad is None:
            self.weight.grad = self.memory().zero_()
        self._marked = self.weight.grad
        self._marked[0, 0] += _mark(self._marked)

    def look(self) -> None:
        """Drop the rows that were kept if somebody has dropped or zeroed ``grad`` since, as ``zero_grad`` does."""
        if self._marked is None:
            return
        if self.weight.grad is not self._marked or not (self._marked[0].any() or self._marked.any()):
            self.rows = []
        else:
            self._marked[0, 0] -= _mark(self._marked)
        self._marked = None

    def forget(self) -> None:
        """Drop what was not sent."""
        self.rows, self.arrived, self.local = [], False, False
        self.counts, self.gathered, self._marked = None, None, None


def _mark(gradient: Tensor) -> float:
    """What tells a gradient that was zeroed from one that was not: the least number that survives some scaling."""
    return torch.finfo(gradient.dtype).smallest_normal


def choose(module: nn.Module, settings: FactorSettings, ranks: int) -> list[Layer]:
    """The layers that these settings name, in the module's order.

    Args:
        module: the model, before DistributedDataParallel wraps it.
        settings: what was asked for.
        ranks: that average.

    Raises:
        ValueError: a pattern matches nothing, or no layer that can travel as factors; or there is none at all.
    """
    paths = {known_as(path): path for path, _ in module.named_modules()}
    modules = {known_as(path): each for path, each in module.named_modules()}
    shared = shared_parameters(module)
    problems = {name: _problem(each, shared) for name, each in modules.items()}
    fit = [name for name, problem in problems.items() if problem is None]
    assert not isinstance(settings.exclude, str)
    assert not isinstance(settings.layers, str)
    _check_patterns("exclude", settings.exclude, modules, fit)
    left = [name for name in fit if not _matches(name, settings.exclude)]
    if settings.layers is None:
        chosen = [name for name in left if _may_pay(modules[name], ranks)]
        if not chosen:
            raise ValueError(
                f"sufficient factors: no linear layer has {LEAST:,} weights or more and pays at {ranks} ranks; linear "
                f"layers are {', '.join(fit) or 'none'} (layers that configure_model makes come too late)"
            )
    else:
        _check_patterns("layers", settings.layers, modules, fit, problems)
        chosen = [name for name in left if _matches(name, settings.layers)]
        if not chosen:
            raise ValueError(f"exclude={list(settings.exclude)} leaves nothing of layers={list(settings.layers)}")
    return [Layer(paths[name], cast("nn.Linear", modules[name])) for name in chosen]


def known_as(path: str) -> str:
    """A module's path without what torch.compile put into it."""
    return path.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(
    setting: str,
    patterns: Sequence[str],
    modules: dict[str, nn.Module],
    fit: Sequence[str],
    problems: dict[str, str | None] | None = None,
) -> None:
    there = f"layers that can travel as factors: {', '.join(fit) or 'none'}"
    for pattern in patterns:
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"{setting}={list(patterns)}: {pattern!r} matches no module; {there}")
        if problems is None:
            continue
        tied = [name for name in matched if "tied" in (problems[name] or "")]
        bad = tied or ([] if any(problems[name] is None for name in matched) else matched)
        if bad:
            raise ValueError(f"{setting}={list(patterns)}: {bad[0]!r} {problems[bad[0]]}; {there}")


def _problem(module: nn.Module, shared: set[int]) -> str | None:
    """Why a module cannot travel as factors; None: it can."""
    kind = type(module)
    if kind is not nn.Linear:  # others may use the weight elsewhere, as nn.MultiheadAttention does
        return f"is a {kind.__name__}, and only nn.Linear itself can travel as factors"
    weight, bias = module.weight, module.bias
    if "weight" not in module._parameters:
        return "has a weight that is computed from others (weight_norm, spectral_norm, pruning)"
    if not weight.dtype.is_floating_point or weight.layout != torch.strided:
        return f"has a weight of {weight.dtype} and {weight.layout}, and none that is trained (quantised?)"
    if not weight.requires_grad:
        return "is frozen: its weight requires no gradient"
    if bias is not None and bias.dtype != weight.dtype:
        return f"has a weight of {weight.dtype} and a bias of {bias.dtype}"
    if id(weight) in shared or id(bias) in shared:
        return "is tied: another layer has the same parameter, and its gradient is none of these rows'"
    for parameter in (weight, bias):
        hooks = parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
        if hooks or hasattr(parameter, "_in_backward_optimizers"):
            return "has hooks on the gradients of its parameters, which would not be called"
        if getattr(parameter, "_ddp_ignored", False):
            return "is ignored by DistributedDataParallel already"
    return None


def _may_pay(module: nn.Module, ranks: int) -> bool:
    """Whether one row a rank would send less than the matrix."""
    assert isinstance(module, nn.Linear)
    return module.weight.numel() >= LEAST and ranks * sum(module.weight.shape) < 2 * module.weight.numel()
