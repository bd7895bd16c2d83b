"""Give the layers of a model a sparse backward pass, and take it back."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lightning_compress.backward.layer_swap import pattern_of, restore, shared_parameters, swap, weight_problem
from lightning_compress.backward.recurrent import SparseGRU, SparseGRUCell, SparseLSTM, SparseLSTMCell
from lightning_compress.backward.sparse_layers import SparseConv1d, SparseConv2d, SparseLinear
from lightning_compress.backward.sparsity import Amount, SparseLayer, Sparsity, check_amount, count_of
from lightning_compress.core.errors import listed

log = logging.getLogger(__name__)

LAYERS: dict[type[nn.Module], type[SparseLayer]] = {
    each.ordinary: each
    for each in (SparseLinear, SparseConv1d, SparseConv2d, SparseLSTM, SparseGRU, SparseLSTMCell, SparseGRUCell)
}
"""The sparse kind of each class of layers. A method for another class adds itself here."""
FEW = 0.3
"""Share of the outputs below which recurrent layers and Transformers learn badly: with 0.16 they do, with 0.5 not."""
NORMS = (nn.LayerNorm, nn.RMSNorm)


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

    Layers change their class, and nothing else: ``state_dict``, parameters, optimizer and hooks stay the same.

    The next step reuses the memory of a weight's gradient, and clears only the rows that were written. Change a
    gradient in place under ``torch.no_grad()``, which is noticed. PyTorch keeps no count of changes through
    ``p.grad.data`` or ``p.grad.numpy()``: rows that are written so keep their values in the next step.

    Args:
        model: its linear, convolutional and recurrent layers are changed, in place.
        k: outputs that every layer keeps, a count or a fraction such as 0.05. Or a mapping from shell-style patterns of
            layer names: the first that matches decides, and other layers are left alone.
        skip: patterns of layers that are left alone.
        output: change the output layer too: the last layer that could be changed, in the order of
            ``model.modules()``. A pattern that is its exact name changes it as well.
        per_example: each example keeps ``k`` of its own, which saves little, and leaves convolutions alone. Otherwise
            one choice holds for the minibatch, by the sum of absolute values over it.
        sparse_bias: biases of outputs that are dropped have no gradient; otherwise all have theirs.
        memory: what is dropped is multiplied by this and added the next time (Zhang et al., arXiv:1905.10194); 0: lost.
        group: process group whose ranks keep the same outputs, those with the largest sums over all ranks. Each
            backward pass of a layer then is a collective call, in the same order on all ranks.
        per_sequence: recurrent layers choose once for all time steps, which is several times as fast, and leaves ``k``
            rows of each gate in their weight gradients. Otherwise each step chooses.

    Returns:
        what was changed, by name.

    Raises:
        ValueError: a value is not allowed, a pattern matches no layer, or a layer cannot be changed.
    """
    check_settings(skip, memory, per_example, group is not None)
    layers = {name: (each, kind) for name, each in model.named_modules() if (kind := _kind(each))}
    for pattern in skip:
        if not any(pattern_of(name, [pattern]) for name in layers):
            raise ValueError(f"skip={pattern!r} matches no layer; {_hint(layers)}")
    done = {}
    for name, amount in _chosen(model, layers, amounts_of(k), skip, output, per_example).items():
        layer, kind = layers[name]
        width = getattr(layer, kind.width)
        kept = count_of(amount, width, name)
        done[name] = Sparsity(name, width, kept, per_example, sparse_bias, per_sequence, float(memory), group)
        if conflict := kind.conflict(done[name]):
            raise ValueError(f"{name}: {conflict}; or leave it out by skip=[{name!r}]")
    for name, sparsity in done.items():
        swap(*layers[name], sparsity)
    _warn_of_norms(model, done)
    warn_of_few(model, {name: each.k / each.width for name, each in done.items()})
    log.debug("meProp: %s", ", ".join(f"{name} keeps {each.k} of {each.width}" for name, each in done.items()))
    return done


def disable(model: nn.Module) -> None:
    """Give all layers of a model their ordinary backward pass again, and drop what they remember."""
    for layer in model.modules():
        if isinstance(layer, SparseLayer):
            restore(layer)


def check_settings(skip: object, memory: object, per_example: bool, together: bool) -> None:
    """Raise on settings that no model can have; see ``enable``.

    Raises:
        ValueError: a value is not allowed.
    """
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        raise ValueError(f"skip={skip!r} must be a list of patterns, such as ['head.*']")
    if isinstance(memory, (str, bool)) or not isinstance(memory, (int, float)) or not 0 <= memory <= 1:
        raise ValueError(f"memory={memory!r} must be from 0.0 (what is dropped is lost) to 1.0 (all of it is kept)")
    if per_example and together:
        raise ValueError("per_example=True: examples choose for themselves, so ranks cannot choose together")


