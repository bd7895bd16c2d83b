"""Removes neurons from a model while it is trained: meSimp (Sun et al., arXiv:1711.06528)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink),
    *(nn.Tanhshrink, nn.Threshold),
)
"""What may stand between two layers of a chain: a neuron that is removed leaves no trace there."""

WHOLE = {"LBFGS", "Adafactor", "Muon", "Shampoo"}
"""Optimizers whose state has no element for each of a parameter."""


def chains(model: nn.Module) -> dict[str, str]:
    """The linear layers that are followed by one, in any ``nn.Sequential``, with nothing but activations between."""
    found = {}
    for prefix, module in model.named_modules():
        last = None
        for name, layer in _flat(module, prefix) if isinstance(module, nn.Sequential) else ():
            if isinstance(layer, nn.Linear):
                if last is not None:
                    found[last] = name
                last = name
            elif not isinstance(layer, ELEMENTWISE):
                last = None
    return found


def _flat(sequence: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for own, layer in sequence.named_children():
        name = f"{prefix}.{own}".lstrip(".")
        if isinstance(layer, nn.Sequential):
            yield from _flat(layer, name)
        else:
            yield name, layer


def followers(model: nn.Module, layers: Iterable[str], pairs: Mapping[str, str] | None = None) -> dict[str, str]:
    """Which linear layer takes what each of these puts out.

    Args:
        model: has all of them.
        layers: names of those that are to lose neurons.
        pairs: names of layers and of those that follow them, beside those that ``chains`` finds.

    Returns:
        the name of the next layer, by name.

    Raises:
        ValueError: it is not known, or not possible.
    """
    modules = dict(model.named_modules())
    known = {**chains(model), **(pairs or {})}
    for name in (pairs or {}).keys() - set(layers):
        raise ValueError(f"pairs={{{name!r}: ...}} is no layer that meProp has changed; those are {', '.join(layers)}")
    found = {}
    for name in layers:
        if not isinstance(modules.get(name), nn.Linear):
            raise ValueError(
                f"meSimp removes neurons of nn.Linear, and {name} is {_kind(modules.get(name))}; leave it out by "
                f"skip=[{name!r}]"
            )
        if name not in known:
            raise ValueError(
                f"meSimp must know which layer takes the outputs of {name}: it sees that only in an nn.Sequential of "
                f"nn.Linear, activations and dropout; give pairs={{{name!r}: 'the next layer'}}, or skip=[{name!r}]"
            )
        found[name] = known[name]
    shared = Counter(found.values())
    owners = Counter(id(each) for module in modules.values() for each in module.parameters(recurse=False))
    for name, following in found.items():
        layer, after = modules[name], modules.get(following)
        if not isinstance(after, nn.Linear) or after is layer:
            raise ValueError(f"pairs={{{name!r}: {following!r}}}: that is {_kind(after)}, not another nn.Linear")
        assert isinstance(layer, nn.Linear)
        if after.in_features != layer.out_features:
            raise ValueError(
                f"{following} takes {after.in_features} inputs, and {name} has {layer.out_features} outputs: they do "
                "not follow one another"
            )
        if shared[following] > 1:
            raise ValueError(f"{following} follows several layers; leave all but one of them out by skip")
        if parametrize.is_parametrized(after) or owners[id(after.weight)] > 1:
            raise ValueError(f"{following}.weight is tied or parametrized, and cannot lose columns; skip=[{name!r}]")
    return found


def _kind(module: nn.Module | None) -> str:
    return "not there" if module is None else type(module).__name__


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse those whose state cannot lose rows.

    Raises:
        ValueError: there is one.
    """
    for each in optimizers:
        if type(each).__name__ in WHOLE:
            raise ValueError(
                f"meSimp cannot cut the state of {type(each).__name__}, which is not by element; use SGD, AdamW or "
                "another optimizer of torch.optim with a state for each element"
            )


def cut(
    model: nn.Module, name: str, following: str, keep: Tensor, optimizers: Iterable[Optimizer] = ()
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Leave some neurons of a layer: rows of its weight and bias, and columns of the next layer's weight.

    The parameters are new ones; gradients are dropped, and optimizers have the new parameters in the places of the old
    ones, with their states cut as well.

    Args:
        model: has both.
        name: of the layer.
        following: of the layer that takes its outputs.
        keep: int64, ascending; neurons that stay.
        optimizers: of the model.

    Returns:
        old and new parameters.

    Raises:
        ValueError: an optimizer's state is neither by element nor one number; then nothing has changed.
    """
    layer, after = (model.get_submodule(each) for each in (name, following))
    parts = [(layer, "weight", 0), (layer, "bias", 0), (after, "weight", 1)]
    found = [(module, own, getattr(module, own), axis) for module, own, axis in parts]
    optimizers = list(optimizers)
    for optimizer in optimizers:
        for _, own, old, _ in found:
            _check_state(optimizer, old, f"{name}.{own}")
    replaced = []
    for module, own, old, axis in found:
        if old is None:
            continue
        new = nn.Parameter(_kept(old.detach(), axis, keep), requires_grad=old.requires_grad)
        setattr(module, own, new)
        for optimizer in optimizers:
            _follow(optimizer, old, new, axis, keep)
        replaced.append((old, new))
    assert isinstance(layer, nn.Linear)
    assert isinstance(after, nn.Linear)
    layer.out_features = after.in_features = len(keep)
    return replaced


def _kept(tensor: Tensor, axis: int, keep: Tensor) -> Tensor:
    return tensor.index_select(axis, keep.to(tensor.device))


def _check_state(optimizer: Optimizer, parameter: Tensor | None, name: str) -> None:
    for key, value in optimizer.state.get(parameter, {}).items() if parameter is not None else ():
        if isinstance(value, Tensor) and parameter is not None and value.shape != parameter.shape and value.numel() > 1:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {key} {tuple(value.shape)} of {name} {tuple(parameter.shape)}, "
                "which meSimp cannot cut; use an optimizer with a state for each element, such as SGD or Adam"
            )


def _follow(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, axis: int, keep: Tensor) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if each is old else each for each in group["params"]]
    if old in optimizer.state:
        state: dict[str, Any] = optimizer.state.pop(old)
        optimizer.state[new] = {
            key: _kept(value, axis, keep) if isinstance(value, Tensor) and value.shape == old.shape else value
            for key, value in state.items()
        }


def shrink(model: nn.Module, state_dict: Mapping[str, Tensor], pairs: Mapping[str, str] | None = None) -> nn.Module:
    """Make a model as small as the one that a ``state_dict`` is of, so that it can be loaded.

    Args:
        model: with all neurons, changed in place.
        state_dict: of the same model after meSimp; for example ``torch.load("last.ckpt")["state_dict"]``.
        pairs: as given to ``MeSimp``.

    Returns:
        the model, whose weights mean nothing until they are loaded.

    Raises:
        ValueError: a layer is smaller, and it is not known which one follows it.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    saved = {name: state_dict[key] for name in layers if (key := f"{name}.weight".lstrip(".")) in state_dict}
    smaller = [name for name, weight in saved.items() if len(weight) < layers[name].out_features]
    own = {name: each for name, each in (pairs or {}).items() if name in smaller}
    for name, following in followers(model, smaller, own).items():
        cut(model, name, following, torch.arange(len(saved[name])))
    return model
