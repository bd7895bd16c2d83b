"""Memory that is used for a moment and by turns."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Float32 memory that the groups of a hook take in turn; it grows to the largest of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, numel: int) -> Tensor:
        """``[numel]`` elements of undefined content, valid until the next ``take`` of that name."""
        if name not in self._memory or self._memory[name].numel() < numel:
            self._memory[name] = torch.empty(numel, device=self._device)
        return self._memory[name][:numel]

    def clear(self) -> None:
        """Give the memory back."""
        self._memory.clear()
