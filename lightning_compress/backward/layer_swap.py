"""Swap layers of a model for layers with another backward pass, in place, and restore them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class SwappedLayer(nn.Module):
    """A layer whose backward pass is ours.

    A subclass derives from this class and then from the ordinary layer's class. It adds no parameter, buffer or
    constructor, because ``swap`` only assigns ``layer.__class__``: ``state_dict``, optimizer and hooks stay the same.
    """

    ordinary: ClassVar[type[nn.Module]]
    """The class of the layers that it replaces."""
    attribute: ClassVar[str]
    """Where a swapped layer has its settings. It is not a buffer: DistributedDataParallel would broadcast it."""


def swap(layer: nn.Module, kind: type[SwappedLayer], settings: object) -> None:
    """Make a layer one of this kind, with these settings. A layer of this kind only gets the settings."""
    layer.__class__ = kind
    vars(layer)[kind.attribute] = settings


def restore(layer: SwappedLayer) -> None:
    """Make a swapped layer an ordinary layer again."""
    del vars(layer)[layer.attribute]
    layer.__class__ = layer.ordinary  # type: ignore[assignment]


def pattern_of(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first shell-style pattern that matches a layer's name; None if no pattern does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter that several modules have."""
    owned = [id(each) for module in model.modules() for each in module._parameters.values() if each is not None]
    return {each for each, count in Counter(owned).items() if count > 1}


def weight_problem(layer: nn.Module, names: Iterable[str], shared: set[int]) -> str:
    """Say why these parameters of a layer cannot get their gradient from us; empty if they can.

    Args:
        layer: any module.
        names: of its parameters.
        shared: see ``shared_parameters``.
    """
    if parametrize.is_parametrized(layer):
        return "its weight is parametrized, and has no gradient of its own"
    for name in names:
        weight = getattr(layer, name)
        if isinstance(weight, nn.parameter.UninitializedParameter):
            return f"{name} has no shape yet; run a forward pass first"
        if id(weight) in shared:
            return f"{name} is tied to another layer, which adds a gradient of its own"
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_quantized or not weight.is_floating_point():
            return f"{name} is quantised or of a special kind ({type(weight).__name__}, {weight.dtype})"
        if weight.layout != torch.strided:
            return f"{name} is sparse ({weight.layout})"
    return ""


def check_dense(x: Tensor, layer: str, method: str) -> None:
    """Raise if a layer's input is a sparse tensor.

    Raises:
        ValueError: it is.
    """
    if x.layout != torch.strided:
        raise ValueError(f"{layer}: {method} takes dense inputs, not {x.layout}. Convert the input by x.to_dense()")


def refuse_second_derivative(layer: str, method: str, fix: str) -> None:
    """Raise in a backward pass that records a graph of itself. A compiler traces it without one.

    Raises:
        RuntimeError: it does.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{layer}: the backward pass of {method} has no derivative (create_graph=True, second derivatives). "
            f"Leave this layer out ({fix})"
        )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which a layer with this input must compute under autocast.

    None: leave the input as it is, without autocast or in float64, which PyTorch's own layers do not cast either.
    """
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
