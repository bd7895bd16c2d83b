"""Convolutions whose backward pass follows the output channels with the largest gradients (Wei et al., 2017)."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from lightning_compress.backward.autocast import autocast_dtype
from lightning_compress.backward.choice import choose_and_sum
from lightning_compress.backward.linear import bias_gradient, refuse_second
from lightning_compress.backward.sparsity import SparseLayer, Sparsity, eagerly

__all__ = ["SparseConv1d", "SparseConv2d", "convolution"]

Sizes = tuple[int, ...]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, sparsity: Sparsity
) -> Tensor:
    """``functional.conv1d`` or ``conv2d`` in one group, with a sparse backward pass.

    Args:
        x: ``[batch, in, ...]``, strided.
        weight: ``[out, in, ...]``.
        bias: ``[out]`` or None.
        stride: by dimension of the kernel.
        padding: of zeros, on both sides.
        dilation: by dimension of the kernel.
        sparsity: how sparse; ``width`` is ``out``.

    Returns:
        ``[batch, out, ...]``, the same bits as the ordinary function.
    """
    dtype = autocast_dtype(x)
    apply = _apply_eagerly if torch.compiler.is_compiling() and not sparsity.stateless else _Convolution.apply
    return cast(Tensor, apply(x, weight, bias, stride, padding, dilation, sparsity, dtype))


class _Convolution(torch.autograd.Function):
    """The backward pass of a convolution that has k output channels: those that are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sizes,
        padding: Sizes,
        dilation: Sizes,
        sparsity: Sparsity,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.sparsity, ctx.settings = sparsity, (stride, padding, dilation)
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        inner = x if dtype is None else x.to(dtype)
        ctx.save_for_backward(inner, weight)
        function = functional.conv1d if weight.ndim == 3 else functional.conv2d
        if dtype is None:
            return function(inner, weight, bias, stride, padding, dilation)
        with torch.autocast(x.device.type, enabled=False):
            own = None if bias is None else bias.to(dtype)
            return function(inner, weight.to(dtype), own, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second(ctx.sparsity)
        x, weight = ctx.saved_tensors
        gradient, sparsity = gradients[0], ctx.sparsity
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        index, kept, plain = choose_and_sum(gradient, sparsity, signed=needs_bias and not sparsity.sparse_bias)
        stride, padding, dilation = ctx.settings
        dx, rows, _ = torch.ops.aten.convolution_backward(
            kept,
            x,
            weight.index_select(0, index).to(kept.dtype),
            None,
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            1,
            [needs_x, needs_weight, False],
        )
        dweight = dbias = None
        if needs_weight:
            if torch.compiler.is_compiling():
                dweight = weight.new_zeros(weight.shape).index_copy(0, index, rows.to(weight.dtype))
            else:
                dweight = sparsity.gradient("weight").make(weight, index, rows, ctx.next_functions[1][0])
        if needs_bias:
            dbias = bias_gradient(None if sparsity.sparse_bias else plain, index, kept, gradient.shape[1]).to(
                ctx.bias_dtype
            )
        return dx.to(ctx.x_dtype) if needs_x else None, dweight, dbias, None, None, None, None, None


_apply_eagerly = eagerly(_Convolution.apply)


class _SparseConv(SparseLayer):
    """What convolutions of one and two dimensions have in common."""

    dimensions: ClassVar[int]

    @classmethod
    def width_of(cls, module: nn.Module) -> int:
        """Its output channels."""
        return cast(_ConvNd, module).out_channels

    @classmethod
    def refusal(cls, module: nn.Module, per_example: bool) -> str:
        """Groups tie output channels to some of the input, and a choice by example would save nothing."""
        if cast(_ConvNd, module).groups != 1:
            return "a convolution in groups cannot be made sparse: its output channels belong to parts of the input"
        return "convolutions have one choice for the minibatch; leave per_example out" if per_example else ""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the ordinary layer's, which its ``forward`` calls."""
        layer = cast(_ConvNd, self)
        if input.layout != torch.strided:
            raise ValueError(f"{self.sparsity.name}: meProp takes dense inputs, not {input.layout}; call x.to_dense()")
        if not self.sparsity.active or not torch.is_grad_enabled():
            return cast(Tensor, super()._conv_forward(input, weight, bias))  # type: ignore[misc]
        x, padding = input, layer.padding
        if layer.padding_mode != "zeros":
            x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
            padding = (0,) * self.dimensions
        elif isinstance(padding, str):
            x = functional.pad(x, layer._reversed_padding_repeated_twice)
            padding = (0,) * self.dimensions
        single = x.ndim == self.dimensions + 1
        y = convolution(x[None] if single else x, weight, bias, layer.stride, padding, layer.dilation, self.sparsity)
        return y[0] if single else y


class SparseConv1d(_SparseConv, nn.Conv1d):
    """``nn.Conv1d`` with a sparse backward pass, by output channels."""

    ordinary, dimensions = nn.Conv1d, 1


class SparseConv2d(_SparseConv, nn.Conv2d):
    """``nn.Conv2d`` with a sparse backward pass, by output channels."""

    ordinary, dimensions = nn.Conv2d, 2
