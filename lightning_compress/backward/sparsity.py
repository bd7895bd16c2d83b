"""What a layer must know to propagate only a part of its output gradient, and what it remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_compress.backward import selection
from lightning_compress.backward.rows import RowGradient
from lightning_compress.backward.selection import Amount, count_of


@dataclass(eq=False)
class Sparsity:
    """How sparse the backward pass of one layer is; its attribute ``sparsity``.

    It is no buffer of the module: ``state_dict`` has the keys it always had, and DistributedDataParallel, which
    broadcasts buffers, leaves each rank's memory alone.

    Args:
        name: of the layer, for messages.
        width: outputs of which ``k`` are kept (of each gate, in a recurrent layer).
        k: how many are kept now; ``width`` is the ordinary backward pass, which nothing of this touches.
        per_example: each example keeps its own ``k``; otherwise one choice holds for the minibatch.
        sparse_bias: only outputs that are kept have a gradient of their bias.
        decay: what is left of the memory after a step, 0 to 1; 0: nothing is remembered.
        group: process group whose ranks choose together; None: each rank chooses alone.
        memory: what was dropped so far, per rank: float32, ``[width]``; None: nothing.
        gradients: of the layer's weights, by their names.
        per_sequence: in a recurrent layer one choice holds for all time steps; otherwise each step has its own.
        hits: how often each output was kept and not zero, int64 ``[width]``; None: nobody counts.
        seen: how often outputs were chosen since counting began.
    """

    name: str
    width: int
    k: int
    per_example: bool = False
    sparse_bias: bool = False
    decay: float = 0.0
    group: Any = None
    memory: Tensor | None = None
    gradients: dict[str, RowGradient] = field(default_factory=dict)
    per_sequence: bool = False
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
        """Keep the outputs that matter; what is dropped goes into the memory, if there is one.

        Where ranks choose together, and not all is kept, this is a collective call: one all-reduce of ``width`` floats.

        Args:
            gradient: of the outputs, ``[rows, width]``, or ``[batch, width, ...]`` of images.
            signed: whether the plain sums are wanted too, which take no further pass over the gradient.

        Returns:
            indices of the outputs that are kept, ascending; and that part of the gradient, ``[rows, k]`` or
            ``[batch, k, ...]``. Where each example has a choice of its own, all outputs that any of them keeps, with
            zeros. Last the sums of all of the gradient, ``[width]``, or None.
        """
        share = None
        if self.memory is not None:
            self.memory = self.memory.to(gradient.device)
            share = self.memory * (gradient.shape[1] / max(1, gradient.numel()))  # of each row
        if self.per_example:
            return *self._of_each(gradient, share), gradient.sum(0) if signed else None
        score, plain = selection.sums(gradient, signed or bool(self.decay) or share is not None)
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
        """The outputs that are kept of ``[width]`` or ``[gates, width]``, by this rank's scores or those of all."""
        if self.group is not None and self.k < self.width:  # else there is no choice, nor others that make it
            torch.distributed.all_reduce(score, group=self.group)
        return selection.top(score, self.k)

    def _of_each(self, gradient: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor]:
        whole = gradient if share is None else gradient + share.to(gradient.dtype)
        kept = selection.kept_of_each(whole, self.k)
        if self.hits is not None:
            self._count((kept != 0).sum(0), torch.arange(kept.shape[1], device=kept.device), len(kept))
        if self.decay or share is not None:
            self._remember((whole - kept).sum(0, dtype=torch.float32), len(gradient))
        if torch.compiler.is_compiling():  # a compiler wants shapes that do not depend on values
            return torch.arange(kept.shape[1], device=kept.device), kept
        index = selection.touched(kept)
        return index, kept.index_select(1, index)

    def _remember(self, left: Tensor, rows: int) -> None:
        """Keep what was dropped, unless it is not finite: that step is skipped, and would stay there for ever."""
        if not rows:
            return
        if self.k == self.width:  # all of it was added
            self.memory = None
            return
        old = torch.zeros_like(left) if self.memory is None else self.memory
        self.memory = torch.where(left.isfinite().all(), left * self.decay, old)

    def _count(self, times: Tensor, index: Tensor, choices: int) -> None:
        """Note how many times outputs were kept and not zero."""
        assert self.hits is not None
        self.hits = self.hits.to(times.device).index_add_(0, index, times)
        self.seen += choices

    def gradient(self, name: str) -> RowGradient:
        """Where the gradients of the weight ``name`` are made."""
        return self.gradients.setdefault(name, RowGradient())

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: buffers are made again, and a process group belongs to its process."""
        return self.__dict__ | {"gradients": {}, "group": None}


class SparseLayer(nn.Module):
    """What every layer with a sparse backward pass is; the class that ``enable`` gives an ordinary layer.

    A subclass derives from this one and then from the layer's own class, is registered in ``transform.LAYERS``, and has
    a ``forward`` that obeys ``self.sparsity``. It adds no parameter, no buffer and no constructor: ``enable`` assigns
    ``module.__class__``, and ``disable`` assigns the old one again.
    """

    ordinary: ClassVar[type[nn.Module]]
    """The class of which it is a sparse kind."""
    weights: ClassVar[tuple[str, ...]] = ("weight",)
    """Names of the parameters whose gradients are sparse."""

    remembers: ClassVar[bool] = True
    """Whether what is dropped may be kept for the next time."""

    sparsity: Sparsity

    @classmethod
    def weights_of(cls, module: nn.Module) -> tuple[str, ...]:
        """Names of the parameters whose gradients are sparse, as this module has them."""
        return tuple(own for own in cls.weights if hasattr(module, own))

    @classmethod
    def width_of(cls, module: nn.Module) -> int:
        """Outputs of which ``k`` are kept."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, module: nn.Module, per_example: bool) -> str:
        """Why this module cannot be made sparse; empty: it can."""
        return ""


def eagerly(function: Any) -> Any:
    """A function that a compiler does not trace: it breaks the graph there."""
    return torch.compiler.disable(function)
