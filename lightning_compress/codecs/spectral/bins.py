"""Choice of a block's largest coefficients, and coding of their positions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.packing.bits import pack, packed_size, unpack
from lightning_compress.core.workspace import scratch


class Places:
    """Chooses ``keep`` of ``bins`` coefficients of each row, and codes their positions.

    The coding is a bitmap or a list of uint16, whichever is smaller.

    Args:
        bins: coefficients of a row, at most 65536.
        keep: number of coefficients that are chosen.

    Attributes:
        size: bytes of a row's positions; 0 if all coefficients are chosen.
        listed: the coding is a list.
    """

    def __init__(self, bins: int, keep: int) -> None:
        self.bins, self.keep = bins, keep
        self.listed = 2 * keep < packed_size(bins)
        self._bytes = packed_size(bins)
        self.size = 0 if keep == bins else 2 * keep if self.listed else self._bytes

    def largest(self, energy: Tensor) -> Tensor:
        """Return the positions of the largest elements of each row; of equal elements the first are taken.

        Args:
            energy: float32 ``[R, bins]``.

        Returns:
            int64 ``[R * keep]``, ascending; column c of row r is ``r * bins + c``.
        """
        rows = len(energy)
        if self.keep == self.bins:
            return torch.arange(rows * self.bins, dtype=torch.int64, device=energy.device)
        if energy.device.type != "cpu":  # nothing waits for the device
            order = torch.argsort(energy, dim=1, descending=True, stable=True)[:, : self.keep]
            return self._flat(order.sort(dim=1).values)
        values = energy.numpy()
        spare = scratch("places order", energy.numel(), torch.float32, energy.device).numpy().reshape(values.shape)
        spare[:] = values
        spare.partition(self.bins - self.keep, axis=1)
        least = spare[:, self.bins - self.keep, None]
        chosen = values >= least
        if np.count_nonzero(chosen) > rows * self.keep:
            for row in np.flatnonzero(chosen.sum(axis=1) > self.keep):
                equal = np.flatnonzero(values[row] == least[row])
                chosen[row, equal[self.keep - chosen[row].sum() :]] = False
        return torch.from_numpy(np.flatnonzero(chosen))

    def write(self, places: Tensor, packed: Tensor) -> None:
        """Write the positions of R rows, from ``largest``, to uint8 ``[R * size]``."""
        if not self.size:
            return
        rows = len(places) // self.keep
        if self.listed:
            packed.view(torch.int16).copy_((places.view(rows, -1) - self._first(places, rows)).view(-1))
            return
        if places.device.type == "cpu":
            marks = np.zeros((rows, self.bins), np.bool_)
            marks.reshape(-1)[places.numpy()] = True
            packed.numpy()[:] = np.packbits(marks, axis=1, bitorder="little").reshape(-1)
            return
        bits = torch.zeros(rows, 8 * self._bytes, dtype=torch.bool, device=places.device)
        bits.view(-1)[places + (8 * self._bytes - self.bins) * torch.div(places, self.bins, rounding_mode="floor")] = 1
        pack(bits.view(-1), packed)

    def read(self, packed: Tensor, rows: int) -> Tensor:
        """Return the positions of R rows; see ``largest``. They are within these rows, whatever the bytes are.

        Raises:
            ValueError: on a CPU, ``write`` does not write such bytes. On an accelerator, a check would wait for it.
        """
        if not self.size:
            return torch.arange(rows * self.bins, dtype=torch.int64, device=packed.device)
        if self.listed:
            columns = packed.view(torch.int16).view(rows, -1).long() & 0xFFFF
            if packed.device.type == "cpu" and bool((columns >= self.bins).any()):
                raise self.damaged()
            return self._flat(columns.clamp(max=self.bins - 1))
        if packed.device.type == "cpu":
            marks = np.unpackbits(packed.numpy().reshape(rows, -1), axis=1, count=self.bins, bitorder="little")
            places = np.flatnonzero(marks.view(np.bool_))
            if len(places) != rows * self.keep or (places[:: self.keep] // self.bins != np.arange(rows)).any():
                raise self.damaged()
            return torch.from_numpy(places)
        floats = torch.empty(len(packed) * 8, dtype=torch.float32, device=packed.device)
        unpack(packed, floats)
        bits = floats.view(rows, -1)[:, : self.bins] != 0
        return self._flat(torch.argsort(bits.byte(), dim=1, descending=True, stable=True)[:, : self.keep])

    def _first(self, like: Tensor, rows: int) -> Tensor:
        return torch.arange(rows, dtype=torch.int64, device=like.device).view(-1, 1) * self.bins

    def _flat(self, columns: Tensor) -> Tensor:
        return (columns + self._first(columns, len(columns))).view(-1)

    def damaged(self) -> ValueError:
        """Return the error for a message that ``write`` does not write."""
        return ValueError(
            f"the message has blocks without {self.keep} positions of {self.bins}; it is damaged, or of another layout"
        )
