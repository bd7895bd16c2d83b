"""Make weight gradients with few nonzero rows, without filling the others with zeros in each step.

Autograd takes a gradient over as ``weight.grad`` if nobody else holds the *tensor*; who holds its *memory* does not
matter. So a buffer is kept, and each gradient is another tensor on it. The buffer is reused once nobody else has its
memory: ``weight.grad``, a user's copy, or a second use of the weight in the same backward pass. Then the rows of last
time are cleared, or all rows if somebody wrote into it (the version counter tells) or if there are several ranks. That
takes a sixth of the time of new zeros, whose pages the system must provide first.

Writes through ``grad.data`` or ``grad.numpy()`` do not count as a version: such rows are never cleared. To clear all
rows always would cost half of the gain at small batches (4096 x 4096, 32 rows: 2.5 x instead of 1.4 x).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOST_BUFFERS = 2
"""Of one weight. Several are in use only if it is used several times in one forward pass."""
COUNTS = hasattr(torch._C, "_storage_Use_Count")


def _holders(tensor: Tensor) -> int:
    """Count the holders of a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) if COUNTS else 0


def _several_ranks() -> bool:
    """Tell whether a collective may have written into a gradient: an all-reduce does not change its version."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Buffer:
    """Memory of one gradient; all rows but known ones are zero.

    Args:
        weight: gives shape, strides, dtype and device.
    """

    def __init__(self, weight: Tensor) -> None:
        self.tensor = torch.zeros_like(weight, requires_grad=False)
        self._alone = _holders(self.tensor)
        self._rows: list[Tensor] = []
        self._version = self.tensor._version

    def is_free(self) -> bool:
        """Tell whether nobody else has its memory."""
        return COUNTS and _holders(self.tensor) <= self._alone

    def fill(self, index: Tensor, rows: Tensor) -> Tensor:
        """Set these rows, and all others to zero.

        Returns:
            a tensor on this memory that only the caller holds.
        """
        if self.tensor._version != self._version or _several_ranks():  # clipped, averaged, or anything else
            self.tensor.zero_()
        else:
            for each in self._rows:
                self.tensor.index_fill_(0, each, 0)
        self.tensor.index_copy_(0, index, rows)
        self._rows, self._version = [index], self.tensor._version
        return self.tensor.detach()

    def will_gain(self) -> None:
        """Expect unknown rows: autograd is about to add in place whatever reaches the weight in this pass."""
        self._rows, self._version = [], -1


class RowGradient:
    """Makes the gradients of one weight."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []

    def make(self, weight: Tensor, index: Tensor, rows: Tensor, node: Any = None) -> Tensor:
        """Return what a backward function returns as the gradient of ``weight``.

        Args:
            weight: the whole weight; rows lie along its first dimension.
            index: int64, ``[k]``, ascending, unique.
            rows: ``[k, ...]``, of any strides and dtype.
            node: of ``ctx.next_functions``, to which the gradient goes.

        Returns:
            a dense tensor. If ``weight.grad`` exists and nobody looks at what is added to it, a sparse one, which
            autograd adds row by row.
        """
        rows = rows.to(weight.dtype)
        if not (COUNTS and type(weight) is torch.nn.Parameter and weight.is_leaf):
            return torch.zeros_like(weight, requires_grad=False).index_copy(0, index, rows)
        if weight.grad is not None and _accumulates(weight, node):
            for buffer in self._buffers:
                if buffer.tensor.data_ptr() == weight.grad.data_ptr():
                    buffer.will_gain()
            return torch.sparse_coo_tensor(
                index[None], rows.contiguous(), weight.shape, check_invariants=False, is_coalesced=True
            )
        return self._free(weight).fill(index, rows)

    def _free(self, weight: Tensor) -> Buffer:
        self._buffers = [each for each in self._buffers if _form(each.tensor) == _form(weight)]
        for buffer in self._buffers:
            if buffer.is_free():
                return buffer
        self._buffers = [*self._buffers, Buffer(weight)][-MOST_BUFFERS:]
        return self._buffers[-1]


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _accumulates(weight: Tensor, node: Any) -> bool:
    """Tell whether autograd will add the gradient to ``weight.grad``, and nobody sees it before."""
    grad = weight.grad
    if node is None or weight._backward_hooks or grad is None or grad.layout != torch.strided:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which hands gradients to its caller
        return False
