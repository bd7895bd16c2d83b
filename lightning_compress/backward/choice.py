"""What is kept of an output gradient, and what becomes of the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.backward import selection
from lightning_compress.backward.sparsity import Sparsity


def choose_and_sum(gradient: Tensor, sparsity: Sparsity, *, signed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keep the outputs that matter; what is dropped goes into the memory, if there is one.

    Where ranks choose together, and not all is kept, this is a collective call: one all-reduce of ``width`` floats.

    Args:
        gradient: of the outputs, ``[rows, width]``, or ``[batch, width, ...]`` of images.
        sparsity: how many are kept, and by whose choice.
        signed: whether the plain sums are wanted too, which take no further pass over the gradient.

    Returns:
        indices of the outputs that are kept, ascending; and that part of the gradient, ``[rows, k]`` or
        ``[batch, k, ...]``. Where each example has a choice of its own, all outputs that any of them keeps, with zeros.
        Last the sums of all of the gradient, ``[width]``, or None.
    """
    memory, share = sparsity.memory, None
    if memory is not None:
        memory = memory.to(gradient.device)
        share = memory * (gradient.shape[1] / max(1, gradient.numel()))  # of each row
    if sparsity.per_example:
        return *_of_each(gradient, sparsity, share), gradient.sum(0) if signed else None
    score, plain = selection.sums(gradient, signed or bool(sparsity.decay) or memory is not None)
    if memory is not None:
        score = score + memory.abs()
    if sparsity.group is not None and sparsity.k < sparsity.width:  # else there is no choice, nor others that make it
        torch.distributed.all_reduce(score, group=sparsity.group)
    index = selection.top(score, sparsity.k)
    if sparsity.hits is not None:
        _count((score.index_select(0, index) > 0).long(), index, sparsity, 1)
    kept = gradient.index_select(1, index)
    if plain is not None and (sparsity.decay or memory is not None):
        total = plain.to(torch.float32, copy=True)
        if memory is not None and share is not None:
            kept = kept + share.index_select(0, index).to(kept.dtype).view(-1, *[1] * (kept.ndim - 2))
            total += memory
        _remember(total.index_fill_(0, index, 0), sparsity, len(gradient))
    return index, kept, plain


def _of_each(gradient: Tensor, sparsity: Sparsity, share: Tensor | None) -> tuple[Tensor, Tensor]:
    whole = gradient if share is None else gradient + share.to(gradient.dtype)
    kept = selection.kept_of_each(whole, sparsity.k)
    if sparsity.hits is not None:
        _count((kept != 0).sum(0), None, sparsity, len(kept))
    if sparsity.decay or share is not None:
        _remember((whole - kept).sum(0, dtype=torch.float32), sparsity, len(gradient))
    if torch.compiler.is_compiling():  # a compiler wants shapes that do not depend on values
        return torch.arange(kept.shape[1], device=kept.device), kept
    index = selection.touched(kept)
    return index, kept.index_select(1, index)


def _remember(left: Tensor, sparsity: Sparsity, rows: int) -> None:
    """Keep what was dropped, unless it is not finite: that step is skipped, and would stay in the memory for ever."""
    if not rows:
        return
    if sparsity.k == sparsity.width:  # all of it was added
        sparsity.memory = None
        return
    old = torch.zeros_like(left) if sparsity.memory is None else sparsity.memory.to(left.device)
    sparsity.memory = torch.where(left.isfinite().all(), left * sparsity.decay, old)


def _count(times: Tensor, index: Tensor | None, sparsity: Sparsity, choices: int) -> None:
    """Note how many times outputs were kept and not zero."""
    assert sparsity.hits is not None
    sparsity.hits = sparsity.hits.to(times.device)
    sparsity.hits.index_add_(0, torch.arange(len(times), device=times.device) if index is None else index, times)
    sparsity.seen += choices
