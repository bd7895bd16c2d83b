"""Memory for messages, made when it is first used: of most plans only the price is looked at."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


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
