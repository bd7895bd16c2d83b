"""The average that is in flight while the next step computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

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
