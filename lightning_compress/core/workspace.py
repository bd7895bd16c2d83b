"""Memory that plans share or allocate at first use, and slices that fit a cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements per loop iteration over a vector on a CPU: they fit its caches; half as many cost 10 % more time."""


def chunk_size(device: torch.device) -> int:
    """Return the elements to handle at a time: what fits the caches of a CPU, and more on an accelerator."""
    return CHUNK if device.type == "cpu" else 1 << 24


class Workspace:
    """Scratch memory that plans share; plans that may run at the same time need one workspace each.

    Attributes:
        generation: how often memory was allocated or released.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        self.generation = 0

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ``scratch``."""
        key = name, device
        if key not in self._memory or self._memory[key].numel() < numel:
            self._memory.pop(key, None)  # free it before the larger one is allocated
            self._memory[key] = torch.empty(numel, dtype=dtype, device=device)
            self.generation += 1
        return self._memory[key][:numel]

    def release(self, *names: str) -> None:
        """See ``release``."""
        self.generation += 1
        self._memory = {key: memory for key, memory in self._memory.items() if names and key[0] not in names}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use this workspace for all ``scratch`` calls of this thread inside the context."""
        before, here.workspace = here.workspace, self
        try:
            yield
        finally:
            here.workspace = before


class _Local(threading.local):
    workspace: Workspace | None = None


here = _Local()
"""Has the workspace of all ``scratch`` calls of this thread; None before the first of them."""


def current() -> Workspace:
    """Return the workspace that this thread uses."""
    if here.workspace is None:
        here.workspace = Workspace()
    return here.workspace


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``[numel]`` elements of undefined content, shared by all users of a workspace under this name.

    The content is valid until the next ``scratch`` of that name. A plan takes its scratch when it is made. If a later
    plan needs more, earlier plans keep the memory that they have. Without a ``Workspace`` in use, each thread has its
    own.

    Args:
        name: of the memory.
        numel: number of elements.
        dtype: of the elements; one dtype per name.
        device: of the memory.
    """
    return current().take(name, numel, dtype, device)


def release(*names: str) -> None:
    """Free the scratch memory of these names, or all of it, except what plans hold."""
    current().release(*names)


def pieces(numel: int, size: int) -> Iterator[slice]:
    """Yield slices of ``size`` elements that cover ``numel`` elements; the last one may be shorter."""
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


class Messages:
    """Buffers for ``count`` messages, zero at first because encoding does not write the padding."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self._shape, self.device = (count, size), device

    @cached_property
    def all(self) -> Tensor:
        """uint8 ``[count, size]``."""
        return torch.zeros(self._shape, dtype=torch.uint8, device=self.device)


class Growing:
    """Memory for messages of varying length: the largest size so far, plus an eighth."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def rows(self, count: int, width: int) -> Tensor:
        """Return uint8 ``[count, width]`` of undefined content."""
        size = count * width
        if self._buffer.numel() < size:
            self._buffer = torch.zeros(size + size // 8, dtype=torch.uint8, device=self._buffer.device)
        return self._buffer[:size].view(count, width)
