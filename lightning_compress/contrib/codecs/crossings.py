"""The elements that reach a threshold."""

from __future__ import annotations

import numpy as np
import torch

from lightning_compress.codecs.packing.positions import Ints
from lightning_compress.codecs.packing.values import Floats
from lightning_compress.core.workspace import CHUNK, pieces, scratch


class Crossings:
    """Looks at a vector chunk by chunk, on a CPU."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        self._above, self._below = (
            scratch(name, CHUNK, torch.bool, cpu).numpy() for name in ("crossings above", "crossings below")
        )

    def find(self, source: Floats, low: float, high: float, most: int) -> Ints:
        """Positions of elements ``<= low`` or ``>= high``, ascending, the first ``most`` of them.

        Args:
            source: float32 ``[n]``.
            low: at most ``high``; -inf for none.
            high: inf for none.
            most: no more than these are looked for.
        """
        found, count = [np.empty(0, np.int64)], 0
        for piece in pieces(len(source), CHUNK):
            if count >= most:
                break
            values = source[piece]
            above = np.greater_equal(values, np.float32(high), out=self._above[: len(values)])
            below = np.less_equal(values, np.float32(low), out=self._below[: len(values)])
            hits = np.flatnonzero(np.logical_or(above, below, out=above))[: most - count]
            found.append(hits + piece.start)
            count += len(hits)
        return np.concatenate(found)
