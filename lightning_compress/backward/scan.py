"""Compute the time steps of LSTM and GRU, forward and backward, with all rows of the gates or with some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Step = tuple[slice, int]
"""Rows of a time step, and their number: sequences ``[0, count)``, the longest first."""
Choice = Callable[[Tensor], tuple[Tensor | None, Tensor]]
"""From gate gradients ``[rows, gates * hidden]`` to the columns that are kept (None: all), and their gradients."""
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""``w_ih``, ``w_hh``, ``b_ih`` and ``b_hh``."""
Passed = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]
"""Outputs, hidden states after the last step, and what the backward pass needs: first ``h`` before each step."""
Found = tuple[Tensor | None, list[tuple[Tensor | None, Tensor]], list[Tensor]]
"""Gradients of the input (None if it is not needed); of ``w_ih`` and ``w_hh``: an index of rows and their gradient, or
None and the whole gradient; of ``b_ih`` and ``b_hh``."""
Multipliers = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""What gradients are multiplied by. A source's, in the gates' gradients for ``w_ih`` and for ``w_hh``,
``[rows, gates, hidden]``; ``dh`` in ``dc``, of an LSTM; ``dc`` of an LSTM or ``dh`` of a GRU, in the step before."""


def plan_steps(lengths: Sequence[int]) -> list[Step]:
    """Return time steps, given how many sequences each has."""
    return [(slice(start, stop), stop - start) for start, stop in pairwise(accumulate(lengths, initial=0))]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``functional.linear``, by oneDNN if ``nn.LSTM`` does: MKL takes twice as long on some processors."""
    fast = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch._C._get_mkldnn_enabled() else None
    if fast is None or x.device.type != "cpu" or x.dtype != torch.float32 or not x.numel():
        return functional.linear(x, weight, bias)
    found: Tensor = fast(x, weight, bias, "none", [], "")
    return found


def _lstm(x: Tensor, weights: Weights, hidden: Sequence[Tensor], steps: Sequence[Step]) -> Passed:
    """All time steps of gates i, f, g, o."""
    w_ih, w_hh, b_ih, b_hh = weights
    size = w_hh.shape[1]
    gates = product(x, w_ih, None if b_ih is None or b_hh is None else b_ih + b_hh)
    rows = x.new_empty(4, len(x), size)  # h before, c before, c, h
    last_h, last_c = (each.clone() for each in hidden)
    for span, count in steps:
        h, c, gate = last_h[:count], last_c[:count], gates[span]
        before_h, before_c, now_c, now_h = rows[:, span]
        before_h.copy_(h)
        before_c.copy_(c)
        gate.add_(product(h, w_hh, None))
        gate[:, : 2 * size].sigmoid_()
        gate[:, 2 * size : 3 * size].tanh_()
        gate[:, 3 * size :].sigmoid_()
        i, f, g, o = gate.chunk(4, 1)
        torch.mul(f, c, out=now_c).addcmul_(i, g)
        torch.tanh(now_c, out=now_h).mul_(o)
        h.copy_(now_h)
        c.copy_(now_c)
    before_h, before_c, now_c, now_h = rows
    return now_h.clone(), (last_h, last_c), (before_h, before_c, now_c, gates)


def _lstm_multipliers(saved: Sequence[Tensor]) -> Multipliers:
    _, before, now, gates = saved
    i, f, g, o = gates.chunk(4, 1)
    bent = now.tanh()
    found = gates.new_empty(len(gates), 4, now.shape[1])
    torch.mul(g, i - i * i, out=found[:, 0])
    torch.mul(before, f - f * f, out=found[:, 1])
    torch.mul(i, 1 - g * g, out=found[:, 2])
    torch.mul(bent, o - o * o, out=found[:, 3])
    return found, found, o * (1 - bent * bent), f


