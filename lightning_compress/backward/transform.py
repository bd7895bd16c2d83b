"""Gives the layers of a model a sparse backward pass, and takes it back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from lightning_compress.backward.cautions import warn_of_few, warn_of_norms
from lightning_compress.backward.layers import SparseConv1d, SparseConv2d, SparseLinear
from lightning_compress.backward.recurrent import SparseGRU, SparseGRUCell, SparseLSTM, SparseLSTMCell
from lightning_compress.backward.selection import Amount, check_amount, count_of
from lightning_compress.backward.sparsity import SparseLayer, Sparsity

log = logging.getLogger(__name__)

LAYERS: dict[type[nn.Module], type[SparseLayer]] = {
    each.ordinary: each
    for each in (SparseLinear, SparseConv1d, SparseConv2d, SparseLSTM, SparseGRU, SparseLSTMCell, SparseGRUCell)
}
"""The sparse kind of each class of layers; a method for another class adds itself here."""


def enable(
    model: nn.Module,
    k: Amount | Mapping[str, Amount],
    *,
    skip: Sequence[str] = (),
    output: bool = False,
    per_example: bool = False,
    sparse_bias: bool = False,
    memory: float = 0.0,
    group: Any = None,
    per_sequence: bool = False,
) -> dict[str, Sparsity]:
    """Let layers propagate only the ``k`` largest of their output gradients: meProp (Sun et al., ICML 2017).

    Layers change their class, and nothing else: ``state_dict``, parameters, optimizer and hooks are what they were.

    The memory of a weight's gradient is used again in the next step, and only the rows that were written are cleared.
    Who writes into a gradient by hand does so in place under ``torch.no_grad()``, which is noticed; not through
    ``p.grad.data`` or ``p.grad.numpy()``, of which PyTorch keeps no count: rows written so would be there again.

    Args:
        model: linear, convolutional and recurrent layers of it are changed, in place.
        k: outputs that are kept, a count or a fraction such as 0.05, of every layer; or by shell-style patterns of
            layer names, the first that matches, and other layers are left alone.
        skip: patterns of layers that are left alone.
        output: change the output layer too. It is the last layer that could be changed, in the order of
            ``model.modules()``; a pattern that is its very name takes it as well.
        per_example: each example keeps ``k`` of its own, which saves little, and leaves convolutions alone; otherwise
            one choice holds for the minibatch, by the sum of absolute values over it.
        sparse_bias: biases of outputs that are dropped have no gradient; otherwise all have theirs.
        memory: what is dropped is multiplied by this and added the next time (Zhang et al., arXiv:1905.10194); 0: lost.
        group: process group whose ranks keep the same outputs, those with the largest sums over all ranks. Each
            backward pass of a layer then is a collective call, in the same order on all ranks.
        per_sequence: recurrent layers choose once for all time steps, which is several times as fast, and leaves ``k``
            rows of each gate in their weight gradients; otherwise at each step anew.

    Returns:
        what was changed, by name.

    Raises:
        ValueError: a value is not allowed, a pattern matches no layer, or a layer cannot be changed.
    """
    check_settings(skip, memory, per_example, group is not None)
    layers = {name: (each, kind) for name, each in model.named_modules() if (kind := _kind(each))}
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(f"skip={pattern!r} matches no layer; {_hint(layers)}")
    done = {}
    for name, amount in _chosen(model, layers, amounts_of(k), skip, output, per_example).items():
        layer, kind = layers[name]
        width = kind.width_of(layer)
        if refusal := _refused_together(name, kind, per_example, per_sequence, memory, group):
            raise ValueError(f"{refusal}; or leave it out by skip=[{name!r}]")
        kept = count_of(amount, width, name)
        done[name] = Sparsity(
            name, width, kept, per_example, sparse_bias, float(memory), group, per_sequence=per_sequence
        )
    for name, sparsity in done.items():
        layer, kind = layers[name]
        if not isinstance(layer, SparseLayer):
            layer.__class__ = kind
        layer.sparsity = sparsity
    warn_of_norms(model, done)
    warn_of_few(model, {name: each.k / each.width for name, each in done.items()})
    log.debug("meProp: %s", ", ".join(f"{name} keeps {each.k} of {each.width}" for name, each in done.items()))
    return done


def _refused_together(
    name: str, kind: type[SparseLayer], per_example: bool, per_sequence: bool, memory: float, group: object
) -> str:
    """Settings that a recurrent layer cannot have."""
    if kind.remembers:
        return ""
    if memory:
        return f"{name}: memory={memory!r} is for linear and convolutional layers; {kind.ordinary.__name__} has none"
    if per_example and per_sequence:
        return f"{name}: per_example and per_sequence exclude each other; choose one"
    if group is not None and not per_sequence:
        return (
            f"{name}: ranks may have other numbers of time steps, so they choose together only with per_sequence=True"
        )
    return ""


def disable(model: nn.Module) -> None:
    """Give all layers of a model their ordinary backward pass again; what was remembered is dropped."""
    for layer in model.modules():
        if isinstance(layer, SparseLayer):
            layer.__class__ = type(layer).ordinary  # type: ignore[assignment]
            del layer.sparsity


def enabled(model: nn.Module) -> dict[str, Sparsity]:
    """The layers of a model that have a sparse backward pass, by name."""
    return {name: layer.sparsity for name, layer in model.named_modules() if isinstance(layer, SparseLayer)}


def check_settings(skip: object, memory: object, per_example: bool, together: bool) -> None:
    """Refuse what no model could be changed by; see ``enable``.

    Raises:
        ValueError: a value is not allowed.
    """
    if isinstance(skip, str):
        raise ValueError(f"skip={skip!r} must be a list of patterns: [{skip!r}]")
    if isinstance(memory, (str, bool)) or not isinstance(memory, (int, float)) or not 0 <= memory <= 1:
        raise ValueError(f"memory={memory!r} must be from 0.0 (what is dropped is lost) to 1.0 (all of it is kept)")
    if per_example and together:
        raise ValueError("per_example=True: examples choose for themselves, so ranks cannot choose together")


def amounts_of(k: object) -> dict[str, Amount]:
    """Patterns of layer names, and how many outputs their layers keep.

    Raises:
        ValueError: it is neither a count, a fraction, nor a mapping to them.
    """
    if not isinstance(k, Mapping):
        return {"*": check_amount(k, "k")}
    if not k:
        raise ValueError("k={} names no layer; give a fraction such as 0.05, or {pattern: fraction}")
    return {str(pattern): check_amount(amount, f"k[{pattern!r}]") for pattern, amount in k.items()}


def pattern_of(name: str, amounts: Mapping[str, Amount]) -> str | None:
    """The first pattern that matches a layer's name."""
    return next((each for each in amounts if fnmatchcase(name, each)), None)


