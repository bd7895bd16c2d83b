"""The heads of the messages of all shards, written and read at once for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core.told import Fold
from lightning_compress.exchanges.head import LENGTHS, Head
from lightning_compress.exchanges.message import zero_nonfinite


class Heads:
    """Heads with float32 flags and without lengths.

    Args:
        heads: of each shard's messages.
        own: slices of the vector that this rank owns, and whose sums ``fold`` checks.
        rank: of this process.
        device: of the messages: a CPU, or what Triton compiles for.
    """

    def __init__(self, heads: Sequence[Head], own: Sequence[slice], rank: int, device: torch.device) -> None:
        self._rank, self._own, self._masks = rank, own, heads[0].masks
        self._fused: ModuleType | None = kernels.backend(f"{__package__}.head", device, "triton")
        self._bytes = -(-len(heads[rank].rows) // 8)
        if self._fused:
            self._rows = self._fused.bits_of(heads, device)
            self._tiles = self._fused.tiles_of(own, device)
            return
        most = max(len(head.rows) for head in heads)
        self._index = np.array([[*head.rows, *[0] * (most - len(head.rows))] for head in heads], np.int64)
        self._there = np.arange(most) < np.array([[len(head.rows)] for head in heads])
        self._bits = slice(LENGTHS, LENGTHS - (-most // 8))
        self._own_bits = slice(LENGTHS, LENGTHS + self._bytes)

    def write(self, messages: Tensor, own_sum: Tensor, flag: Tensor) -> None:
        """Write the heads of the messages to all owners, before their sections, and begin that of the own sum.

        Args:
            messages: uint8 ``[W, size]``.
            own_sum: uint8 ``[size]``, the message with the sum of the own shard.
            flag: float32 scalar.
        """
        if self._fused:
            self._fused.write_all(messages, own_sum, flag, self._masks[0], self._rows, self._rank)
            return
        _flags(messages).copy_(flag)
        if self._index.size:
            used = self._masks[0].numpy()[self._index] * self._there
            bits = np.packbits(used, axis=1, bitorder="little")
            messages.numpy()[:, self._bits] = bits  # zeros where a head is shorter, which its sections overwrite
            own_sum.numpy()[self._own_bits] = bits[self._rank, : self._own_bits.stop - LENGTHS]

    def told(self, own_sum: Tensor, flag: Tensor, late: bool = False) -> Fold:
        """Return what ``fold`` is told; ``late``: ``read`` is not called afterwards. See ``write`` and ``Fold``."""
        return Fold(self._rank, own_sum, flag, self._masks[not late], LENGTHS, self._bytes)

    def fold(self, received: Tensor, vector: Tensor, folding: Fold) -> None:
        """Finish the head of the own sum by what the heads of received messages say, and find sums out of range.

        Args:
            received: uint8 ``[W, size]``; this rank's row is ignored.
            vector: float32; sums in the own shard that are not finite become zeros.
            folding: as ``told`` returned it.
        """
        if self._fused:
            self._fused.fold(received, folding, vector, self._tiles)
            return
        own_sum, flag = folding.own, folding.flag
        told = _flags(received) * 0.0
        told[self._rank] = 0.0
        flag.add_(told.sum())
        if self._index.size:
            bits = received.numpy()[:, self._own_bits].copy()
            bits[self._rank] = own_sum.numpy()[self._own_bits]
            own_sum.numpy()[self._own_bits] = np.bitwise_or.reduce(bits, axis=0)
            self._masks[1].zero_()
        for span in self._own:
            zero_nonfinite(vector[span], flag)
        _flags(own_sum[None]).copy_(flag)

    def read(self, received: Tensor, flag: Tensor) -> None:
        """Add the flags of all sums, and note whose rows have values.

        Args:
            received: uint8 ``[W, size]``.
            flag: float32 scalar, 0.0 or NaN; becomes NaN if a flag is.
        """
        if self._fused:
            self._fused.read_all(received, flag, self._masks, self._rows)
            return
        flag.add_((_flags(received) * 0.0).sum())
        if self._index.size:
            bits = np.unpackbits(received.numpy()[:, self._bits], axis=1, bitorder="little")
            used = bits[:, : self._there.shape[1]].astype(bool) & self._there
            self._masks[1].numpy()[self._index[used]] = 1

    def report(self, own_sum: Tensor, flag: Tensor) -> None:
        """Write the flag to the head of the own sum once more, on a CPU."""
        _flags(own_sum[None]).copy_(flag)


def _flags(messages: Tensor) -> Tensor:
    """Return the flags of messages ``[M, size]``, a view, float32 ``[M]``."""
    return messages.view(torch.float32)[:, 0]
