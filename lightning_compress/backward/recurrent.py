"""LSTM and GRU whose backward pass through time follows the largest gate gradients: meProp (Sun et al., ICML 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from lightning_compress.backward.layer_swap import autocast_dtype
from lightning_compress.backward.scan import CELLS, Scan, Step, plan_steps
from lightning_compress.backward.sparse_layers import meprop_has_no_derivative
from lightning_compress.backward.sparsity import SparseLayer, Sparsity, kept_of_each, sums

__all__ = ["SparseGRU", "SparseGRUCell", "SparseLSTM", "SparseLSTMCell", "scan"]

Hidden = tuple[Tensor, ...]
"""``(h, c)`` of an LSTM, ``(h,)`` of a GRU."""


def scan(
    kind: str, x: Tensor, hidden: Hidden, weights: Sequence[Tensor | None], steps: Sequence[Step], sparsity: Sparsity
) -> tuple[Tensor, Hidden]:
    """Compute one direction of one layer, with a sparse backward pass.

    Each gate keeps the ``k`` outputs whose pre-activations have the largest gradients. By default each time step
    chooses, by the sum of absolute values over the minibatch. With ``per_example`` each example chooses its own. With
    ``per_sequence`` one choice holds for all time steps, by the gradients of the outputs before these travel through
    time. Only what is kept goes through the weights: to the step before, to the inputs, and into the weights'
    gradients, where other rows get none. In a GRU both products of the candidate gate keep the same outputs.

    Args:
        kind: "lstm" or "gru".
        x: ``[rows, in]``, one time step after the other, as in a ``PackedSequence``.
        hidden: states before the first step, ``[batch, hidden]`` each.
        weights: ``weight_ih [gates * hidden, in]``, ``weight_hh [gates * hidden, hidden]``, ``bias_ih`` and ``bias_hh``
            (or None), with the gates in PyTorch's order.
        steps: in the order in which they are computed.
        sparsity: how sparse; ``width`` is ``hidden``.

    Returns:
        the output ``[rows, hidden]``, and the hidden states after the last step.
    """
    dtype = autocast_dtype(x)
    output, *after = _Scan.apply(kind, steps, sparsity, dtype, x, *weights, *hidden)  # type: ignore[no-untyped-call]
    return output, tuple(after)


class _Scan(torch.autograd.Function):
    """All time steps. The backward pass multiplies by the chosen rows of the weights."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, steps: Sequence[Step], sparsity: Sparsity, dtype: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtypes = [None if each is None else each.dtype for each in tensors]
        x, w_ih, w_hh, b_ih, b_hh, *hidden = (
            each if dtype is None or each is None else each.to(dtype) for each in tensors
        )
        cell = CELLS[kind]
        with torch.autocast(x.device.type, enabled=False):
            outputs, after, saved = cell.forward(x, (w_ih, w_hh, b_ih, b_hh), hidden, steps)
        ctx.kind, ctx.steps, ctx.sparsity = kind, steps, sparsity
        ctx.save_for_backward(x, tensors[1], tensors[2], *saved)  # the parameters themselves, whose rows are looked up
        return (outputs, *after)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        meprop_has_no_derivative(ctx.sparsity)
        sparsity: Sparsity = ctx.sparsity
        x, w_ih, w_hh, *saved = ctx.saved_tensors
        cell = CELLS[ctx.kind]
        scanned = Scan(cell, ctx.steps, x, w_ih.to(x.dtype), w_hh.to(x.dtype), saved, gradients, sparsity.sparse_bias)
        needs = ctx.needs_input_grad[4:]
        if sparsity.per_example:
            dx, weights, biases = scanned.run(lambda gates: (None, _kept_of_each_gate(gates, cell.gates, sparsity.k)))
        elif sparsity.per_sequence:
            dx, weights, biases = scanned.run_fixed(_top(scanned.local_scores(), sparsity), needs[0])
        else:

            def chosen(gates: Tensor) -> tuple[Tensor, Tensor]:
                index = _top(sums(gates, signed=False)[0].view(cell.gates, -1), sparsity)
                return index, gates.index_select(1, index)

            dx, weights, biases = scanned.run(chosen)
        found: list[Tensor | None] = [dx, None, None, *biases]
        for number, (name, weight) in enumerate((("ih", w_ih), ("hh", w_hh)), start=1):
            if needs[number]:
                index, rows = weights[number - 1]
                if index is not None:  # layers and directions of one module have weights of their own
                    maker = sparsity.gradient(f"{name} {id(weight)}")
                    rows = maker.make(weight, index, rows, ctx.next_functions[number][0])
                found[number] = rows
        found = [each if needed else None for each, needed in zip(found, needs, strict=False)]
        found += scanned.before()
        cast_back = zip(found, ctx.dtypes, strict=True)
        return None, None, None, None, *(None if each is None else each.to(dtype) for each, dtype in cast_back)


