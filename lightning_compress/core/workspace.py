"""Memory that plans share, or allocate at first use; and pieces that fit a cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements that a loop over a vector handles at a time on a CPU: they fit its caches; half as many cost 10 % more."""


def chunk_size(device: torch.device) -> int:
    """Elements to handle at a time: a cache's worth on a CPU, as many as scratch may hold on an accelerator."""
    return CHUNK if device.type == "cpu" else 1 << 24


class Workspace:
    """Scratch memory that plans share; plans that may run at the same time need one each."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ``scratch``."""
        key = name, device
        if key not in self._memory or self._memory[key].numel() < numel:
            self._memory.pop(key, None)  # before there is a larger one
            self._memory[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._memory[key][:numel]

    def release(self, *names: str) -> None:
        """See ``release``."""
        self._memory = {key: memory for key, memory in self._memory.items() if names and key[0] not in names}

    @contextmanager
    def used(self) -> Iterator[None]:
        """What this thread takes inside is of this workspace."""
        before = _local.workspace
        _local.workspace = self
        try:
            yield
        finally:
            _local.workspace = before


class _Local(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()


_local = _Local()


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[numel]`` elements of undefined content, which all users of a workspace share under this name.

    They are valid until the next ``scratch`` of that name. A plan takes them when it is made; those made before a
    larger one keep the memory that they have. Without a ``Workspace`` in use, each thread has its own.
    """
    return _local.workspace.take(name, numel, dtype, device)


def release(*names: str) -> None:
    """Free the scratch memory of these names, or all of it, but for what plans hold."""
    _local.workspace.release(*names)


def pieces(numel: int, size: int) -> Iterator[slice]:
    """Cut ``numel`` elements into runs of ``size``; the last one may be shorter."""
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


class Messages:
    """Buffers for ``count`` messages; zero at first, since encoding writes no padding."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self._shape, self.device = (count, size), device

    @cached_property
    def all(self) -> Tensor:
        """uint8 ``[count, size]``."""
        return torch.zeros(self._shape, dtype=torch.uint8, device=self.device)


class Growing:
    """Memory for messages whose length varies: as much as was ever needed, and an eighth more."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def rows(self, count: int, width: int) -> Tensor:
        """``[count, width]``; what was there before has no meaning."""
        size = count * width
        if self._buffer.numel() < size:
            self._buffer = torch.zeros(size + size // 8, dtype=torch.uint8, device=self._buffer.device)
        return self._buffer[:size].view(count, width)
