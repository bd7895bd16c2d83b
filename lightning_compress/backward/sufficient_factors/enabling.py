"""Which layers of a model travel as factors: all ranks choose alike, or all refuse."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from lightning_compress.backward.sufficient_factors.factors import Factors
from lightning_compress.backward.sufficient_factors.layers import choose
from lightning_compress.backward.sufficient_factors.settings import FactorSettings
from lightning_compress.collectives import TorchCollective
from lightning_compress.collectives.torch import backend_of


def enable(
    module: nn.Module, settings: FactorSettings | None = None, collective: TorchCollective | None = None
) -> Factors | None:
    """Take the weights of linear layers out of DistributedDataParallel, to average them by their factors.

    A collective call, before the model is wrapped; then ``begin`` with the wrapped one.

    Args:
        module: the model.
        settings: which layers, and how; None: the defaults.
        collective: the ranks that average; None: those of the default process group.

    Returns:
        the handle; None on one rank, where nothing is changed.

    Raises:
        ValueError: a layer cannot travel as factors, so many ranks never pay, or ranks chose differently; on every
            rank, and nothing was changed.
    """
    settings = settings or FactorSettings()
    collective = collective or TorchCollective()
    problem, layers = None, []
    try:
        layers = choose(module, settings, collective.size)
    except ValueError as error:  # the other ranks wait for word
        problem = error
    told = [(each.names, tuple(each.weight.shape), str(each.weight.dtype)) for each in layers]
    agreed_on = _agree(repr([settings, told]), collective, next(module.parameters()).device)
    if problem:
        raise problem
    if not agreed_on:
        raise ValueError(
            "ranks chose different layers or settings for sufficient factors, or one of them cannot use them and says "
            f"why; rank {collective.rank} has {[each.name for each in layers]} by {settings}"
        )
    return Factors(module, layers, settings, collective.size) if collective.size > 1 else None


def _agree(told: str, collective: TorchCollective, device: torch.device) -> bool:
    """Whether all ranks say the same; by tensors on the model's device, or, of one that is still to move, on CUDA."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(told.encode()).digest()), dtype=torch.uint8)
    mine = mine.to(device if backend_of(device.type, collective.group) else "cuda")
    everyone = mine.new_empty(collective.size, len(mine))
    collective.all_gather(mine, everyone)
    return bool(everyone.eq(everyone[0]).all())
