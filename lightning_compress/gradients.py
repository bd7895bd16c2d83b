"""Gradients that a user hands over, checked."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from os import PathLike

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]


def read(given: object) -> list[Gradients]:
    """Take gradients, load them where a path is given, and check them.

    Args:
        given: a mapping of names to tensors, a sequence of such mappings, or the path of a file of either.

    Returns:
        The steps, at least one, each of at least one finite floating-point tensor; names, shapes and device are the
        same in all of them.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(given, str | PathLike):
        given = _load(given)
    steps = [given] if isinstance(given, Mapping) else given
    if not isinstance(steps, Sequence) or not all(isinstance(step, Mapping) for step in steps):
        raise ValueError(
            f"gradients is {type(given).__name__}: give a mapping of names to tensors, such as "
            "{name: p.grad for name, p in model.named_parameters()}, a list of them, or the path of either"
        )
    if not steps or not steps[0]:
        raise ValueError("gradients is empty: there is nothing to compare on")
    for number, step in enumerate(steps):
        where = f" of step {number}" if len(steps) > 1 else ""
        for name, gradient in step.items():
            _check(f"the gradient {name!r}{where}", gradient)
    described = [{name: (g.shape, g.device) for name, g in step.items()} for step in steps]
    if len({device for step in described for _, device in step.values()}) > 1:
        raise ValueError("gradients are on several devices; bring them to one")
    for number, step in enumerate(described):
        if step != described[0]:
            names = [name for name in described[0] | step if described[0].get(name) != step.get(name)]
            raise ValueError(
                f"step {number} differs from step 0 in the names or shapes of {', '.join(map(repr, names[:5]))}; "
                "steps are successive gradients of one model"
            )
    return list(steps)


def _check(what: str, gradient: object) -> None:
    if not isinstance(gradient, Tensor):
        raise ValueError(f"{what} is {type(gradient).__name__}, not a tensor; leave parameters without one out")
    if not gradient.is_floating_point() or gradient.layout != torch.strided:
        raise ValueError(
            f"{what} is {gradient.dtype}, {gradient.layout}; only dense floating-point ones are compressed"
        )
    if not gradient.float().isfinite().all():
        raise ValueError(f"{what} holds NaN, infinity or more than float32 can; take a step whose gradients are finite")


def _load(path: str | PathLike[str]) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is no file of tensors; write it with torch.save(gradients, path)") from error
