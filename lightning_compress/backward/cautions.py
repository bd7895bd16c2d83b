"""What is known to train worse with a sparse backward pass, said once when layers are changed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

FEW = 0.3
"""Share of the outputs below which recurrent layers and Transformers learn badly: with 0.16 they do, with 0.5 not."""
NORMS = (nn.LayerNorm, nn.RMSNorm)
SHOWN = 3
"""Layers that are named."""


def warn_of_few(model: nn.Module, shares: Mapping[str, float]) -> None:
    """Say which layers that a sequence goes through keep too few of their outputs.

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
    if few and _speaks():
        names = [*few][:SHOWN]
        others = f" and {len(few) - SHOWN} more" if len(few) > SHOWN else ""
        warnings.warn(
            f"meProp: {', '.join(names)}{others} would keep {100 * min(few.values()):.2g} % of the outputs. Recurrent "
            "layers, and linear layers beside layer norms, as in Transformers, learn badly from so few: with 16 % an "
            "LSTM came to a WER of 23.8 instead of 9.4 %, a Transformer to a BLEU of 1.2 instead of 99.7; with half of "
            f"them both were within two points. Keep half, by k=0.5 or k={{{names[0]!r}: 0.5, ...}}, or leave these "
            f"layers out, by skip=[{names[0]!r}, ...]",
            stacklevel=3,
        )


def warn_of_norms(model: nn.Module, changed: Collection[str]) -> None:
    """Say that batch norms follow convolutions, as far as the order of the modules tells.

    Args:
        model: that has the layers.
        changed: names of those with a sparse backward pass.
    """
    followed = [
        (name, other)
        for (name, layer), (other, norm) in pairwise(model.named_modules())
        if name in changed and isinstance(layer, _ConvNd) and isinstance(norm, _BatchNorm)
    ]
    if followed and _speaks():
        name, norm = followed[0]
        warnings.warn(
            f"meProp: a batch norm follows {len(followed)} of the convolutions ({norm} after {name}): its backward "
            "pass spreads each channel's gradient over the batch, and scales it by weight over standard deviation, by "
            "which channels are then chosen. Compare the accuracy with a run without meProp, or leave them out by skip",
            stacklevel=3,
        )


def _within(name: str, blocks: Collection[str]) -> bool:
    """Whether a layer is in one of these modules, at any depth."""
    above = accumulate(name.split(".")[:-1], lambda path, own: f"{path}.{own}")
    return "" in blocks or any(each in blocks for each in above)


def _speaks() -> bool:
    """Rank 0 speaks for all."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
