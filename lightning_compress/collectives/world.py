"""Where an exchange happens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_compress.collectives.base import Collective
from lightning_compress.collectives.counting import Meter


class World(NamedTuple):
    """The ranks, the device that their vectors are on, and what gets times and bytes."""

    collective: Collective
    device: torch.device
    meter: Meter

    def among(self, collective: Collective) -> World:
        """The same for other ranks."""
        return self._replace(collective=collective)
