"""Means of optimizer states with the neighbours: momenta, second moments."""

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
    """Replace all states of a parameter's shape by their weighted means with the neighbours, computed in float32.

    An edge skips a parameter if its two ranks keep different states for it: one of them has not used it yet (an
    expert's; a GradScaler skipped its first step), or their optimizers differ.

    Args:
        optimizers: of this rank; their states change in place.
        neighbours: the transport.
        number: of the round.
    """
    optimizers = list(optimizers)
    states = _states(optimizers)
    devices = (each.device for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
    device = next(devices)
    shapes = [[(name, tuple(state.shape)) for name, state in by_name.items()] for by_name in states]
    marks = torch.tensor([zlib.crc32(repr(each).encode()) for each in shapes], dtype=torch.int64, device=device)
    alike = {peer: _alike(marks, theirs) for peer, theirs in neighbours.exchange_any(marks, number).items()}
    vectors = {flags: _flat(compress(states, flags), device) for flags in set(alike.values())}
    received = {peer: torch.empty_like(vectors[flags]) for peer, flags in alike.items()}
    neighbours.swap({peer: vectors[flags] for peer, flags in alike.items()}, received)
    sizes = {flags: [state.numel() for each in compress(states, flags) for state in each.values()] for flags in vectors}
    rest = {peer: iter(vector.split(sizes[alike[peer]])) for peer, vector in received.items()}
    for place, by_name in enumerate(states):
        weights = {peer: weight for peer, weight in neighbours.weights(number).items() if alike[peer][place]}
        for state in by_name.values():
            _average(state, [(weight, next(rest[peer])) for peer, weight in weights.items()])


def _average(state: Tensor, received: list[tuple[float, Tensor]]) -> None:
    own = state.float()
    total, least, most = own.clone(), own, own
    for weight, vector in received:
        theirs = vector.view(own.shape)
        total.add_(theirs - own, alpha=weight)
        least, most = torch.minimum(least, theirs), torch.maximum(most, theirs)
    state.copy_(total.clamp_(least, most))  # rounding must not make a second moment negative


def _alike(marks: Tensor, theirs: Tensor) -> tuple[bool, ...]:
    return tuple((marks == theirs).tolist()) if len(marks) == len(theirs) else (False,) * len(marks)


def _flat(states: Iterable[dict[str, Tensor]], device: torch.device) -> Tensor:
    parts = (state.reshape(-1).float() for by_name in states for state in by_name.values())
    return torch.cat([torch.zeros(0, dtype=torch.float32, device=device), *parts])


def _states(optimizers: Iterable[Optimizer]) -> list[dict[str, Tensor]]:
    """Return the states to average, by name, for each parameter in the optimizers' order."""
    return [
        _of_shape(optimizer.state.get(parameter, {}), parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _of_shape(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    names = sorted(state.keys() - {"step"})  # a scalar on the CPU, which a scalar parameter's shape would match
    tensors = {name: state[name] for name in names if torch.is_tensor(state[name])}
    return {name: each for name, each in tensors.items() if each.is_floating_point() and each.shape == parameter.shape}
