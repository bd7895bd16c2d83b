"""Choose which outputs of a layer take part in its backward pass, and remember what the others lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_compress.backward.gradient_buffer import RowGradient
from lightning_compress.backward.layer_swap import SwappedLayer

Amount = int | float
"""How many outputs are kept: a whole number of them, or a fraction in (0, 1]."""
BLOCK = (1 << 15) - 1
"""Elements that a CPU sums at a time: as many as torch gives to one thread. An operation on several threads may wait
milliseconds for the last of them if other programs run."""


def check_amount(amount: object, where: str) -> Amount:
    """Return a count or a fraction.

    Args:
        amount: what the user gave. ``1`` is one output, ``1.0`` is all of them.
        where: what it is called, such as ``k``.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(amount, int) and not isinstance(amount, bool) and amount > 0:
        return amount
    if isinstance(amount, float) and 0 < amount <= 1:
        return amount
    raise ValueError(
        f"{where}={amount!r} must be a whole number of outputs, 1 or more, or a fraction above 0.0 and at most 1.0"
    )


def count_of(amount: Amount, width: int, where: str) -> int:
    """Return how many of ``width`` outputs ``amount`` is. A fraction is rounded, to 1 at least.

    Raises:
        ValueError: it is none, or more than there are.
    """
    count = amount if isinstance(amount, int) else max(1, math.floor(amount * width + 0.5))
    if not 1 <= count <= width:
        raise ValueError(f"{where}: k={amount!r} must be from 1 to its width, {width}; or give a fraction such as 0.05")
    return count


def over_rows(gradient: Tensor) -> list[int]:
    """Return all dimensions but the second, which is that of the outputs."""
    return [0, *range(2, gradient.ndim)]


