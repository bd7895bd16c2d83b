"""Averages of what optimizers keep: momenta, second moments."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.gossip.neighbours import Neighbours


def average_states(optimizers: Iterable[Optimizer], neighbours: Neighbours, number: int) -> None:
    """The weighted means with neighbours of all states that have a parameter's shape, in place and as float32.

    A parameter of which two ranks do not keep the same is left out on both sides of their edge: one of them has not
    used it yet (an expert's; a GradScaler skipped its first step), or their optimizers differ.

    Args:
        optimizers: whose states.
        neighbours: to talk to.
        number: of the round.
    """
    optimizers = list(optimizers)
    kept = _states(optimizers)
    where = next(parameter for each in optimizers for group in each.param_groups for parameter in group["params"])
    named = [[(name, tuple(each.shape)) for name, each in states.items()] for states in kept]
    marks = torch.tensor([zlib.crc32(repr(each).encode()) for each in named], device=where.device)
    theirs = neighbours.tell_any(marks, number)
    alike = {peer: _alike(marks, each) for peer, each in theirs.items()}  # by parameter
    flat = {each: _flat(compress(kept, each), where.device) for each in set(alike.values())}
    received = {peer: torch.empty_like(flat[each]) for peer, each in alike.items()}
    neighbours.swap({peer: flat[each] for peer, each in alike.items()}, received)
    rest = {peer: iter(each.split(_sizes(compress(kept, alike[peer])))) for peer, each in received.items()}
    for place, states in enumerate(kept):
        weights = {peer: weight for peer, weight in neighbours.weights(number).items() if alike[peer][place]}
        for state in states.values():
            _average(state, [(weight, next(rest[peer])) for peer, weight in weights.items()])


def _average(state: Tensor, theirs: list[tuple[float, Tensor]]) -> None:
    own = state.float()
    total, least, most = own.clone(), own, own
    for weight, flat in theirs:
        each = flat.view(own.shape)
        total.add_(each - own, alpha=weight)
        least, most = torch.minimum(least, each), torch.maximum(most, each)
    state.copy_(total.clamp_(least, most))  # rounding must not make a second moment negative


def _alike(marks: Tensor, theirs: Tensor) -> tuple[bool, ...]:
    return tuple((marks == theirs).tolist()) if len(marks) == len(theirs) else (False,) * len(marks)


def _flat(kept: Iterable[dict[str, Tensor]], device: torch.device) -> Tensor:
    parts = (each.reshape(-1).float() for states in kept for each in states.values())
    return torch.cat([torch.zeros(0, device=device), *parts])


def _sizes(kept: Iterable[dict[str, Tensor]]) -> list[int]:
    return [each.numel() for states in kept for each in states.values()]


def _states(optimizers: Iterable[Optimizer]) -> list[dict[str, Tensor]]:
    """For each parameter, in the optimizers' order, what is averaged, by name."""
    return [
        _of_shape(optimizer.state.get(parameter, {}), parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _of_shape(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    names = sorted(state.keys() - {"step"})  # a number, on the CPU: of a scalar's shape
    tensors = {name: state[name] for name in names if torch.is_tensor(state[name])}
    return {name: each for name, each in tensors.items() if each.is_floating_point() and each.shape == parameter.shape}
