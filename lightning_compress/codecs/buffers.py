"""What every plan needs: scratch memory, pieces that fit a cache, and a check of what arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements that a loop over a vector handles at a time on a CPU: they fit its caches; half as many cost 10 % more."""


def chunk_size(device: torch.device) -> int:
    """Elements to handle at a time: a cache's worth on a CPU, as many as scratch may hold on an accelerator."""
    return CHUNK if device.type == "cpu" else 1 << 24


class Workspace:
    """Scratch memory that plans use in turn; those that may work at the same time need one each."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ``scratch``."""
        if (name, device) not in self._memory or self._memory[name, device].numel() < numel:
            self._memory[name, device] = torch.empty(numel, dtype=dtype, device=device)
        return self._memory[name, device][:numel]

    @contextmanager
    def used(self) -> Iterator[None]:
        """What this thread takes inside is of this workspace."""
        before = _local.workspace
        _local.workspace = self
        try:
            yield
        finally:
            _local.workspace = before

    def clear(self) -> None:
        """Give the memory back."""
        self._memory.clear()


class _Local(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()


_local = _Local()


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[numel]`` elements of undefined content, which all plans of a workspace use in turn under this name.

    A plan takes them when it is made; those made before a larger one keep the memory that they have. Without a
    ``Workspace`` in use, each thread has its own.
    """
    return _local.workspace.take(name, numel, dtype, device)


def pieces(numel: int, size: int) -> Iterator[slice]:
    """Cut ``numel`` elements into runs of ``size``; the last one may be shorter."""
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def check(vector: Tensor, messages: Tensor, numel: int, size: int) -> None:
    """Refuse a vector or messages that are not of this plan.

    Raises:
        ValueError: a length or a dtype is not the plan's, as for a truncated message.
    """
    if vector.shape != (numel,) or vector.dtype != torch.float32:
        raise ValueError(
            f"the vector is {vector.dtype} of shape {tuple(vector.shape)}, but this plan is for float32 of shape "
            f"({numel},); make a plan for its layout"
        )
    if messages.shape[-1] != size or messages.dtype != torch.uint8:
        raise ValueError(
            f"the message is {messages.dtype} with {messages.shape[-1]} bytes, but this plan's messages are uint8 "
            f"with {size} bytes; it is truncated, or was made by a plan for another layout"
        )
