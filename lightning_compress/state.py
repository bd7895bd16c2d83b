"""State in two buffers: what an optimizer step has made true, and what the step under way would make true."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.layout import Layout


class Residual:
    """What encoding left behind, for one group on this rank: float32, in units of the unscaled gradient.

    A save at any moment sees the committed buffer, since a commit is a swap of two references.

    Args:
        layout: what the vector is made of.
        device: where it lives.

    Attributes:
        committed: the residual after the last optimizer step, ``[numel]``.
        pending: the vector of the step under way, ``[numel]``.
        touched: ``pending`` holds a reduction that no optimizer step has made true yet.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.committed = torch.zeros(layout.numel, device=device)
        self.pending = torch.zeros(layout.numel, device=device)
        self.touched = False

    def base(self) -> Tensor:
        """What the next gradient is added to."""
        return self.pending if self.touched else self.committed

    def commit(self, rejected: Tensor) -> None:
        """Make the pending residual true, unless ``rejected`` (a bool scalar) says that the step was not sound."""
        if not self.touched:
            return
        if rejected.device.type == "cpu":
            if not rejected:
                self.committed, self.pending = self.pending, self.committed
        else:  # without a wait for the device
            torch.where(rejected, self.committed, self.pending, out=self.pending)
            self.committed, self.pending = self.pending, self.committed
        self.touched = False

    def roll_back(self) -> None:
        """Forget the pending residual."""
        self.touched = False

    def adopt(self, other: Residual, names: Sequence[str]) -> None:
        """Take the named parameters' residuals over from a group that was laid out otherwise."""
        wanted = set(names)
        places = {segment.name: slice(segment.offset, segment.end) for segment in self.layout.segments}
        for segment in other.layout.segments:
            if segment.name in wanted:
                source, target = slice(segment.offset, segment.end), places[segment.name]
                self.committed[target].copy_(other.committed[source])
                self.pending[target].copy_(other.base()[source])
        self.touched = self.touched or other.touched
