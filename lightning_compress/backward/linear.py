"""Linear layers whose backward pass follows the largest output gradients: meProp (Sun et al., ICML 2017)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_compress.backward.autocast import autocast_dtype
from lightning_compress.backward.choice import choose_and_sum
from lightning_compress.backward.selection import over_rows
from lightning_compress.backward.sparsity import SparseLayer, Sparsity, eagerly

__all__ = ["SparseLinear", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, sparsity: Sparsity) -> Tensor:
    """``functional.linear`` with a sparse backward pass.

    Args:
        x: ``[..., in]``, strided.
        weight: ``[out, in]``.
        bias: ``[out]`` or None.
        sparsity: how sparse; ``width`` is ``out``.

    Returns:
        ``[..., out]``, the same bits as ``functional.linear``.

    Raises:
        ValueError: ``x`` is a sparse tensor.
    """
    if x.layout != torch.strided:
        raise ValueError(f"{sparsity.name}: meProp takes dense inputs, not {x.layout}; convert it by x.to_dense()")
    if not sparsity.active or not torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    dtype = autocast_dtype(x)
    if torch.compiler.is_compiling() and not sparsity.stateless:
        return cast(Tensor, _apply_eagerly(x, weight, bias, sparsity, dtype))
    return cast(Tensor, _Linear.apply(x, weight, bias, sparsity, dtype))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """Gathers k rows of the weight and k columns of the gradient: two small products instead of two large ones."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sparsity: Sparsity, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.sparsity, ctx.x_dtype, ctx.bias_dtype = sparsity, x.dtype, None if bias is None else bias.dtype
        inner = x if dtype is None else x.to(dtype)
        ctx.save_for_backward(inner, weight)
        if dtype is None:
            return functional.linear(inner, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(inner, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second(ctx.sparsity)
        x, weight = ctx.saved_tensors
        sparsity: Sparsity = ctx.sparsity
        full = gradients[0].reshape(-1, gradients[0].shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        index, kept, plain = choose_and_sum(full, sparsity, signed=needs_bias and not sparsity.sparse_bias)
        dx = dweight = dbias = None
        if needs_x:
            dx = (kept @ weight.index_select(0, index).to(kept.dtype)).view(x.shape).to(ctx.x_dtype)
        if needs_weight:
            # [in, k]: several times as fast as [k, in], which has few rows to share among threads
            rows = (x.reshape(-1, x.shape[-1]).t() @ kept).t()
            if torch.compiler.is_compiling():
                dweight = weight.new_zeros(weight.shape).index_copy(0, index, rows.to(weight.dtype))
            else:
                dweight = sparsity.gradient("weight").make(weight, index, rows, ctx.next_functions[1][0])
        if needs_bias:
            dbias = bias_gradient(None if sparsity.sparse_bias else plain, index, kept, full.shape[1]).to(
                ctx.bias_dtype
            )
        return dx, dweight, dbias, None, None


_apply_eagerly = eagerly(_Linear.apply)


def refuse_second(sparsity: Sparsity) -> None:
    """Refuse a backward pass that is to be differentiated itself.

    Raises:
        RuntimeError: it is.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{sparsity.name}: meProp's backward pass has no derivative (create_graph=True, second derivatives); leave "
            "this layer out, or call lightning_compress.backward.disable(model) first"
        )


def bias_gradient(plain: Tensor | None, index: Tensor, kept: Tensor, width: int) -> Tensor:
    """The bias's gradient: of all outputs, as the paper's code has it, where their sums are given; or of those kept."""
    if plain is not None:
        return plain
    return kept.new_zeros(width).index_copy(0, index, kept.sum(over_rows(kept)))


class SparseLinear(SparseLayer, nn.Linear):
    """``nn.Linear`` with a sparse backward pass."""

    ordinary = nn.Linear

    @classmethod
    def width_of(cls, module: nn.Module) -> int:
        """Its outputs."""
        return cast(nn.Linear, module).out_features

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        return linear(input, self.weight, self.bias, self.sparsity)
