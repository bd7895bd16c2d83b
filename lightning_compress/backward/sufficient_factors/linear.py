"""A linear layer whose weight gets no gradient of its own: backward leaves the rows that make it up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_compress.backward.layer_swap import autocast_dtype

Rows = list[tuple[Tensor, Tensor]]
"""Pairs of inputs ``[k, N]`` and output gradients ``[k, M]``."""


class Stash:
    """Rows that backward left, by the backward pass that did; a copy or a saved one is off.

    Attributes:
        weight: whose gradient they make up; None: off, the layer is an ordinary one.
        bias: whether its gradient is made of them too.
        name: of the layer, for messages.
        under_way: called in each backward that has to do with the layer, before it leaves anything.
    """

    def __init__(self, weight: nn.Parameter | None = None, bias: bool = False, name: str = "") -> None:
        self.weight = weight
        self.bias = bias
        self.name = name
        self.under_way: Callable[[], object] = lambda: None
        self._rows: list[tuple[int, Tensor, Tensor, torch.cuda.Event | None]] = []

    def put(self, inputs: Tensor, gradients: Tensor) -> None:
        """What one use of the layer brings to the backward pass under way."""
        self.under_way()
        made = torch.cuda.current_stream(gradients.device).record_event() if gradients.is_cuda else None
        self._rows.append((torch._C._current_graph_task_id(), inputs, gradients, made))

    def take(self, task: int) -> Rows:
        """What this backward brought; a backward around it may have left some, too, and not be through.

        The current stream, which may be another than that of the layer's backward, waits until they are there.
        """
        found, rest = [], []
        for each in self._rows:
            number, inputs, gradients, made = each
            if number != task:
                rest.append(each)
                continue
            found.append((inputs, gradients))
            if made is not None:
                torch.cuda.current_stream(gradients.device).wait_event(made)
        self._rows = rest
        return found

    def clear(self) -> None:
        """Drop rows that no pass took, as those of ``autograd.grad`` of something else."""
        self._rows.clear()

    def __deepcopy__(self, memo: object) -> Stash:
        return Stash()

    def __reduce__(self) -> tuple[type[Stash], tuple[()]]:
        return Stash, ()


class FactoredLinear(nn.Linear):
    """What a linear layer's class is while its gradients travel as factors; its parameters and keys are as before."""

    factors: Stash

    def forward(self, x: Tensor) -> Tensor:
        """``[..., N]`` -> ``[..., M]``, as ``nn.Linear``.

        Raises:
            ValueError: the input is sparse, or the weight was frozen and the bias was not.
        """
        kept = self.factors
        # recomputed in a backward, in which others will run: in them it is too late to find out where it ends
        if not torch.compiler.is_compiling() and kept.weight is not None and torch._C._current_graph_task_id() != -1:
            kept.under_way()
        # another weight: torch.func.functional_call, whose gradient is none of ours
        if kept.weight is None or not torch.is_grad_enabled() or self.weight is not kept.weight:
            return F.linear(x, self.weight, self.bias)
        if not self.weight.requires_grad:
            if kept.bias and self.bias.requires_grad:
                raise ValueError(
                    f"the weight {tuple(self.weight.shape)} of a layer that travels as factors was frozen and its bias "
                    "was not; freeze both, or exclude the layer"
                )
            return F.linear(x, self.weight, self.bias)
        out: Tensor = _forward(x, self.weight, self.bias, kept)
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, kept: Stash) -> Tensor:
    if x.layout != torch.strided:
        raise ValueError(
            f"a layer that travels as factors, {tuple(weight.shape)}, got an input of layout {x.layout}; exclude it, "
            "or give it a dense input"
        )
    used = weight.detach()
    if (dtype := autocast_dtype(x)) is not None:
        x, used = x.to(dtype), used.to(dtype)
    out: Tensor = _Linear.apply(x, weight, bias, used, kept)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """``F.linear`` that leaves its rows in a stash, and no gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, used: Tensor, kept: Stash) -> Tensor:
        ctx.save_for_backward(x, used)
        ctx.kept, ctx.has_bias = kept, bias is not None
        return F.linear(x, used, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.kept.name}: the backward pass of a layer that travels as factors has no derivative "
                f"(create_graph=True, second derivatives); leave this layer out (exclude={[ctx.kept.name]!r})"
            )
        x, used = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            ctx.kept.put(x.reshape(-1, x.shape[-1]), rows)
        own = ctx.has_bias and ctx.needs_input_grad[2] and not ctx.kept.bias
        inward = gradient.matmul(used) if ctx.needs_input_grad[0] else None
        return inward, None, rows.sum(0) if own else None, None, None


class Outermost:
    """Knows the outermost backward under way, which ends when all that are nested in it have ended.

    Backwards run within backwards in reentrant activation checkpointing.

    Args:
        begin: called at the beginning of each, before ``task`` returns its number for the first time.
        end: called at its end with its number, unless it raised.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[int], None]) -> None:
        self._begin, self._end = begin, end
        self._held: weakref.ref[_Held] | None = None

    def task(self) -> int:
        """Return the number of the outermost backward that has called this before; of this backward if none has."""
        held = None if self._held is None else self._held()
        if held is None:  # the engine keeps what it will call for as long as that backward lives, and no longer
            held = _Held(torch._C._current_graph_task_id(), self._ended)
            torch.autograd.Variable._execution_engine.queue_callback(held)
            self._held = weakref.ref(held)
            self._begin()
        return held.task

    def _ended(self, task: int) -> None:
        self._held = None
        self._end(task)


class _Held:
    def __init__(self, task: int, ended: Callable[[int], None]) -> None:
        self.task, self._ended = task, ended

    def __call__(self) -> None:
        self._ended(self.task)
