"""Linear layers and convolutions whose backward pass follows the largest output gradients.

Linear layers: meProp (Sun et al., ICML 2017); convolutions, by output channels: Wei et al., 2017.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from lightning_compress.backward.layer_swap import autocast_dtype, check_dense, refuse_second_derivative
from lightning_compress.backward.sparsity import SparseLayer, Sparsity, over_rows

__all__ = ["SparseConv1d", "SparseConv2d", "SparseLinear"]

Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Stride, padding and dilation of a convolution in one group, each by dimension of the kernel."""


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window | None, sparsity: Sparsity) -> Tensor:
    """Compute a layer with a sparse backward pass. Forward has the same bits as without.

    Args:
        x: strided.
        weight: ``[out, ...]``.
        bias: ``[out]`` or None.
        window: of a convolution; None: a linear layer.
        sparsity: how sparse; ``width`` is ``out``.
    """
    function = _apply_eagerly if torch.compiler.is_compiling() and not sparsity.stateless else _Sparse.apply
    return cast(Tensor, function(x, weight, bias, window, sparsity, autocast_dtype(x)))


def meprop_has_no_derivative(sparsity: Sparsity) -> None:
    """Raise in a backward pass that is to be differentiated itself.

    Raises:
        RuntimeError: it is.
    """
    refuse_second_derivative(
        sparsity.name, "meProp", f"skip=[{sparsity.name!r}], or lightning_compress.backward.disable(model)"
    )


class _Sparse(torch.autograd.Function):
    """The backward pass of a layer that has only the k outputs that are kept: small products for large ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Window | None,
        sparsity: Sparsity,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.window, ctx.sparsity = window, sparsity
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        inner = x if dtype is None else x.to(dtype)
        ctx.save_for_backward(inner, weight)
        if dtype is None:
            return _forward(inner, weight, bias, window)
        with torch.autocast(x.device.type, enabled=False):
            return _forward(inner, weight.to(dtype), None if bias is None else bias.to(dtype), window)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        meprop_has_no_derivative(ctx.sparsity)
        x, weight = ctx.saved_tensors
        sparsity: Sparsity = ctx.sparsity
        full = gradients[0] if ctx.window else gradients[0].reshape(-1, gradients[0].shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        index, kept, plain = sparsity.choose(full, signed=needs_bias and not sparsity.sparse_bias)
        dx, rows = _gradients(kept, x, weight, index, ctx.window, needs_x, needs_weight)
        dweight = dbias = None
        if rows is not None:
            if torch.compiler.is_compiling():
                dweight = weight.new_zeros(weight.shape).index_copy(0, index, rows.to(weight.dtype))
            else:
                dweight = sparsity.gradient("weight").make(weight, index, rows, ctx.next_functions[1][0])
        if needs_bias:  # of all outputs, as the paper's code has it, or of those that are kept
            if plain is None or sparsity.sparse_bias:
                plain = kept.new_zeros(full.shape[1]).index_copy(0, index, kept.sum(over_rows(kept)))
            dbias = plain.to(ctx.bias_dtype)
        return dx.to(ctx.x_dtype) if dx is not None else None, dweight, dbias, None, None, None


_apply_eagerly: Any = torch.compiler.disable(_Sparse.apply)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window | None) -> Tensor:
    if window is None:
        return functional.linear(x, weight, bias)
    convolve: Any = functional.conv1d if weight.ndim == 3 else functional.conv2d
    return cast(Tensor, convolve(x, weight, bias, *window))


def _gradients(
    kept: Tensor, x: Tensor, weight: Tensor, index: Tensor, window: Window | None, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``x`` and of the rows ``index`` of the weight; None where it is not needed.

    Args:
        kept: the output gradient of these rows.
        x: the input.
        weight: the whole weight, perhaps in another dtype.
        index: of the outputs that are kept.
        window: see ``apply``.
        needs_x: whether the input needs a gradient.
        needs_weight: whether the weight needs a gradient.
    """
    if window is not None:
        rows = weight.index_select(0, index).to(kept.dtype)
        settings = (*window, False, [0] * len(window[0]), 1, [needs_x, needs_weight, False])
        dx, dweight, _ = torch.ops.aten.convolution_backward(kept, x, rows, None, *settings)
        return dx, dweight
    dx = (kept @ weight.index_select(0, index).to(kept.dtype)).view(x.shape) if needs_x else None
    # [in, k]: several times as fast as [k, in], which has few rows to share among threads
    return dx, (x.reshape(-1, x.shape[-1]).t() @ kept).t() if needs_weight else None


class SparseLinear(SparseLayer, nn.Linear):
    """``nn.Linear`` with a sparse backward pass."""

    ordinary, width = nn.Linear, "out_features"

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``nn.Linear``.

        Raises:
            ValueError: the input is a sparse tensor.
        """
        check_dense(input, self.sparsity.name, "meProp")
        if not self.sparsity.active or not torch.is_grad_enabled():
            return functional.linear(input, self.weight, self.bias)
        return apply(input, self.weight, self.bias, None, self.sparsity)


class _SparseConv(SparseLayer):
    """What convolutions of one and two dimensions have in common."""

    width = "out_channels"

    @classmethod
    def refusal(cls, module: nn.Module, per_example: bool) -> str:
        """Refuse groups, which tie output channels to some inputs, and a choice by example, which saves nothing."""
        if cast(_ConvNd, module).groups != 1:
            return "a convolution in groups cannot be made sparse: its output channels belong to parts of the input"
        return "convolutions have one choice for the minibatch; leave per_example out" if per_example else ""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the ordinary layer, whose ``forward`` calls this."""
        layer = cast(_ConvNd, self)
        check_dense(input, self.sparsity.name, "meProp")
        if not self.sparsity.active or not torch.is_grad_enabled():
            return cast(Tensor, super()._conv_forward(input, weight, bias))  # type: ignore[misc]
        x, padding = input, layer.padding
        if layer.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * len(layer.stride)
        single = x.ndim < weight.ndim
        window = layer.stride, padding, layer.dilation
        y = apply(x[None] if single else x, weight, bias, window, self.sparsity)
        return y[0] if single else y


class SparseConv1d(_SparseConv, nn.Conv1d):
    """``nn.Conv1d`` with a sparse backward pass, by output channels."""

    ordinary = nn.Conv1d


class SparseConv2d(_SparseConv, nn.Conv2d):
    """``nn.Conv2d`` with a sparse backward pass, by output channels."""

    ordinary = nn.Conv2d
