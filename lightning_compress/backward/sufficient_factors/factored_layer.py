"""Linear layers whose weights get no gradient of their own: backward leaves the rows that make it up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_compress.backward.gradient_buffer import Buffer
from lightning_compress.backward.layer_swap import (
    SwappedLayer,
    autocast_dtype,
    check_dense,
    refuse_second_derivative,
    restore,
    swap,
)
from lightning_compress.collectives.counting import all_reduce_bytes

METHOD = "a layer that travels as factors"
FactorPairs = list[tuple[Tensor, Tensor]]
"""Pairs of inputs ``[k, N]`` and output gradients ``[k, M]``: the sufficient factors of a weight's gradient."""
Way = Literal["factors", "ordinary"]


class Layer:
    """One layer, between its forward and its optimizer's step.

    Args:
        path: of the module in the model.
        module: the layer.

    Attributes:
        name: of the module, as a user knows it.
        bias: of the module; None if it has none, or DistributedDataParallel averages it.
        on: the module leaves rows; otherwise it is an ordinary one.
        under_way: called in each backward that involves the layer, before it leaves anything.
        way: how its gradient travels; None until that is decided.
        rows: taken from backward, and not sent yet.
        arrived: this pass has come to the layer; with nested backwards perhaps not for the last time.
        returns: some pass came to it more than once.
        local: ``grad`` holds this rank's own gradient (the ordinary way).
        counts: rows of each rank in this pass; None until they are known.
        gathered: inputs ``[sum of counts, N]`` and output gradients ``[sum of counts, M]`` of all ranks.
        done: this pass's exchange is over.
        marks: on CUDA, events: rows are ready; gathered rows are ready.
    """

    def __init__(self, path: str, module: nn.Linear) -> None:
        self.path, self.name, self.module = path, known_as(path), module
        self.weight = cast("nn.Parameter", module.weight)
        self.bias = cast("nn.Parameter | None", module.bias)
        self.on = self.arrived = self.returns = self.local = False
        self.under_way: Callable[[], object] = lambda: None
        self.way: Way | None = None
        self.rows: FactorPairs = []
        self.counts: list[int] | None = None
        self.gathered: tuple[Tensor, Tensor] | None = None
        self.done = Event()
        self.marks: list[torch.cuda.Event] = []
        self._left: list[tuple[int, Tensor, Tensor, torch.cuda.Event | None]] = []
        self._buffer: Buffer | None = None
        self._marked: Tensor | None = None

    def __deepcopy__(self, memo: object) -> None:
        """Make the copy of a module an ordinary layer."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Make a saved module an ordinary layer."""
        return type(None), ()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Its parameters that leave DistributedDataParallel."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def paths(self) -> list[str]:
        """Their names, as the model has them."""
        own = ("weight", "bias")[: len(self.parameters)]
        return [f"{self.path}.{each}" if self.path else each for each in own]

    @property
    def names(self) -> list[str]:
        """Their names, as a user knows them."""
        return [path.replace("_orig_mod.", "") for path in self.paths]

    @property
    def width(self) -> int:
        """Numbers of a row: of an input and of an output's gradient, M + N."""
        return sum(self.weight.shape)

    def switch(self, on: bool) -> None:
        """Let the module leave rows, or make it an ordinary one."""
        if on and type(self.module) is nn.Linear:
            swap(self.module, FactoredLinear, self)
        elif not on and type(self.module) is FactoredLinear:
            restore(self.module)
        self.on = on

    def put(self, inputs: Tensor, gradients: Tensor) -> None:
        """Leave the rows of one use of the layer in the backward pass under way."""
        self.under_way()
        made = torch.cuda.current_stream(gradients.device).record_event() if gradients.is_cuda else None
        self._left.append((torch._C._current_graph_task_id(), inputs, gradients, made))

    def take(self, task: int) -> FactorPairs:
        """Return the rows that this backward left. A backward around it may have left some, too, and go on later.

        The current stream waits until they are ready. It may be another than that of the layer's backward.
        """
        found, rest = [], []
        for each in self._left:
            number, inputs, gradients, made = each
            if number != task:
                rest.append(each)
                continue
            found.append((inputs, gradients))
            if made is not None:
                torch.cuda.current_stream(gradients.device).wait_event(made)
        self._left = rest
        return found

    def drop_left(self) -> None:
        """Drop rows that no pass took, such as those of ``autograd.grad`` of something else."""
        self._left.clear()

    def add(self, inputs: Tensor, gradients: Tensor, ranks: int) -> None:
        """Add the gradient that these rows make up, over ``ranks``, to ``grad``."""
        inputs, gradients = inputs.to(self.weight.dtype), gradients.to(self.weight.dtype)
        if self.weight.requires_grad:
            fresh = self.weight.grad is None
            if fresh:
                self.weight.grad = self.memory()
            assert self.weight.grad is not None
            self.weight.grad.addmm_(gradients.t(), inputs, beta=0 if fresh else 1, alpha=1 / ranks)
        if self.bias is not None and self.bias.requires_grad:
            summed = gradients.sum(0).div_(ranks)
            self.bias.grad = summed if self.bias.grad is None else self.bias.grad.add_(summed)

    def matrix_bytes(self, ranks: int) -> int:
        """Return what a rank sends to all-reduce the parameters: 2 M N (P - 1) / P numbers, and those of the bias."""
        return all_reduce_bytes(sum(each.nbytes for each in self.parameters), ranks)

    def memory(self) -> Tensor:
        """Return memory for a gradient of the weight: that of the last step, unless somebody still holds it."""
        # fresh memory costs more than the product: its pages come one by one
        if self._buffer is None or not self._buffer.is_free() or self._buffer.tensor.dtype != self.weight.dtype:
            self._buffer = Buffer(self.weight)
        return self._buffer.tensor.detach()

    def keep(self) -> None:
        """Keep the rows for a later pass, unless somebody drops or zeroes ``grad``, which they are a part of."""
        if self.weight.grad is None:
            self.weight.grad = self.memory().zero_()
        self._marked = self.weight.grad
        self._marked[0, 0] += _mark(self._marked)

    def look(self) -> None:
        """Drop the rows that were kept if somebody has dropped or zeroed ``grad`` since, as ``zero_grad`` does."""
        if self._marked is None:
            return
        if self.weight.grad is not self._marked or not (self._marked[0].any() or self._marked.any()):
            self.rows = []
        else:
            self._marked[0, 0] -= _mark(self._marked)
        self._marked = None

    def forget(self) -> None:
        """Drop what was not sent."""
        self.rows, self.arrived, self.local = [], False, False
        self.counts, self.gathered, self._marked = None, None, None


