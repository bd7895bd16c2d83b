"""Sparse messages: positions, then values, each in one of several codings; and the plans that send them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Plan
from lightning_compress.codecs.packing.bits import Bytes
from lightning_compress.codecs.packing.positions import Ints, Positions
from lightning_compress.codecs.packing.values import Floats, Values
from lightning_compress.core.layout import Layout

Found = tuple[Ints, Floats]
"""Ascending positions, and the values at these positions."""


class Entries:
    """A coding of positions followed by a coding of values.

    Args:
        positions: coding of the positions.
        values: coding of the values.
        ends: end of each part (parameter), one past its last position.

    Attributes:
        size: largest number of bytes.
    """

    def __init__(self, positions: Positions, values: Values, ends: Sequence[int]) -> None:
        self._positions, self._values = positions, values
        self._ends = np.array(ends, np.int64)
        self.size = positions.size + values.size(positions.most)

    def write(self, found: Found, body: Bytes) -> tuple[Floats, int]:
        """Write to the beginning of ``body``; return the values that ``read`` will return, and the number of bytes."""
        positions, values = found
        used = self._positions.write(positions, body)
        sent = self._values.write(values, self._counts(positions), body[used:])
        return sent, used + self._values.size(len(positions))

    def read(self, body: Bytes) -> tuple[Found, int]:
        """Return what ``write`` wrote, and the number of bytes.

        Raises:
            ValueError: ``write`` does not write such bytes.
        """
        positions, used = self._positions.read(body)
        values = self._values.read(body[used:], self._counts(positions))
        return (positions, values), used + self._values.size(len(positions))

    def _counts(self, positions: Ints) -> Ints:
        return np.diff(np.searchsorted(positions, self._ends), prepend=0)


class EntriesPlan(Plan):
    """Base of plans that choose elements, send them as entries, and subtract from the vector what was sent.

    Entries are written and read on the host, also for vectors on an accelerator.

    Args:
        layout: layout of the vectors.
        entries: codings of the lists of elements that ``_find`` returns. They follow each other in a message.
        usual: typical number of bytes of a message, if messages vary in length; otherwise None.
    """

    def __init__(self, layout: Layout, entries: Sequence[Entries], usual: int | None = None) -> None:
        super().__init__(layout)
        self._entries = entries if layout.numel else []
        self.message_size = self._used = sum(coding.size for coding in self._entries)
        self.variable = usual is not None
        self._expected = self.message_size if usual is None else min(usual, self.message_size)

    @abstractmethod
    def _find(self, vector: Tensor, key: int) -> Sequence[Found]:
        """Return the elements to send, one list per coding. No position may occur twice."""

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan.encode``."""
        self.check(vector, message)
        body, used = _host(message), 0
        for entries, found in zip(self._entries, self._find(vector, key) if self._entries else (), strict=True):
            sent, size = entries.write(found, body[used:])
            used += size
            if vector.device.type == "cpu":
                vector.numpy()[found[0]] -= sent
            else:
                vector.index_add_(0, *_to(vector.device, (found[0], sent)), alpha=-1)
        if message.device.type != "cpu":
            message[:used] = torch.from_numpy(body[:used])
        if self.variable:
            self._used = used
        else:
            message[used:] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        decoded = []
        for message in messages:
            body, used = _host(message), 0
            for entries in self._entries:
                found, size = entries.read(body[used:])
                used += size
                decoded.append(found)
        if not accumulate:
            out.zero_()
        for found in decoded:
            out.index_add_(0, *_to(out.device, found), alpha=weight)


def _host(message: Tensor) -> Bytes:
    """Return the message's own memory on a CPU, else a copy."""
    array: Bytes = message.cpu().numpy()
    return array


def _to(device: torch.device, found: Found) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(found[0]).to(device), torch.from_numpy(found[1]).to(device)