def _top(scores: Tensor, sparsity: Sparsity) -> Tensor:
    """Choose outputs of all gates, ascending, by scores ``[gates, hidden]``."""
    gates, hidden = scores.shape
    first = torch.arange(0, gates * hidden, hidden, dtype=torch.int64, device=scores.device)
    return (sparsity.top(scores) + first[:, None]).flatten()


def _kept_of_each_gate(gates: Tensor, count: int, k: int) -> Tensor:
    """Set all but ``k`` of each example's and gate's gradients ``[rows, count * hidden]`` to zero."""
    each = gates.reshape(len(gates) * count, gates.shape[1] // count)
    return kept_of_each(each, k).view_as(gates)


class _Recurrent(SparseLayer):
    """What layers and cells have in common."""

    kind: ClassVar[str]
    width = "hidden_size"

    @classmethod
    def conflict(cls, sparsity: Sparsity) -> str:
        """See ``SparseLayer``."""
        if sparsity.decay:
            kind = cls.ordinary.__name__
            return f"memory={sparsity.decay!r} is for linear and convolutional layers; {kind} has none"
        if sparsity.per_example and sparsity.per_sequence:
            return "per_example and per_sequence exclude each other; choose one"
        if sparsity.group is not None and not sparsity.per_sequence:
            return "ranks may have other numbers of time steps, so they choose together only with per_sequence=True"
        return ""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute the ordinary layer or cell."""
        if not self.sparsity.active or not torch.is_grad_enabled():
            return self.ordinary.forward(self, input, hx)
        return (_cell_forward if isinstance(self, nn.RNNCellBase) else _forward)(self, input, hx)


class _Layers(_Recurrent):
    """Several layers, in one or two directions."""

    @classmethod
    def refusal(cls, module: nn.Module, per_example: bool) -> str:
        """See ``SparseLayer``."""
        if cast(nn.RNNBase, module).proj_size:
            return f"an LSTM with projections (proj_size={module.proj_size}) cannot be made sparse"
        return ""


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _forward(layer: Any, input: Any, hx: Any) -> Any:
    """Bring an input of any form that ``nn.LSTM`` takes to ``_run``."""
    if isinstance(input, PackedSequence):
        x, sizes, order, back = input
        output, after = _run(layer, x, x, hx, sizes.tolist(), sizes, order)
        return PackedSequence(output, sizes, order, back), layer.permute_hidden(after, back)
    axis = 0 if layer.batch_first else 1
    if input.dim() == 2:  # one sequence
        output, after = _forward(layer, input.unsqueeze(axis), _each(hx, lambda one: one.unsqueeze(1)))
        return output.squeeze(axis), _each(after, lambda one: one.squeeze(1))
    if input.dim() != 3:
        raise ValueError(f"{layer.kind.upper()}: Expected input to be 2D or 3D, got {input.dim()}D instead")
    x = input.transpose(0, 1) if layer.batch_first else input
    output, after = _run(layer, input, x.reshape(-1, x.shape[-1]), hx, [x.shape[1]] * len(x))
    output = output.view(len(x), x.shape[1], output.shape[-1])
    return output.transpose(0, 1) if layer.batch_first else output, after


def _run(
    layer: Any,
    input: Tensor,
    rows: Tensor,
    hx: Any,
    lengths: Sequence[int],
    sizes: Tensor | None = None,
    order: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Check the inputs as the layer does, and compute it. Hidden states are in the order of the batch."""
    if not lengths:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    lstm = layer.kind == "lstm"
    if hx is None:
        zeros = rows.new_zeros(layer.num_layers * (1 + layer.bidirectional), lengths[0], layer.hidden_size)
        hx = (zeros, zeros) if lstm else zeros
    layer.check_forward_args(input, hx, sizes)
    hx = layer.permute_hidden(hx, order)
    hidden = hx if lstm else (hx,)
    output, after = _stack(layer, rows, hidden, lengths)
    if not lstm or len(set(lengths)) > 1:  # an LSTM of equal lengths is one function of PyTorch's
        output, *left = _promoted((output, *after), hidden)
        after = tuple(left)
    return output, after if lstm else after[0]


def _each(hidden: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change each hidden state: a tuple in an LSTM, a tensor in a GRU, or None."""
    if hidden is None:
        return None
    return tuple(change(one) for one in hidden) if isinstance(hidden, tuple) else change(hidden)


def _promoted(found: Hidden, hidden: Hidden) -> Hidden:
    """Widen states and outputs to the dtype of the first states on a CPU, as PyTorch does under autocast."""
    cpu = found[0].device.type == "cpu"
    return tuple(each.to(torch.promote_types(each.dtype, hidden[0].dtype)) if cpu else each for each in found)


def _stack(layer: Any, x: Tensor, hidden: Hidden, lengths: Sequence[int]) -> tuple[Tensor, Hidden]:
    """Compute all layers and directions, over rows as in a ``PackedSequence``."""
    steps, outputs, after = plan_steps(lengths), list[Tensor](), []
    directions = 2 if layer.bidirectional else 1
    for number, names in enumerate(layer._all_weights):
        weights = [getattr(layer, name) for name in names] + [None] * (4 - len(names))
        backwards = number % directions == 1
        given = tuple(each[number] for each in hidden)
        output, left = scan(layer.kind, x, given, weights, steps[::-1] if backwards else steps, layer.sparsity)
        outputs.append(output)
        after.append(left)
        if len(outputs) == directions:
            x, outputs = outputs[0] if directions == 1 else torch.cat(outputs, 1), []
            if layer.dropout and layer.training and number < len(layer._all_weights) - 1:
                x = functional.dropout(x, layer.dropout)
    return x, tuple(torch.stack(each) for each in zip(*after, strict=True))


class SparseLSTM(_Layers, nn.LSTM):
    """``nn.LSTM`` with a sparse backward pass."""

    ordinary = nn.LSTM
    kind = "lstm"


class SparseGRU(_Layers, nn.GRU):
    """``nn.GRU`` with a sparse backward pass."""

    ordinary = nn.GRU
    kind = "gru"


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _cell_forward(cell: Any, input: Tensor, hx: Any) -> Any:
    if input.dim() == 1:
        return _each(_cell_forward(cell, input[None], _each(hx, lambda one: one[None])), lambda one: one[0])
    if hx is None:
        zeros = input.new_zeros(len(input), cell.hidden_size)
        hx = (zeros, zeros) if cell.kind == "lstm" else zeros
    hidden: Hidden = hx if cell.kind == "lstm" else (hx,)
    if any(each.dim() != 2 for each in (input, *hidden)):
        raise ValueError(f"{cell.kind.upper()}Cell: Expected input and hx to be 1D or 2D")
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    _, after = scan(cell.kind, input, hidden, weights, plan_steps([len(input)]), cell.sparsity)
    after = _promoted(after, hidden)
    return after if cell.kind == "lstm" else after[0]


class SparseLSTMCell(_Recurrent, nn.LSTMCell):
    """``nn.LSTMCell`` with a sparse backward pass."""

    ordinary = nn.LSTMCell
    kind = "lstm"


class SparseGRUCell(_Recurrent, nn.GRUCell):
    """``nn.GRUCell`` with a sparse backward pass."""

    ordinary = nn.GRUCell
    kind = "gru"
