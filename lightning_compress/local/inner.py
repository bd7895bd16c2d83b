"""What happens to the ranks' own optimizers: before the first round, and after one that was left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_reduce_bytes


def average_gradients(optimizer: Optimizer, ranks: Collective) -> int:
    """Replace an optimizer's gradients by their mean, each in its own dtype; a collective call.

    A parameter that was not used on this rank counts as zeros.

    Returns:
        bytes that this rank sent.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
    sent = 0
    for gradients in by_dtype.values():
        flat = torch.cat([each.reshape(-1) for each in gradients])
        ranks.all_reduce(flat)
        flat /= ranks.size
        for each, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            each.copy_(mean.view(each.shape))
        sent += all_reduce_bytes(flat.nbytes, ranks.size)
    return sent


def forget_nonfinite(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers begin anew where their states are not finite, and would make parameters so in every round."""
    for optimizer in optimizers:
        for parameter, kept in list(optimizer.state.items()):
            tensors = [each for each in kept.values() if isinstance(each, Tensor) and each.is_floating_point()]
            if not all(bool(each.isfinite().all()) for each in tensors):
                del optimizer.state[parameter]
