"""The average that is in flight while the next step computes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.engine.accumulation import node_of

_Buckets = dict[tuple[int, ...], tuple[Tensor, list[Tensor]]]


class Average:
    """The mean gradients of one step, which the next step applies.

    Args:
        scale: factor of the loss, float32 scalar, or None.
        epoch: of the step.
        rate: the largest learning rate, if a schedule depends on it.
        spare: memory of an earlier step, which is reused for equal buckets.

    Attributes:
        means: each parameter's gradient, by the parameter's ``id``; its mean once ``complete``.
        complete: all of it is averaged, and its states are committed.
        done: set when ``complete``, or when averaging failed.
        problem: which gradients were not finite, or empty.
    """

    def __init__(
        self, scale: Tensor | None = None, epoch: int = 0, rate: float | None = None, spare: Average | None = None
    ) -> None:
        self.scale = None if scale is None else scale.clone()  # a GradScaler changes its own in place
        self.epoch, self.rate = epoch, rate
        self.means: dict[int, Tensor] = {}
        self.complete, self.done, self.problem = False, threading.Event(), ""
        self._buckets: _Buckets = {}
        self._spare = spare._buckets if spare else {}

    @property
    def factor(self) -> float:
        """The factor of the loss."""
        return 1.0 if self.scale is None else float(self.scale)

    def moves(self, parameter: Tensor) -> bool:
        """Return whether the mean of a parameter is known and not 0."""
        return id(parameter) in self.means and bool(self.means[id(parameter)].any())

    def take(self, buffer: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Copy a bucket, whose memory is used again; return its gradients."""
        key = tuple(map(id, parameters))
        flat, views = self._spare.pop(key) if key in self._spare else _like(buffer, gradients)
        flat.copy_(buffer)
        self._buckets[key] = flat, views
        self.means |= zip(key, views, strict=True)
        return views

    def apply(self, buffer: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor], factor: float) -> None:
        """Fill a bucket with the means, or with 0 where there is none.

        Args:
            buffer: of the bucket.
            parameters: of the bucket.
            gradients: views of ``buffer``.
            factor: of the present loss.
        """
        key = tuple(map(id, parameters))
        if key in self._buckets:
            buffer.copy_(self._buckets[key][0])
        else:
            for gradient, parameter in zip(gradients, key, strict=True):
                gradient.copy_(self.means[parameter]) if parameter in self.means else gradient.zero_()
        if factor != self.factor:
            buffer.mul_(factor / self.factor)


def _like(buffer: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    flat, start = torch.empty_like(buffer), buffer.storage_offset()
    return flat, [flat.as_strided(each.size(), each.stride(), each.storage_offset() - start) for each in gradients]


class ZeroGrad:
    """Find out whether ``zero_grad()`` was called since an average was applied.

    It was if any gradient is 0 whose mean was not. Not all need to be: an optimizer zeroes its own. Each backward pass
    looks before it adds the first gradient. Version counters would tell less. ``grad.data.zero_()`` leaves them as they
    are, and with ``gradient_as_bucket_view=True`` all gradients of a bucket share one.

    Args:
        parameters: of the model, by name.

    Attributes:
        held: the average that is in the gradients, as far as is known; None: there is none, or it was zeroed.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(sorted(parameters.items(), key=lambda each: each[1].numel()))  # small ones are fast
        self._told_last, self._pass = next(iter(self._parameters.values())), -1
        self.held: Average | None = None
        owner = weakref.ref(self)  # a cycle through a node is never freed

        def look(_: object) -> None:
            if found := owner():
                found._look()

        self._nodes = [node_of(parameter) for parameter in self._parameters.values()]  # which have to live
        self._hooks = [node.register_prehook(look) for node in self._nodes]

    def hold(self, average: Average | None, owned: Collection[str]) -> None:
        """Note that the gradients hold an average now, unless the means of the optimizer's parameters are 0.

        Args:
            average: that was applied, or None.
            owned: names of the optimizer's parameters; empty if it is not known.
        """
        watched = (each for name, each in self._parameters.items() if not owned or name in owned)
        self.held = average if average and any(map(average.moves, watched)) else None

    def _look(self) -> None:
        """Look for a gradient that was zeroed, before a backward pass adds the first one."""
        if self._pass == (now := torch._C._current_graph_task_id()):
            return
        self._pass = now
        if (held := self.held) is None:
            return
        for parameter in (self._told_last, *self._parameters.values()):
            if held.moves(parameter) and (parameter.grad is None or not parameter.grad.any()):
                self.held, self._told_last = None, parameter
                return

    def close(self) -> None:
        """Stop looking."""
        for hook in self._hooks:
            hook.remove()
        self.held = None
