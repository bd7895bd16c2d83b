"""A rank's model as its neighbours see it, while it trains."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from lightning_compress.core.workspace import pieces

CHUNK = 1 << 16
"""Elements that are read or moved at a time, a multiple of 8: they stay in a core's cache, and no thread holds the lock
for longer."""


class SharedModel:
    """The parameters, and what neighbours have moved them by since the last step: the model is their sum.

    A forward and a backward pass must see the same parameters. So answering threads read the parameters at any time,
    but write only ``moved``. The training thread adds it to the parameters when it changes them anyway: it calls
    ``begin`` as soon as the backward pass is over, and ``end`` when the optimizer has stepped.

    Args:
        parameters: on the CPU, of a floating-point dtype, each once.

    Attributes:
        numel: elements of all parameters.
        steps: how many times ``end`` was reached, after ``begin``.
        moved: float32 ``[numel]``.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [each.detach() for each in parameters]
        self._stops = list(accumulate(each.numel() for each in self._parameters))
        self.numel = self._stops[-1] if self._stops else 0
        self.moved = torch.zeros(self.numel, dtype=torch.float32)
        self._lock, self._held, self._touched, self.steps = threading.Lock(), False, False, 0

    def chunks(self) -> Iterator[slice]:
        """Yield the parts that are read or moved at a time. The optimizer may step between two of them."""
        yield from pieces(self.numel, CHUNK)

    def read(self, part: slice, room: Tensor) -> Tensor:
        """Write a chunk of the model to ``room``, float32, and return what was written of it.

        Waits for the optimizer while it steps.
        """
        out, start, number = room[: part.stop - part.start], part.start, bisect_right(self._stops, part.start)
        with self._lock:
            while start < part.stop:
                each, stop = self._parameters[number], min(self._stops[number], part.stop)
                first = self._stops[number] - each.numel()
                own, place = _elements(each, start - first, stop - first), slice(start - part.start, stop - part.start)
                torch.add(own, self.moved[start:stop], out=out[place])
                start, number = stop, number + 1
        return out

    @contextmanager
    def moving(self, part: slice = slice(None)) -> Iterator[Tensor]:
        """Give ``moved[part]`` to be added to, while nobody else reads or moves the model."""
        with self._lock:
            self._touched = True
            yield self.moved[part]

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
        self.steps += 1
        self._lock.release()

    def parts(self, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield each parameter, and its part of each vector ``[numel]`` as a view in the parameter's shape."""
        sizes = [each.numel() for each in self._parameters]
        for parameter, *parts in zip(self._parameters, *(vector.split(sizes) for vector in vectors), strict=True):
            yield parameter, *(part.view(parameter.shape) for part in parts)


def _elements(parameter: Tensor, start: int, stop: int) -> Tensor:
    """Return ``parameter.reshape(-1)[start:stop]``, and copy no more than its rows if that is a copy."""
    if parameter.is_contiguous():
        return parameter.view(-1)[start:stop]
    row = parameter.numel() // len(parameter)
    first = start // row
    return parameter[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row]
