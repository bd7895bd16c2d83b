"""Removes neurons from a model during training: meSimp (Sun et al., arXiv:1711.06528)."""

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
"""Modules that may stand between two layers of a chain: they have nothing to remove for a neuron."""

WHOLE = {"LBFGS", "Adafactor", "Muon", "Shampoo"}
"""Optimizers whose state does not have an element for each element of a parameter."""


def chains(model: nn.Module) -> dict[str, str]:
    """Return the next linear layer by layer, in each ``nn.Sequential`` with only activations between the two."""
    next_layers = {}
    for prefix, module in model.named_modules():
        last = None
        for name, layer in _flat(module, prefix) if isinstance(module, nn.Sequential) else ():
            if isinstance(layer, nn.Linear):
                if last is not None:
                    next_layers[last] = name
                last = name
            elif not isinstance(layer, ELEMENTWISE):
                last = None
    return next_layers


def _flat(sequence: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for own, layer in sequence.named_children():
        name = f"{prefix}.{own}".lstrip(".")
        if isinstance(layer, nn.Sequential):
            yield from _flat(layer, name)
        else:
            yield name, layer


def followers(model: nn.Module, layers: Iterable[str], pairs: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the linear layer that takes the outputs of each layer.

    Args:
        model: contains all layers.
        layers: names of the layers that will lose neurons.
        pairs: names of the next layers by layer, in addition to those that ``chains`` finds.

    Returns:
        names of the next layers, by layer.

    Raises:
        ValueError: the next layer is unknown, or cannot lose inputs.
    """
    modules = dict(model.named_modules())
    known = {**chains(model), **(pairs or {})}
    for name in (pairs or {}).keys() - set(layers):
        raise ValueError(
            f"pairs={{{name!r}: ...}} is not a layer that meProp has changed; these are {', '.join(layers)}"
        )
    next_layers = {}
    for name in layers:
        if not isinstance(modules.get(name), nn.Linear):
            raise ValueError(
                f"meSimp removes neurons of nn.Linear, and {name} is {_kind(modules.get(name))}; exclude it by "
                f"skip=[{name!r}]"
            )
        if name not in known:
            raise ValueError(
                f"meSimp must know which layer takes the outputs of {name}, and finds it only in an nn.Sequential of "
                f"nn.Linear, activations and dropout. Give pairs={{{name!r}: 'the next layer'}}, or skip=[{name!r}]"
            )
        next_layers[name] = known[name]
    shared = Counter(next_layers.values())
    owners = Counter(id(each) for module in modules.values() for each in module.parameters(recurse=False))
    for name, following in next_layers.items():
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
            raise ValueError(f"{following} follows several layers; exclude all but one of them by skip")
        if parametrize.is_parametrized(after) or owners[id(after.weight)] > 1:
            raise ValueError(f"{following}.weight is tied or parametrized, and cannot lose columns; skip=[{name!r}]")
    return next_layers


def _kind(module: nn.Module | None) -> str:
    return "not there" if module is None else type(module).__name__


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError if rows cannot be removed from the state of an optimizer."""
    for each in optimizers:
        if type(each).__name__ in WHOLE:
            raise ValueError(
                f"meSimp cannot cut the state of {type(each).__name__}, which is not per element; use SGD, AdamW or "
                "another optimizer of torch.optim with a state for each element"
            )


def cut(
    model: nn.Module, name: str, following: str, keep: Tensor, optimizers: Iterable[Optimizer] = ()
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Keep some neurons of a layer: rows of its weight and bias, and columns of the next layer's weight.

    It creates new parameters without gradients. In the optimizers they replace the old ones, with states that are cut
    in the same way.

    Args:
        model: contains both layers.
        name: of the layer.
        following: name of the layer that takes its outputs.
        keep: int64 ``[kept]``, ascending: indices of the neurons to keep.
        optimizers: of the model.

    Returns:
        pairs of old and new parameters.

    Raises:
        ValueError: an optimizer's state is neither per element nor a scalar; nothing has changed then.
    """
    layer, after = (model.get_submodule(each) for each in (name, following))
    parts = [(layer, "weight", 0), (layer, "bias", 0), (after, "weight", 1)]
    tensors = [(module, own, getattr(module, own), axis) for module, own, axis in parts]
    optimizers = list(optimizers)
    for optimizer in optimizers:
        for _, own, old, _ in tensors:
            _check_state(optimizer, old, f"{name}.{own}")
    replaced = []
    for module, own, old, axis in tensors:
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
    """Shrink a model to the sizes of a ``state_dict``, so that it can be loaded.

    Args:
        model: with all neurons; changed in place.
        state_dict: of the same model after meSimp; for example ``torch.load("last.ckpt")["state_dict"]``.
        pairs: as given to ``MeSimp``.

    Returns:
        the model. Its weights are meaningless until the ``state_dict`` is loaded.

    Raises:
        ValueError: a layer is smaller, and its next layer is unknown.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    saved = {name: state_dict[key] for name in layers if (key := f"{name}.weight".lstrip(".")) in state_dict}
    smaller = [name for name, weight in saved.items() if len(weight) < layers[name].out_features]
    needed = {name: each for name, each in (pairs or {}).items() if name in smaller}
    for name, following in followers(model, smaller, needed).items():
        cut(model, name, following, torch.arange(len(saved[name]), dtype=torch.int64))
    return model