def amounts_of(k: object) -> dict[str, Amount]:
    """Return patterns of layer names, and how many outputs their layers keep.

    Raises:
        ValueError: it is neither a count, a fraction, nor a mapping to them.
    """
    if not isinstance(k, Mapping):
        return {"*": check_amount(k, "k")}
    if not k:
        raise ValueError("k={} names no layer; give a fraction such as 0.05, or {pattern: fraction}")
    return {str(pattern): check_amount(amount, f"k[{pattern!r}]") for pattern, amount in k.items()}


def _kind(module: nn.Module) -> type[SparseLayer] | None:
    """Return the sparse class of a layer; None: there is none."""
    return next((kind for ordinary, kind in LAYERS.items() if isinstance(module, ordinary)), None)


Layers = Mapping[str, tuple[nn.Module, type[SparseLayer]]]
"""Layers that have a sparse kind, and this kind, by name."""


def _chosen(
    model: nn.Module,
    layers: Layers,
    amounts: Mapping[str, Amount],
    skip: Sequence[str],
    output: bool,
    per_example: bool,
) -> dict[str, Amount]:
    """Return the names of the layers that are changed, and how many outputs each keeps."""
    shared, everything = shared_parameters(model), dict(model.named_modules())
    for pattern in amounts:
        if pattern in everything and pattern not in layers:
            raise ValueError(f"k[{pattern!r}]: {_no_kind(everything[pattern])}; {_hint(layers)}")
    last = next(reversed(list(layers)), None)
    chosen: dict[str, Amount] = {}
    why = dict.fromkeys(amounts, f"the output layer, {last!r}, is, unless output=True")
    for name, (layer, kind) in layers.items():
        matched = pattern_of(name, amounts)
        if matched is None or pattern_of(name, skip) or (name == last and not output and matched != name):
            continue
        above = everything[name.rpartition(".")[0]]
        problem = weight_problem(layer, [each for each in layer._parameters if each.startswith("weight")], shared)
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
    """Say why a layer's ``forward`` is not what computes it; empty if it is."""
    if isinstance(above, nn.MultiheadAttention):
        return _no_kind(above)
    if isinstance(layer, SparseLayer) or type(layer) is kind.ordinary:
        return ""
    return (
        f"{type(layer).__name__} is a subclass of {kind.ordinary.__name__}, and may compute something else; only "
        f"{kind.ordinary.__name__} itself can be made sparse"
    )


def warn_of_few(model: nn.Module, shares: Mapping[str, float]) -> None:
    """Warn of layers for sequences that keep too few of their outputs.

    Args:
        model: that has the layers.
        shares: of the outputs that are kept, by layer.
    """
    modules = dict(model.named_modules())
    beside = {name.rpartition(".")[0] for name, each in modules.items() if isinstance(each, NORMS)}

    def of_sequences(name: str) -> bool:
        if isinstance(modules[name], nn.Linear):
            return _within(name, beside)
        return isinstance(modules[name], (nn.RNNBase, nn.RNNCellBase))

    few = {name: share for name, share in shares.items() if share < FEW and of_sequences(name)}
    if few:
        first = next(iter(few))
        _warn(
            f"{listed([*few])} would keep {100 * min(few.values()):.2g} % of the outputs. Recurrent layers, "
            "and linear layers beside layer norms, as in Transformers, learn badly from so few. With 16 % an LSTM came "
            "to a WER of 23.8 instead of 9.4 %, a Transformer to a BLEU of 1.2 instead of 99.7; with half of the "
            f"outputs both were within two points. Keep half, by k=0.5 or k={{{first!r}: 0.5, ...}}, or leave these "
            f"layers out, by skip=[{first!r}, ...]"
        )


def _warn_of_norms(model: nn.Module, changed: Collection[str]) -> None:
    """Warn of batch norms after convolutions, as far as the order of the modules tells."""
    followed = [
        (name, other)
        for (name, layer), (other, norm) in pairwise(model.named_modules())
        if name in changed and isinstance(layer, _ConvNd) and isinstance(norm, _BatchNorm)
    ]
    if followed:
        name, norm = followed[0]
        _warn(
            f"a batch norm follows {len(followed)} of the convolutions ({norm} after {name}). Its backward pass "
            "spreads each channel's gradient over the batch, and scales it by weight over standard deviation, which "
            "decides what is kept. Compare the accuracy with a run without meProp, or leave them out by skip"
        )


def _within(name: str, blocks: Collection[str]) -> bool:
    """Tell whether a layer is in one of these modules, at any depth."""
    above = accumulate(name.split(".")[:-1], lambda path, own: f"{path}.{own}")
    return "" in blocks or any(each in blocks for each in above)


def _warn(text: str) -> None:
    """Warn on rank 0, at the line of the user that called ``enable``."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0:
        warnings.warn(f"meProp: {text}", stacklevel=4)