def known_as(path: str) -> str:
    """Return a module's path without the names that torch.compile adds."""
    return path.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _mark(gradient: Tensor) -> float:
    """Return what tells a gradient that was zeroed from others: the least number that survives some scaling."""
    return torch.finfo(gradient.dtype).smallest_normal


class FactoredLinear(SwappedLayer, nn.Linear):
    """``nn.Linear`` that leaves rows for its ``Layer``."""

    ordinary, attribute = nn.Linear, "factors"
    factors: Layer | None
    """None in a copy, which is an ordinary layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``nn.Linear``: ``[..., N]`` -> ``[..., M]``.

        Raises:
            ValueError: the input is sparse, or the weight was frozen and the bias was not.
        """
        layer = self.factors
        if layer is None or not layer.on:
            return F.linear(x, self.weight, self.bias)
        # recomputed in a backward, in which others will run: in them it is too late to find out where it ends
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            layer.under_way()
        # another weight: torch.func.functional_call, whose gradient is not ours
        if not torch.is_grad_enabled() or self.weight is not layer.weight:
            return F.linear(x, self.weight, self.bias)
        if not self.weight.requires_grad:
            if layer.bias is not None and self.bias.requires_grad:
                raise ValueError(
                    f"{layer.name}: the weight of {METHOD} was frozen and its bias was not. Freeze both, or exclude "
                    f"the layer (exclude={[layer.name]!r})"
                )
            return F.linear(x, self.weight, self.bias)
        out: Tensor = _forward(x, self.weight, self.bias, layer)
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
    check_dense(x, layer.name, METHOD)
    used = weight.detach()
    if (dtype := autocast_dtype(x)) is not None:
        x, used = x.to(dtype), used.to(dtype)
    out: Tensor = _Linear.apply(x, weight, bias, used, layer)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """``F.linear`` that leaves its rows in a layer, and no gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, used: Tensor, layer: Layer) -> Tensor:
        ctx.save_for_backward(x, used)
        ctx.layer, ctx.has_bias = layer, bias is not None
        return F.linear(x, used, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        layer: Layer = ctx.layer
        refuse_second_derivative(layer.name, METHOD, f"exclude={[layer.name]!r}")
        x, used = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            layer.put(x.reshape(-1, x.shape[-1]), rows)
        own = ctx.has_bias and ctx.needs_input_grad[2] and layer.bias is None
        inward = gradient.matmul(used) if ctx.needs_input_grad[0] else None
        return inward, None, rows.sum(0) if own else None, None, None


class Outermost:
    """Knows the outermost backward under way, which ends when all backwards that are nested in it have ended.

    Backwards run within backwards in reentrant activation checkpointing.

    Args:
        begin: called at the beginning of each, before ``task`` returns its number for the first time.
        end: called at its end with its number, unless it raised.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[int], None]) -> None:
        self._begin, self._end = begin, end
        self._held: Callable[[], partial[None] | None] = lambda: None

    def task(self) -> int:
        """Return the number of the outermost backward that has called this before; of this backward if none has."""
        held = self._held()
        if held is None:  # the engine keeps what it will call for as long as that backward lives, and no longer
            held = partial(self._ended, torch._C._current_graph_task_id())
            torch.autograd.Variable._execution_engine.queue_callback(held)
            self._held = weakref.ref(held)
            self._begin()
        return int(held.args[0])

    def _ended(self, task: int) -> None:
        self._held = lambda: None
        self._end(task)