def _gru(x: Tensor, weights: Weights, hidden: Sequence[Tensor], steps: Sequence[Step]) -> Passed:
    """All time steps of gates r, z, n."""
    w_ih, w_hh, b_ih, b_hh = weights
    size = w_hh.shape[1]
    gates = product(x, w_ih, b_ih)
    rows = x.new_empty(3, len(x), size)  # h before, the candidate's share of it, h
    last = hidden[0].clone()
    for span, count in steps:
        h, gate = last[:count], gates[span]
        before, share, now = rows[:, span]
        before.copy_(h)
        inner = product(h, w_hh, b_hh)
        share.copy_(inner[:, 2 * size :])
        gate[:, : 2 * size].add_(inner[:, : 2 * size]).sigmoid_()
        r, z, n = gate.chunk(3, 1)
        n.addcmul_(r, share).tanh_()
        torch.sub(h, n, out=now).mul_(z).add_(n)
        h.copy_(now)
    before, share, now = rows
    return now.clone(), (last,), (before, share, gates)


def _gru_multipliers(saved: Sequence[Tensor]) -> Multipliers:
    before, share, gates = saved
    r, z, n = gates.chunk(3, 1)
    found = gates.new_empty(len(gates), 3, before.shape[1])
    torch.mul(1 - z, 1 - n * n, out=found[:, 2])
    torch.mul(found[:, 2] * share, r - r * r, out=found[:, 0])
    torch.mul(before - n, z - z * z, out=found[:, 1])
    inner = found.clone()
    inner[:, 2].mul_(r)
    return found, inner, None, z


class Cell(NamedTuple):
    """One kind of cell. What flows back is linear in its sources: ``c`` and ``h`` of an LSTM, ``h`` of a GRU.

    Attributes:
        sources: by gate, of which source its gradient is a multiple.
        forward: computes all time steps, without a gradient.
        multipliers: from what ``forward`` saved.
    """

    sources: tuple[int, ...]
    forward: Callable[[Tensor, Weights, Sequence[Tensor], Sequence[Step]], Passed]
    multipliers: Callable[[Sequence[Tensor]], Multipliers]

    @property
    def gates(self) -> int:
        """How many."""
        return len(self.sources)


CELLS = {"lstm": Cell((0, 0, 0, 1), _lstm, _lstm_multipliers), "gru": Cell((0, 0, 0), _gru, _gru_multipliers)}


