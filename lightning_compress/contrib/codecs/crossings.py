"""Finds the elements that reach a threshold."""

from __future__ import annotations

import numpy as np
import torch

from lightning_compress.codecs.packing.positions import Ints
from lightning_compress.codecs.packing.values import Floats
from lightning_compress.core.workspace import CHUNK, pieces, scratch


class Crossings:
    """Searches vectors in chunks on the CPU, in buffers that all plans share."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        self._above, self._below = (
            scratch(name, CHUNK, torch.bool, cpu).numpy() for name in ("crossings above", "crossings below")
        )

    def find(self, source: Floats, low: float, high: float, most: int) -> Ints:
        """Return the ascending positions of the first ``most`` elements that are ``<= low`` or ``>= high``.

        Args:
            source: float32 ``[n]``.
            low: at most ``high``; -inf to search for none.
            high: inf to search for none.
            most: the search ends after this many elements.
        """
        places, count = [np.empty(0, np.int64)], 0
        for piece in pieces(len(source), CHUNK):
            if count >= most:
                break
            values = source[piece]
            above = np.greater_equal(values, np.float32(high), out=self._above[: len(values)])
            below = np.less_equal(values, np.float32(low), out=self._below[: len(values)])
            hits = np.flatnonzero(np.logical_or(above, below, out=above))[: most - count]
            places.append(hits + piece.start)
            count += len(hits)
        return np.concatenate(places)
