"""Gradients that a command line names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_compress.commands.called import called
from lightning_compress.comparison import Gradients
from lightning_compress.core.foreign import foreign_class

MOMENTS = ("momentum_buffer", "exp_avg")
"""What SGD and Adam call their means of past gradients."""


def gradients_of(source: str) -> Gradients | list[Gradients]:
    """Return the gradients that a command line names.

    Raises:
        ValueError: there are none.
    """
    if not Path(source).exists():
        return _called(source)
    try:
        content: Any = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = type(error).__name__
        if foreign := foreign_class(error):
            reason = f"it also holds a {foreign}"
        raise ValueError(
            f"{source} is not a file of tensors ({reason}); save the gradients alone, by torch.save({{name: p.grad for "
            "name, p in model.named_parameters()}, 'gradients.pt')"
        ) from error
    if isinstance(content, Mapping) and "optimizer_states" in content:
        moments = dict(_moments(content["optimizer_states"]))
        if not moments:
            raise ValueError(
                f"{source}: its optimizers keep no mean of gradients (SGD with momentum, Adam and AdamW do); save "
                "gradients by torch.save({name: p.grad for name, p in model.named_parameters()}, 'gradients.pt')"
            )
        return moments
    gradients: Gradients | list[Gradients] = content
    return gradients


def _moments(states: Any) -> Iterator[tuple[str, Tensor]]:
    for number, optimizer in enumerate(states):
        for place, state in optimizer["state"].items():
            for name in MOMENTS:
                if isinstance(tensor := state.get(name), Tensor):
                    yield f"optimizer {number}, parameter {place}", tensor


def _called(source: str) -> Gradients:
    fix = "write module:function, of a function that takes no arguments and returns gradients by name"
    given: Any = called(source, f"{source} is neither a file nor a function", fix)
    if isinstance(given, nn.Module):
        return {name: each.grad for name, each in given.named_parameters() if each.grad is not None}
    gradients: Gradients = given
    return gradients
