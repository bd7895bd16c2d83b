"""What happens to the ranks' own optimizers: before the first round, and after one that was left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.collectives.means import sums_of
from lightning_compress.core import failures
from lightning_compress.engine.optimizers import skip_step


def average_gradients(optimizer: Optimizer, ranks: Collective) -> int:
    """Replace an optimizer's gradients by their mean, made in float32 for those in half precision; a collective call.

    A parameter that was not used on this rank counts as zeros; one that was used on none stays without a gradient, so
    that no optimizer decays or moves it.

    Returns:
        bytes that stock DDP would have sent.

    Raises:
        ExchangeError: a rank is gone or silent.
    """
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    dense = 0
    for dtype, parameters in by_dtype.items():
        used = [each.grad is not None for each in parameters]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        told = torch.tensor(used, device=gradients[0].device)
        with failures.explained(f"averaging gradients of {len(used)} parameters", ranks.rank):
            *sums, told = sums_of([*gradients, told], ranks, torch.promote_types(dtype, torch.float32))
        anywhere = used if all(used) else told.tolist()
        for parameter, gradient, total, wanted in zip(parameters, gradients, sums, anywhere, strict=True):
            if wanted:
                parameter.grad = gradient.copy_(total.div_(ranks.size))
        dense += all_reduce_bytes(sum(each.nbytes for each in gradients), ranks.size)
    return dense


def leave_out_nonfinite(optimizer: Optimizer, policy: str, step: int) -> bool:
    """Keep an optimizer from stepping by averaged gradients that are not finite, the same on all ranks.

    Args:
        optimizer: is about to step.
        policy: "skip" the step, "raise" an error, or "pass" them on.
        step: for the error.

    Returns:
        whether it is kept from it.

    Raises:
        FloatingPointError: they are not finite, and that is to be an error.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    if policy == "pass" or not parameters:
        return False
    if bool(torch.stack([each.grad.isfinite().all() for each in parameters]).all()):
        return False
    if policy == "raise":
        raise FloatingPointError(
            f"step {step}: the mean of the ranks' gradients is not finite; on_nonfinite='skip' leaves such steps out"
        )
    skip_step(optimizer)
    return True


def forget_nonfinite(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers begin anew where their states are not finite, and would make parameters so in every round."""
    for optimizer in optimizers:
        for parameter, kept in list(optimizer.state.items()):
            tensors = [each for each in kept.values() if isinstance(each, Tensor) and each.is_floating_point()]
            if not all(bool(each.isfinite().all()) for each in tensors):
                del optimizer.state[parameter]
