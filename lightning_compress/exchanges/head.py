"""The beginning of a message: a flag, the sections' lengths if they vary, and a bit for each row that may be unused.

    | flag | lengths, from byte 8 on | bits | zeros up to a multiple of 16 bytes |

The flag is 0.0, or NaN on a rank with a non-finite gradient. It is a float32, or where messages are summed, has the
first section's dtype. It is infinite on a rank that could not read a message it received. Lengths are int64. A bit is
1 if the rank has a value other than zero in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import ALIGNMENT, aligned
from lightning_compress.core.layout import Segment
from lightning_compress.core.told import Opening

LENGTHS, LENGTH = 8, 8
"""The offset of the section lengths in a message, and the bytes of each length."""


@dataclass(frozen=True, eq=False)
class Marks:
    """Which rows of a group's parameters have a value other than zero, on this rank and on any.

    Attributes:
        rows: for each parameter that is looked at, by its name: the index of its first row, and how many it is cut
            into. It may be looked at twice: as a whole, and row by row.
        own: uint8 ``[rows]``, 1 for rows of this rank. Exchanges overwrite it; kernels leave zeros.
        any_rank: uint8 ``[rows]``, 1 for rows of any rank, after the exchange.
    """

    rows: Mapping[str, Sequence[tuple[int, int]]]
    own: Tensor
    any_rank: Tensor

    def of(self, segments: Sequence[Segment]) -> list[int]:
        """Return the indices of the rows that lie in these segments, also in part."""
        found: list[int] = []
        for segment in segments:
            for first, count in self.rows.get(segment.name, ()):
                width = max(1, math.prod(segment.shape) // count)
                found += range(first + segment.start // width, first - (-segment.stop // width))
        return found


class Head:
    """The heads of messages of one kind.

    Args:
        lengths: how many section lengths it has.
        dtype: of the flag.
        device: of the messages.
        marks: whose rows travel, or None.
        rows: their indices.

    Attributes:
        size: in bytes.
        bits: its first byte with bits.
        dtype: of the flag.
        rows: the mask's rows that travel.
        masks: of this rank and of any rank.
        written: it is written already.
    """

    written = False

    def __init__(
        self,
        lengths: int,
        dtype: torch.dtype,
        device: torch.device,
        marks: Marks | None = None,
        rows: Sequence[int] = (),
    ) -> None:
        self.bits = LENGTHS + LENGTH * lengths
        self.size = aligned(self.bits + -(-len(rows) // 8))
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self.dtype, self._device, self.rows = dtype, device, rows
        self.masks = (marks.own, marks.any_rank) if marks else (nothing, nothing)
        self._fused = kernels.backend(__name__, device, "triton")

    @cached_property
    def _index(self) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int64).to(self._device)

    def write(self, message: Tensor, flag: Tensor, late: bool = False) -> None:
        """Write the flag and the bits of this rank to ``message``, uint8 ``[size]``; the rest was zeros.

        Args:
            message: see above.
            flag: float32 scalar.
            late: ``read`` is not called afterwards; kernels then leave zeros in this rank's mask.
        """
        if self.written:
            return
        if self._fused:
            self._fused.write(message, flag, *self.masks, self._index, self.bits, self.dtype, late)
            return
        message[:ALIGNMENT].view(self.dtype)[:1].copy_(flag)
        if self.rows:
            _packed(self.masks[0][self._index], message[self.bits : self.bits + -(-len(self.rows) // 8)])

    def read(self, messages: Tensor, flag: Tensor, sums: bool = False) -> None:
        """Add the flags of ``messages``, uint8 ``[M, size]``, and note whose rows have values.

        Args:
            messages: any bytes.
            flag: float32 scalar, 0.0 or NaN; stays one of them.
            sums: note the rows as this rank's own, because it will send them on with a sum.
        """
        own, any_rank = self.masks
        into = own if sums else any_rank
        if self._fused:
            self._fused.read(messages, flag, own, into, self._index, self.bits, self.dtype)
            return
        flag.add_(self.flags(messages).sum() * 0.0)
        if self.rows:
            bits = messages[:, self.bits : self.bits + -(-len(self.rows) // 8)]
            into[self._index] |= _unpacked(bits)[: len(self.rows)]

    def flags(self, messages: Tensor) -> Tensor:
        """Return the flags of ``messages``, uint8 ``[M, size]``, as float32 ``[M]``."""
        size = self.dtype.itemsize
        if messages.stride(0) % size or messages.storage_offset() % size:
            messages = messages[:, :ALIGNMENT].contiguous()
        return messages[:, :ALIGNMENT].view(self.dtype)[:, 0].float()


def bits_of(heads: Iterable[tuple[Head, int]]) -> tuple[int, ...]:
    """Return for each row of a mask a bit that some head has for it; see ``Told``.

    Args:
        heads: each with the first byte of its message.
    """
    places = {row: 8 * (first + head.bits) + number for head, first in heads for number, row in enumerate(head.rows)}
    return tuple(places.get(row, -1) for row in range(max(places, default=-1) + 1))


def opening_of(heads: Sequence[Head], messages: Tensor, own: Tensor, rank: int) -> Opening | None:
    """Return heads without lengths as kernels write them, if there are kernels; see ``Opening``."""
    fused, device = heads[0]._fused, messages.device
    if not fused or any(head.bits != LENGTHS or head.dtype != torch.float32 for head in heads):
        return None
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    return Opening(messages, own, rank, fused.bits_of(heads, device), LENGTHS, heads[0].masks[0], arrived)


def _packed(rows: Tensor, out: Tensor) -> None:
    """Write uint8 ``rows [n]``, 0 or 1, as bits, the first row lowest."""
    if out.device.type == "cpu":
        out.numpy()[:] = np.packbits(rows.numpy(), bitorder="little")
        return
    octets = torch.nn.functional.pad(rows, (0, -len(rows) % 8)).view(-1, 8)
    out.copy_((octets << torch.arange(8, dtype=torch.uint8, device=out.device)).sum(1))


def _unpacked(bits: Tensor) -> Tensor:
    """Return uint8 ``[8 * bytes]``, 1 where a bit is set in any of ``bits [M, bytes]``."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(np.bitwise_or.reduce(bits.numpy(), axis=0), bitorder="little"))
    return (
        ((bits.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1)
        .amax(0)
        .view(-1)
        .to(torch.uint8)
    )