def _kind(module: nn.Module) -> type[SparseLayer] | None:
    """The sparse class of a layer; None: there is none."""
    if isinstance(module, SparseLayer):
        return LAYERS[type(module).ordinary]
    return next((kind for ordinary, kind in LAYERS.items() if isinstance(module, ordinary)), None)


Layers = Mapping[str, tuple[nn.Module, type[SparseLayer]]]
"""Layers of which there is a sparse kind, and that, by name."""


def _chosen(
    model: nn.Module,
    layers: Layers,
    amounts: Mapping[str, Amount],
    skip: Sequence[str],
    output: bool,
    per_example: bool,
) -> dict[str, Amount]:
    """Names of the layers that are changed, and how many outputs each keeps."""
    shared, everything = shared_parameters(model), dict(model.named_modules())
    for pattern in amounts:
        if pattern in everything and pattern not in layers:
            raise ValueError(f"k[{pattern!r}]: {_no_kind(everything[pattern])}; {_hint(layers)}")
    last = next(reversed(list(layers)), None)
    chosen: dict[str, Amount] = {}
    why = dict.fromkeys(amounts, f"the output layer, {last!r}, is, unless output=True")
    for name, (layer, kind) in layers.items():
        matched = pattern_of(name, amounts)
        left_out = any(fnmatchcase(name, each) for each in skip) or (name == last and not output and matched != name)
        if matched is None or left_out:
            continue
        above = everything[name.rpartition(".")[0]]
        problem = _problem(layer, kind, shared)
        refusal = _own_forward(layer, kind, above) or kind.refusal(layer, per_example)
        if problem or (refusal and matched == name):
            raise ValueError(f"{name}: {problem or refusal}; leave it out by skip=[{name!r}]")
        if refusal:
            why[matched] = f"{name}: {refusal}"
        else:
            chosen[name] = amounts[matched]
    used = {pattern_of(name, amounts) for name in chosen}
    if unused := [pattern for pattern in amounts if pattern not in used]:
        raise ValueError(
            f"k[{unused[0]!r}] matches no layer that can be changed and is not left out ({why[unused[0]]}); "
            f"{_hint(layers)}"
        )
    return chosen


def _hint(layers: Layers) -> str:
    kinds = ", ".join(each.__name__ for each in LAYERS)
    names = ", ".join(list(layers)[:5]) or "none"
    return f"patterns are shell-style ('encoder.*'), the layers are of kinds {kinds}: {names}"


def _no_kind(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return (
            f"{kind} computes its projections in one function, from a packed weight, and cannot be made sparse; write "
            "attention with nn.Linear for q, k, v and the output around functional.scaled_dot_product_attention"
        )
    return f"a layer of type {kind} cannot be made sparse"


def _own_forward(layer: nn.Module, kind: type[SparseLayer], above: nn.Module) -> str:
    """A layer whose own ``forward`` is not what computes cannot be changed."""
    if isinstance(above, nn.MultiheadAttention):
        return _no_kind(above)
    if isinstance(layer, SparseLayer) or type(layer) is kind.ordinary:
        return ""
    return (
        f"{type(layer).__name__} is a subclass of {kind.ordinary.__name__}, and may compute something else; only "
        f"{kind.ordinary.__name__} itself can be made sparse"
    )


def shared_parameters(model: nn.Module) -> set[int]:
    """The ``id`` of parameters that several modules have."""
    owned = [id(each) for module in model.modules() for each in module._parameters.values() if each is not None]
    return {each for each, count in Counter(owned).items() if count > 1}


def _problem(layer: nn.Module, kind: type[SparseLayer], shared: set[int]) -> str:
    """What is wrong with a layer of a kind that could be changed."""
    if parametrize.is_parametrized(layer):
        return "its weight is parametrized, and has no gradient of its own"
    for own in kind.weights_of(layer):
        weight = getattr(layer, own)
        if isinstance(weight, nn.parameter.UninitializedParameter):
            return f"{own} has no shape yet; run a forward pass first"
        if id(weight) in shared:
            return f"{own} is tied to another layer, whose gradient would make all rows dense again"
        if type(weight) not in (nn.Parameter, torch.Tensor) or weight.is_quantized or not weight.is_floating_point():
            return f"{own} is quantised or of a special kind ({type(weight).__name__}, {weight.dtype})"
        if weight.layout != torch.strided:
            return f"{own} is sparse ({weight.layout})"
    return ""