def sums(gradient: Tensor, signed: bool) -> tuple[Tensor, Tensor | None]:
    """Sum absolute values over the rows, which tells how much each output matters to a minibatch; and plain values.

    Args:
        gradient: ``[rows, width]``, or ``[batch, width, ...]`` of images.
        signed: whether the plain sum is wanted.

    Returns:
        ``[width]`` each, in float32 for 16-bit gradients. The second is None unless it is wanted.
    """
    over = over_rows(gradient)
    wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
    if gradient.device.type != "cpu" or torch.compiler.is_compiling() or gradient.numel() <= BLOCK:
        plain = gradient.sum(over, dtype=wide) if signed else None
        return gradient.abs().sum(over, dtype=wide), plain
    rows = max(1, BLOCK * len(gradient) // gradient.numel())
    absolute = torch.empty_like(gradient[:rows])  # stays in the cache: a new tensor of full size costs more than sums
    score = gradient.new_zeros(gradient.shape[1], dtype=wide)
    total = torch.zeros_like(score) if signed else None
    for part in gradient.split(rows):
        score += torch.abs(part, out=absolute[: len(part)]).sum(over, dtype=wide)
        if total is not None:
            total += part.sum(over, dtype=wide)
    return score, total


def top(score: Tensor, k: int) -> Tensor:
    """Return indices of the ``k`` largest, ascending. Of equal ones the first wins; NaN is larger than any number.

    Args:
        score: ``[width]``, or ``[several, width]``: ``k`` are chosen of each row.
        k: from 1 to the width.

    Returns:
        int64, ``[k]`` or ``[several, k]``.
    """
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values


def kept_of_each(gradient: Tensor, k: int) -> Tensor:
    """Set all but the ``k`` largest magnitudes of each row to zero. Of equal ones the first wins.

    Args:
        gradient: ``[rows, width]``, not changed.
        k: from 1 to the width.
    """
    index = top(gradient.abs(), k)
    return torch.zeros_like(gradient).scatter_(1, index, gradient.gather(1, index))


@dataclass(eq=False)
class Sparsity:
    """How sparse the backward pass of one layer is: its attribute ``sparsity``.

    Args:
        name: of the layer, for messages.
        width: outputs of which ``k`` are kept; in a recurrent layer, outputs of each gate.
        k: how many are kept now. ``width`` is the ordinary backward pass, without any change.
        per_example: each example keeps its own ``k``; otherwise one choice holds for the minibatch.
        sparse_bias: only outputs that are kept have a gradient of their bias.
        per_sequence: in a recurrent layer one choice holds for all time steps; otherwise each step has its own.
        decay: share of the memory that is left after a step, 0 to 1. 0: nothing is remembered.
        group: process group whose ranks choose together. None: each rank chooses alone.
        memory: what was dropped so far, per rank: float32, ``[width]``. None: nothing.
        gradients: of the layer's weights, by their names.
        hits: how often each output was kept and not zero, int64 ``[width]``. None: nobody counts.
        seen: how often outputs were chosen since counting began.
    """

    name: str
    width: int
    k: int
    per_example: bool = False
    sparse_bias: bool = False
    per_sequence: bool = False
    decay: float = 0.0
    group: Any = None
    memory: Tensor | None = None
    gradients: dict[str, RowGradient] = field(default_factory=dict)
    hits: Tensor | None = None
    seen: int = 0

    @property
    def active(self) -> bool:
        """Whether anything is dropped, or is still to be added."""
        return self.k < self.width or self.memory is not None

    @property
    def stateless(self) -> bool:
        """Whether a compiler may trace it: no memory, no communication, no counting."""
        return not self.decay and self.group is None and self.hits is None

    def resize(self, amount: Amount) -> None:
        """Keep another number of outputs from now on."""
        self.k = count_of(amount, self.width, self.name)

    def choose(self, gradient: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose the outputs that matter, and remember the others if there is a memory.

        If ranks choose together and something is dropped, this is a collective call: one all-reduce of ``width``
        floats.

        Args:
            gradient: of the outputs, ``[rows, width]``, or ``[batch, width, ...]`` of images.
            signed: whether the plain sums are wanted too. They take no further pass over the gradient.

        Returns:
            First the indices of the outputs that are kept, ascending. Then their part of the gradient, ``[rows, k]`` or
            ``[batch, k, ...]``. With ``per_example`` both have all outputs that any example keeps, with zeros. Last the
            sums of the whole gradient, ``[width]``, or None.
        """
        share = None
        if self.memory is not None:
            self.memory = self.memory.to(gradient.device)
            share = self.memory * (gradient.shape[1] / max(1, gradient.numel()))  # of each row
        if self.per_example:
            return *self._of_each(gradient, share), gradient.sum(0) if signed else None
        score, plain = sums(gradient, signed or bool(self.decay) or share is not None)
        if self.memory is not None:
            score = score + self.memory.abs()
        index = self.top(score)
        if self.hits is not None:
            self._count((score.index_select(0, index) > 0).long(), index, 1)
        kept = gradient.index_select(1, index)
        if share is not None:
            kept = kept + share.index_select(0, index).to(kept.dtype).view(-1, *[1] * (kept.ndim - 2))
        if plain is not None and (self.decay or self.memory is not None):
            total = plain.to(torch.float32, copy=True)
            if self.memory is not None:
                total += self.memory
            self._remember(total.index_fill_(0, index, 0), len(gradient))
        return index, kept, plain

    def top(self, score: Tensor) -> Tensor:
        """Return the outputs that are kept of ``[width]`` or ``[gates, width]``, by scores of this rank or of all."""
        if self.group is not None and self.k < self.width:  # else every rank keeps all
            torch.distributed.all_reduce(score, group=self.group)
        return top(score, self.k)

    def _of_each(self, gradient: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor]:
        whole = gradient if share is None else gradient + share.to(gradient.dtype)
        kept = kept_of_each(whole, self.k)
        index = torch.arange(kept.shape[1], dtype=torch.int64, device=kept.device)
        if self.hits is not None:
            self._count((kept != 0).sum(0), index, len(kept))
        if self.decay or share is not None:
            self._remember((whole - kept).sum(0, dtype=torch.float32), len(gradient))
        if torch.compiler.is_compiling():  # a compiler wants shapes that do not depend on values
            return index, kept
        index = (kept != 0).any(0).nonzero().flatten()
        return index, kept.index_select(1, index)

    def _remember(self, left: Tensor, rows: int) -> None:
        """Remember what was dropped if it is finite. A step that is not is skipped, and would stay there for ever."""
        if not rows:
            return
        if self.k == self.width:  # all of it was added
            self.memory = None
            return
        old = torch.zeros_like(left) if self.memory is None else self.memory
        self.memory = torch.where(left.isfinite().all(), left * self.decay, old)

    def _count(self, times: Tensor, index: Tensor, choices: int) -> None:
        """Count how many times outputs were kept and not zero."""
        assert self.hits is not None
        self.hits = self.hits.to(times.device).index_add_(0, index, times)
        self.seen += choices

    def gradient(self, name: str) -> RowGradient:
        """Return what makes the gradients of the weight ``name``."""
        return self.gradients.setdefault(name, RowGradient())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out buffers, and the process group, which belongs to its process."""
        return self.__dict__ | {"gradients": {}, "group": None}


class SparseLayer(SwappedLayer):
    """A layer with a sparse backward pass: what ``enable`` makes of an ordinary one.

    A subclass is registered in ``transform.LAYERS``, and its ``forward`` obeys ``self.sparsity``.
    """

    attribute = "sparsity"
    width: ClassVar[str]
    """The attribute of the ordinary layer that has the number of outputs of which ``k`` are kept."""
    sparsity: Sparsity

    @classmethod
    def refusal(cls, module: nn.Module, per_example: bool) -> str:
        """Say why this module cannot be made sparse; empty if it can."""
        return ""

    @classmethod
    def conflict(cls, sparsity: Sparsity) -> str:
        """Say which settings a layer of this class cannot have; empty if it can have these."""
        return ""
