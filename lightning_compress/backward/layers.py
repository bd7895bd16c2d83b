"""Linear layers and convolutions whose backward pass follows the largest output gradients.

Linear layers: meProp (Sun et al., ICML 2017); convolutions, by output channels: Wei et al., 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from lightning_compress.backward.autocast import autocast_dtype
from lightning_compress.backward.selection import over_rows
from lightning_compress.backward.sparsity import SparseLayer, Sparsity, eagerly

__all__ = ["SparseConv1d", "SparseConv2d", "SparseLinear"]

Sizes = tuple[int, ...]


class Operation(Protocol):
    """What a layer computes from its input and its weight ``[out, ...]``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""

    def by_output(self, gradient: Tensor) -> Tensor:
        """The output's gradient with outputs along its second dimension."""

    def backward(
        self, kept: Tensor, x: Tensor, weight: Tensor, index: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of ``x`` and of the kept rows of the weight, as far as they are needed.

        Args:
            kept: the part of ``by_output`` that is kept.
            x: the input.
            weight: all of it, perhaps in another dtype.
            index: of the outputs that are kept.
            needed: of both.
        """


def apply(operation: Operation, x: Tensor, weight: Tensor, bias: Tensor | None, sparsity: Sparsity) -> Tensor:
    """An operation with a sparse backward pass; forward, the same bits as without.

    Args:
        operation: what is computed.
        x: strided.
        weight: ``[out, ...]``.
        bias: ``[out]`` or None.
        sparsity: how sparse; ``width`` is ``out``.
    """
    function = _apply_eagerly if torch.compiler.is_compiling() and not sparsity.stateless else _Sparse.apply
    return cast(Tensor, function(x, weight, bias, operation, sparsity, autocast_dtype(x)))


class _Sparse(torch.autograd.Function):
    """The backward pass of a layer that has k outputs, those that are kept: small products for large ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operation: Operation,
        sparsity: Sparsity,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.operation, ctx.sparsity = operation, sparsity
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        inner = x if dtype is None else x.to(dtype)
        ctx.save_for_backward(inner, weight)
        if dtype is None:
            return operation.forward(inner, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            return operation.forward(inner, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second(ctx.sparsity)
        x, weight = ctx.saved_tensors
        sparsity: Sparsity = ctx.sparsity
        full = ctx.operation.by_output(gradients[0])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        index, kept, plain = sparsity.choose(full, signed=needs_bias and not sparsity.sparse_bias)
        dx, rows = ctx.operation.backward(kept, x, weight, index, (needs_x, needs_weight))
        dweight = dbias = None
        if needs_weight:
            if torch.compiler.is_compiling():
                dweight = weight.new_zeros(weight.shape).index_copy(0, index, rows.to(weight.dtype))
            else:
                dweight = sparsity.gradient("weight").make(weight, index, rows, ctx.next_functions[1][0])
        if needs_bias:  # of all outputs, as the paper's code has it, or of those that are kept
            if plain is None or sparsity.sparse_bias:
                plain = kept.new_zeros(full.shape[1]).index_copy(0, index, kept.sum(over_rows(kept)))
            dbias = plain.to(ctx.bias_dtype)
        return dx.to(ctx.x_dtype) if needs_x else None, dweight, dbias, None, None, None


_apply_eagerly = eagerly(_Sparse.apply)


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


def _check_dense(x: Tensor, sparsity: Sparsity) -> None:
    if x.layout != torch.strided:
        raise ValueError(f"{sparsity.name}: meProp takes dense inputs, not {x.layout}; convert it by x.to_dense()")


class _Linear:
    """``functional.linear``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def by_output(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, gradient.shape[-1])

    def backward(
        self, kept: Tensor, x: Tensor, weight: Tensor, index: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        needs_x, needs_weight = needed
        dx = (kept @ weight.index_select(0, index).to(kept.dtype)).view(x.shape) if needs_x else None
        # [in, k]: several times as fast as [k, in], which has few rows to share among threads
        return dx, (x.reshape(-1, x.shape[-1]).t() @ kept).t() if needs_weight else None


_LINEAR = _Linear()


class SparseLinear(SparseLayer, nn.Linear):
    """``nn.Linear`` with a sparse backward pass."""

    ordinary = nn.Linear

    @classmethod
    def width_of(cls, module: nn.Module) -> int:
        """Its outputs."""
        return cast(nn.Linear, module).out_features

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``.

        Raises:
            ValueError: the input is a sparse tensor.
        """
        _check_dense(input, self.sparsity)
        if not self.sparsity.active or not torch.is_grad_enabled():
            return functional.linear(input, self.weight, self.bias)
        return apply(_LINEAR, input, self.weight, self.bias, self.sparsity)


@dataclass(frozen=True)
class _Convolution:
    """``functional.conv1d`` or ``conv2d`` in one group; settings by dimension of the kernel."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        function = functional.conv1d if weight.ndim == 3 else functional.conv2d
        return function(x, weight, bias, self.stride, self.padding, self.dilation)

    def by_output(self, gradient: Tensor) -> Tensor:
        return gradient

    def backward(
        self, kept: Tensor, x: Tensor, weight: Tensor, index: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = weight.index_select(0, index).to(kept.dtype)
        settings = (self.stride, self.padding, self.dilation, False, [0] * len(self.stride), 1)
        dx, dweight, _ = torch.ops.aten.convolution_backward(kept, x, rows, None, *settings, [*needed, False])
        return dx, dweight


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
        _check_dense(input, self.sparsity)
        if not self.sparsity.active or not torch.is_grad_enabled():
            return cast(Tensor, super()._conv_forward(input, weight, bias))  # type: ignore[misc]
        x, padding = input, layer.padding
        if layer.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * self.dimensions
        operation = _Convolution(layer.stride, padding, layer.dilation)
        single = x.ndim == self.dimensions + 1
        y = apply(operation, x[None] if single else x, weight, bias, self.sparsity)
        return y[0] if single else y


class SparseConv1d(_SparseConv, nn.Conv1d):
    """``nn.Conv1d`` with a sparse backward pass, by output channels."""

    ordinary, dimensions = nn.Conv1d, 1


class SparseConv2d(_SparseConv, nn.Conv2d):
    """``nn.Conv2d`` with a sparse backward pass, by output channels."""

    ordinary, dimensions = nn.Conv2d, 2
