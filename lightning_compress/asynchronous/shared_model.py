"""A rank's model as its neighbours see it, while it trains."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SharedModel:
    """The parameters, and what neighbours have moved them by since the last step: the model is their sum.

    A forward and a backward pass must see the same parameters. So answering threads read the parameters at any time,
    but write only ``moved``. The training thread adds it to the parameters when it changes them anyway: it calls
    ``begin`` as soon as the backward pass is over, and ``end`` when the optimizer has stepped.

    Args:
        parameters: on the CPU, of a floating-point dtype, each once.

    Attributes:
        numel: elements of all parameters.
        moved: float32 ``[numel]``.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [each.detach() for each in parameters]
        self.numel = sum(each.numel() for each in self._parameters)
        self.moved = torch.zeros(self.numel)
        self._lock, self._held, self._touched = threading.Lock(), False, False

    def read(self, out: Tensor) -> None:
        """Write the model to ``out``, float32 ``[numel]``. Waits for the optimizer while it steps."""
        with self._lock:
            start = 0
            for each in self._parameters:
                stop = start + each.numel()
                out[start:stop].copy_(each.reshape(-1))
                start = stop
            out.add_(self.moved)

    def move(self, change: Tensor, factor: float = 1.0) -> None:
        """Add ``factor * change``, float32 ``[numel]``, to the model."""
        with self._lock:
            self.moved.add_(change, alpha=factor)
            self._touched = True

    def begin(self) -> None:
        """Let nobody else read or move the model. Calls after the first do nothing."""
        if not self._held:
            self._lock.acquire()
            self._held = True

    def end(self) -> None:
        """Add to the parameters what neighbours moved them by, and let others go on."""
        if not self._held:
            return
        if self._touched:
            parts = self.moved.split([each.numel() for each in self._parameters])
            with torch.no_grad():
                for each, part in zip(self._parameters, parts, strict=True):
                    each.add_(part.view(each.shape))
            self.moved.zero_()
            self._touched = False
        self._held = False
        self._lock.release()

    @contextmanager
    def moving(self) -> Iterator[Tensor]:
        """Yield ``moved``, to which the caller adds. Waits for the optimizer, and for others who move the model."""
        with self._lock:
            self._touched = True
            yield self.moved

    def parts(self, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield each parameter, and its part of each vector ``[numel]`` as a view in the parameter's shape."""
        sizes = [each.numel() for each in self._parameters]
        for parameter, *parts in zip(self._parameters, *(vector.split(sizes) for vector in vectors), strict=True):
            yield parameter, *(part.view(parameter.shape) for part in parts)
