"""State in two buffers: what an optimizer step has made true, and what the step under way would make true."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_compress.layout import Layout, Segment


class Residual:
    """What encoding left behind, for one group on this rank: float32, in units of the unscaled gradient.

    A save at any moment sees a committed buffer: a commit replaces the reference.

    Args:
        layout: what the vector is made of.
        device: where it lives.

    Attributes:
        committed: the residual after the last optimizer step, ``[numel]``.
        pending: the vector of the step under way, ``[numel]``.
        touched: names of the parameters of which ``pending`` holds what no optimizer step has made true yet.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.committed = torch.zeros(layout.numel, device=device)
        self.pending = torch.zeros(layout.numel, device=device)
        self.touched: set[str] = set()

    def base(self) -> Tensor:
        """What the next gradient is added to."""
        return self.pending if self.touched else self.committed

    def touch(self) -> None:
        """``pending`` was written."""
        self.touched.update(self.layout.names)

    def commit(self, rejected: Tensor, stepped: Collection[str]) -> None:
        """Make the pending residual of the parameters that were stepped true.

        Args:
            rejected: bool scalar: the step was not sound, and its residual is dropped instead.
            stepped: names of the optimizer's parameters.
        """
        ours = self.touched.intersection(stepped)
        if not ours:
            return
        self.reject(rejected)
        ours &= self.touched
        if not ours:
            return
        if len(ours) == len(self.layout.segments):
            self.committed, self.pending = self.pending, self.committed
        else:  # another optimizer has the rest, and may step it yet
            committed = self.committed.clone()
            for place in self._places(ours):
                committed[place] = self.pending[place]
            self.committed = committed
        self.touched -= ours

    def reject(self, rejected: Tensor) -> None:
        """Roll back if the bool scalar ``rejected`` says so; on an accelerator without a wait for it."""
        if rejected.device.type != "cpu":
            torch.where(rejected, self.committed, self.pending, out=self.pending)
        elif rejected:
            self.roll_back()

    def roll_back(self) -> None:
        """Forget the pending residual."""
        self.touched.clear()

    def reset(self) -> None:
        """Forget everything."""
        self.touched.clear()
        self.committed = torch.zeros_like(self.committed)

    def adopt(self, other: Residual, names: Collection[str]) -> None:
        """Take the named parameters' residuals over from a group that was laid out otherwise."""
        targets = dict(zip(self.layout.names, self._places(self.layout.names), strict=True))
        for name, source in zip(other.layout.names, other._places(other.layout.names), strict=True):
            if name in names:
                self.committed[targets[name]] = other.committed[source]
                self.pending[targets[name]] = other.base()[source]
        self.touched |= other.touched.intersection(names)

    def _places(self, names: Collection[str]) -> list[slice]:
        return [place_of(segment) for segment in self.layout.segments if segment.name in names]


def place_of(segment: Segment) -> slice:
    """Where a segment stands in its vector."""
    return slice(segment.offset, segment.end)
