"""Averages of what optimizers keep: momenta, second moments."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.gossip.neighbours import Neighbours


def average_states(optimizers: Iterable[Optimizer], neighbours: Neighbours, number: int) -> None:
    """The weighted means with neighbours of all states that have a parameter's shape, in place and as float32.

    An edge between ranks that do not have equally many (a GradScaler skipped one's first step) is left out, on both
    sides.

    Args:
        optimizers: whose states.
        neighbours: to talk to.
        number: of the round.
    """
    optimizers = list(optimizers)
    found = list(_states(optimizers))
    where = next(parameter for each in optimizers for group in each.param_groups for parameter in group["params"])
    own = torch.cat([torch.zeros(0, device=where.device), *(each.reshape(-1).float() for each in found)])
    theirs = neighbours.tell_any(own, number)
    total, least, most = own.clone(), own.clone(), own.clone()
    for peer, weight in neighbours.weights(number).items():
        if len(theirs[peer]) == len(own):
            total.add_(theirs[peer] - own, alpha=weight)
            torch.minimum(least, theirs[peer], out=least)
            torch.maximum(most, theirs[peer], out=most)
    # rounding must not make a second moment negative
    for each, part in zip(found, total.clamp_(least, most).split([each.numel() for each in found]), strict=True):
        each.copy_(part.view(each.shape))


def _states(optimizers: Iterable[Optimizer]) -> Iterable[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for name in sorted(state.keys() - {"step"}):  # a number, on the CPU: of a scalar's shape
                    value = state[name]
                    if torch.is_tensor(value) and value.is_floating_point() and value.shape == parameter.shape:
                        yield value
