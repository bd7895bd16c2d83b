"""Sparse messages: positions, then values, in any coding of either; and the plans that send them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.packing.positions import Ints, Positions
from lightning_compress.codecs.packing.values import Floats, Values
from lightning_compress.codecs.variable import Bytes, VariablePlan
from lightning_compress.core.layout import Layout

Found = tuple[Ints, Floats]
"""Ascending positions, and the values there."""


class Entries:
    """Positions and values, one after the other.

    Args:
        positions: how positions are written.
        values: how values are.
        ends: one past the last position of each part.

    Attributes:
        size: bytes that they take at most.
    """

    def __init__(self, positions: Positions, values: Values, ends: Sequence[int]) -> None:
        self._positions, self._values = positions, values
        self._ends = np.array(ends, np.int64)
        self.size = positions.size + values.size(positions.most)

    def write(self, found: Found, body: Bytes) -> tuple[Floats, int]:
        """Write to the beginning of ``body``; returns the values that ``read`` will find, and the bytes used."""
        positions, values = found
        used = self._positions.write(positions, body)
        sent = self._values.write(values, self._counts(positions), body[used:])
        return sent, used + self._values.size(len(positions))

    def read(self, body: Bytes) -> tuple[Found, int]:
        """Read what ``write`` wrote, and how many bytes that was.

        Raises:
            ValueError: the bytes are none that ``write`` makes.
        """
        positions, used = self._positions.read(body)
        values = self._values.read(body[used:], self._counts(positions))
        return (positions, values), used + self._values.size(len(positions))

    def _counts(self, positions: Ints) -> Ints:
        return np.diff(np.searchsorted(positions, self._ends), prepend=0)


class EntriesPlan(VariablePlan):
    """Finds elements, sends them as entries, and takes what was sent out of the vector.

    The entries are written and read on the host, also for vectors on an accelerator.

    Args:
        layout: what the vector is made of.
        entries: codings of what ``_find`` finds, one after the other in a message.
        usual: bytes that a message usually takes, where messages vary in length; None: they do not.
    """

    def __init__(self, layout: Layout, entries: Sequence[Entries], usual: int | None = None) -> None:
        super().__init__(layout)
        self._entries = entries if layout.numel else []
        self.message_size = self._used = sum(each.size for each in self._entries)
        self.variable = usual is not None
        self._expected = self.message_size if usual is None else min(usual, self.message_size)

    @abstractmethod
    def _find(self, vector: Tensor, key: int) -> Sequence[Found]:
        """What to send of a vector, for each of the codings; no position twice."""

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
        found = []
        for message in messages:
            body, used = _host(message), 0
            for entries in self._entries:
                each, size = entries.read(body[used:])
                used += size
                found.append(each)
        if not accumulate:
            out.zero_()
        for each in found:
            out.index_add_(0, *_to(out.device, each), alpha=weight)


def _host(message: Tensor) -> Bytes:
    """The message's own bytes on a CPU, else a copy of them."""
    array: Bytes = message.cpu().numpy()
    return array


def _to(device: torch.device, found: Found) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(found[0]).to(device), torch.from_numpy(found[1]).to(device)