class Scan:
    """The backward pass through time of one direction of one layer.

    Args:
        cell: its kind.
        steps: in the order of the forward pass.
        x: ``[rows, in]``.
        w_ih: ``[gates * hidden, in]``.
        w_hh: ``[gates * hidden, hidden]``.
        saved: by the forward pass.
        gradients: of the output ``[rows, hidden]`` and of the last hidden states: ``h``, and ``c`` of an LSTM.
        sparse_bias: only outputs that are kept have a gradient of their biases.
    """

    def __init__(
        self,
        cell: Cell,
        steps: Sequence[Step],
        x: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor],
        sparse_bias: bool,
    ) -> None:
        self._cell, self._steps, self._x, self._w_ih, self._w_hh = cell, steps[::-1], x, w_ih, w_hh
        self._before, self._size, self._sparse_bias = saved[0], w_hh.shape[1], sparse_bias
        self._outer, self._inner, self._through, self._carried = cell.multipliers(saved)
        self._output = gradients[0]
        # dc and dh beside each other: a gate's columns are found in one of them
        self._flowing = torch.cat([*gradients[:0:-1]], 1)

    def local_scores(self) -> Tensor:
        """Sum the sizes of gate gradients before they travel through time: ``[gates, hidden]``."""
        last = torch.empty(len(self._flowing), dtype=torch.long, device=self._x.device)
        for span, count in reversed(self._steps):
            last[:count] = torch.arange(span.start, span.stop, dtype=torch.int64, device=last.device)
        parts = list(self._flowing.split(self._size, 1))
        sources = [self._output.index_add(0, last, parts[-1])]
        if self._through is not None:
            sources.insert(0, (sources[0] * self._through).index_add_(0, last, parts[0]))
        wide = torch.float32 if self._x.dtype in (torch.float16, torch.bfloat16) else self._x.dtype
        found = [
            (sources[source] * self._outer[:, gate]).abs().sum(0, dtype=wide)
            for gate, source in enumerate(self._cell.sources)
        ]
        return torch.stack(found)

    def run_fixed(self, index: Tensor, needs_x: bool) -> Found:
        """Go through all steps with one choice of columns of the gates, ascending."""
        cell, size = self._cell, self._size
        places = torch.tensor(cell.sources, dtype=torch.int64, device=index.device)[index // size] * size + index % size
        outer = self._outer.flatten(1).index_select(1, index)
        same = self._inner is self._outer
        inner = outer if same else self._inner.flatten(1).index_select(1, index)
        rows = self._w_hh.index_select(0, index)
        kept = torch.empty_like(outer)
        sources = torch.empty_like(outer)
        everything = self._x.new_empty(len(self._x), self._flowing.shape[1])
        for span, count in self._steps:
            flowing = everything[span] = self._begin(span, count)
            torch.index_select(flowing, 1, places, out=sources[span])
            torch.mul(sources[span], inner[span], out=kept[span])
            self._end(flowing, kept[span], rows, span)
        both = (kept if same else sources.mul_(outer), kept)
        dx = both[0] @ self._w_ih.index_select(0, index) if needs_x else None
        weights = [(other.t() @ each).t() for each, other in zip(both, (self._x, self._before), strict=True)]
        if self._sparse_bias:
            biases = [self._x.new_zeros(len(self._w_hh)).index_copy(0, index, each.sum(0)) for each in both]
        else:
            parts = everything.split(size, 1)
            biases = [
                torch.cat([(parts[source] * factors[:, gate]).sum(0) for gate, source in enumerate(cell.sources)])
                for factors in (self._outer, self._inner)
            ]
        return dx, [(index, each) for each in weights], biases

    def run(self, choose: Choice) -> Found:
        """Go through all steps, and choose at each."""
        both = self._inner is not self._outer
        wide = torch.promote_types(self._x.dtype, torch.float32)  # in 16 bits a sum over many steps loses small terms
        dx = torch.empty_like(self._x)
        weights = [torch.zeros_like(each, dtype=wide) for each in (self._w_ih, self._w_hh)]
        biases = [self._x.new_zeros(len(each), dtype=wide) for each in weights]
        for span, count in self._steps:
            flowing = self._begin(span, count)
            parts = flowing.split(self._size, 1)
            sources = torch.cat([parts[source] for source in self._cell.sources], 1)
            full = sources * self._outer[span].flatten(1)
            index, kept = choose(full)
            inner, whole = kept, full
            if both:
                whole = sources * self._inner[span].flatten(1)
                inner = torch.where(kept != 0, whole, 0) if index is None else whole.index_select(1, index)
            w_ih, w_hh = (each if index is None else each.index_select(0, index) for each in (self._w_ih, self._w_hh))
            torch.mm(kept, w_ih, out=dx[span])
            for weight, part, other in zip(weights, (kept, inner), (self._x[span], self._before[span]), strict=True):
                # few rows: see _gradients of linear layers
                _add(weight, index, part.t() @ other if index is None else (other.t() @ part).t())
            for bias, part, all_of_it in zip(biases, (kept, inner), (full, whole), strict=True):
                _add(bias, *((index, part.sum(0)) if self._sparse_bias else (None, all_of_it.sum(0))))
            self._end(flowing, inner, w_hh, span)
        return dx, [(None, each) for each in weights], biases

    def _begin(self, span: slice, count: int) -> Tensor:
        """Replace ``dc`` and ``dh`` of the next step by those of this step."""
        flowing = self._flowing[:count]
        dh = flowing[:, -self._size :]
        dh.add_(self._output[span])
        if self._through is not None:
            flowing[:, : self._size].addcmul_(dh, self._through[span])
        return flowing

    def _end(self, flowing: Tensor, kept: Tensor, rows: Tensor, span: slice) -> None:
        """Replace ``dc`` and ``dh`` of this step by those of the step before."""
        dh = flowing[:, -self._size :]
        flowing[:, : self._size].mul_(self._carried[span])  # dc of an LSTM; in a GRU this is dh
        if self._through is not None:
            dh.copy_(kept @ rows)
        else:
            dh.addmm_(kept, rows)

    def before(self) -> list[Tensor]:
        """Return the gradients of the first hidden states, in their order."""
        return [*reversed(self._flowing.split(self._size, 1))]


def _add(total: Tensor, index: Tensor | None, rows: Tensor) -> None:
    """Add to the rows ``index`` of ``total``, or to all."""
    if index is None:
        total.add_(rows)
    else:
        total.index_add_(0, index, rows.to(total.dtype))
