"""What a parameter is for: a property of the module that owns it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "conv": (_ConvNd,),
    "linear": (nn.Linear, nn.Bilinear, nn.MultiheadAttention),
    "norm": (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    "other": (),
}
"""Modules of each kind; ``other`` is what none of them owns (recurrent layers, bare parameters)."""


def kinds_of(module: nn.Module) -> dict[str, str]:
    """The kind of every parameter, by its name: that of the innermost module around it that has one.

    A bias is of its layer's kind, and so is what a subclass of a layer, or a parametrization, owns. A parameter that
    two modules share is of the first one's kind.
    """
    modules = dict(module.named_modules())
    return {name.replace("_orig_mod.", ""): _kind(modules, name) for name, _ in module.named_parameters()}


def _kind(modules: dict[str, nn.Module], name: str) -> str:
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        for kind, types in KINDS.items():
            if isinstance(modules[owner], types):
                return kind
    return "other"
