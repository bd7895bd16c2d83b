"""What a layer must know to propagate only a part of its output gradient, and what it remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

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
