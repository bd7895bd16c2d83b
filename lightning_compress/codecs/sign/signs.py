"""Plans of the codecs that send one sign per element: blocks, packing, and message format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import KernelPlan, Plan, Shard, Shards, SourcePlan, aligned
from lightning_compress.codecs.packing.bits import block_shape, pack, packed_size, unpack
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import NOTHING, Pieces, Source, place_of
from lightning_compress.core.told import Fold
from lightning_compress.core.workspace import chunk_size, pieces, scratch

WORD = 32
"""Bits that the CPU kernels write at a time. They handle blocks that begin and end at a multiple of it."""


def plan_signs(layout: Layout, device: torch.device, block: int, values: int) -> Plan:
    """Return a plan with blocks of equal length: a GPU kernel if there is one, else a ``SignPlan``.

    Args:
        layout: layout of the vectors.
        device: device of the vectors.
        block: elements of a block; a multiple of 8. A shorter vector is one block.
        values: see ``SignPlan``.
    """
    width, count = block_shape(layout.numel, block)
    fused = kernels.backend(__name__, device, "triton")
    if fused and block <= fused.LONGEST:
        body = aligned(4 * values * count)
        return KernelPlan(layout, body + packed_size(layout.numel), fused.coder(width, values, body))
    whole, rest = divmod(layout.numel, width)
    return SignPlan(layout, device, [(whole, width), (1, rest)] if rest else [(whole, width)], values)


class SignPlan(SourcePlan):
    """Sends ``v >= 0`` as one bit, and one or two float32 values per block of consecutive elements.

    A message is every block's first value, then every block's second value, zeros up to a multiple of 16 bytes, then
    the bits, the first element lowest. Two values are the means of the elements ``>= 0`` and of the others. One value
    is the mean magnitude.

    Args:
        layout: layout of the vectors.
        device: device of the vectors.
        runs: pairs (number of blocks, elements of each), which fill the vector in order.
        values: values per block, 1 or 2.
    """

    def __init__(self, layout: Layout, device: torch.device, runs: Iterable[tuple[int, int]], values: int) -> None:
        super().__init__(layout)
        fast = kernels.backend(__name__, device, "numba")
        self._chunk = chunk_size(device) // 4  # smaller chunks, because sums need a float64 copy
        parts, block, element = list[tuple[slice, slice, bool]](), 0, 0
        for count, length in runs:
            by_kernel = fast is not None and not element % WORD and not length % WORD
            for part in pieces(count, max(1, count if by_kernel else self._chunk // length)):
                last, end = block + part.stop - part.start, element + (part.stop - part.start) * length
                parts.append((slice(block, last), slice(element, end), by_kernel))
                block, element = last, end
        self._fast: Any = fast
        if fast:
            self._move, self._add = (fast.scale_signs if values == 1 else fast.split_signs), fast.add_signs
        self._values = torch.empty(values, block, dtype=torch.float32, device=device)
        self._header = 4 * values * block
        self._bits = aligned(self._header)
        self.message_size = self._bits + packed_size(layout.numel)
        self._pieces = [(blocks, part, self._packed(part), by_kernel) for blocks, part, by_kernel in parts]
        self.in_pieces = all(by_kernel for *_, by_kernel in parts)
        others = [elements for _, elements, by_kernel in parts if not by_kernel]
        self._others = slice(others[0].start // 8 * 8, others[-1].stop) if others else slice(0, 0)
        longest = max((elements.stop - elements.start for elements in others), default=-16)
        self._floats = scratch("sign floats", longest + 16, torch.float32, device)

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""
        others = self._others
        if others.stop:
            given = source.part(others).into(None if rest is None else rest[others])
            for piece in pieces(len(given), self._chunk):  # a block may end within a byte
                part = slice(others.start + piece.start, others.start + piece.stop)
                pack(given[piece] >= 0, message[self._packed(part)])
        for blocks, elements, packed, by_kernel in self._pieces:
            values = self._values[:, blocks]
            if by_kernel:
                words, own = message[packed].numpy().view(np.uint32), source.part(elements)
                left = NOTHING if rest is None else rest[elements].numpy()
                own.feed(self._move, words, values.numpy(), left)
            else:
                rows = given[elements.start - others.start : elements.stop - others.start]
                move_values(rows.view(values.shape[1], -1), values)
        message[: self._header] = self._values.view(torch.uint8).view(-1)
        message[self._header : self._bits] = 0

    def decode(self, messages: Tensor, out: Tensor | Pieces, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        header = messages[:, : self._header].clone(memory_format=torch.contiguous_format).view(-1)
        values = header.view(torch.float32).view(messages.shape[0], *self._values.shape).mul_(weight)
        high, low = values[:, 0], values[:, 1] if values.shape[1] == 2 else -values[:, 0]
        for blocks, elements, packed, by_kernel in self._pieces:
            if by_kernel:
                words = messages.numpy()[:, packed].view(np.uint32)
                place = place_of(out, elements)
                self._add(words, high[:, blocks].numpy(), low[:, blocks].numpy(), place, accumulate)
                continue
            rows = cast(Tensor, out[elements]).view(blocks.stop - blocks.start, -1)
            if not accumulate:
                rows.zero_()
            for message, one, zero in zip(messages, high[:, blocks, None], low[:, blocks, None], strict=True):
                unpack(message[packed], self._floats[: 8 * (packed.stop - packed.start)])
                signs = self._floats[elements.start % 8 :][: rows.numel()].view(rows.shape)
                rows.addcmul_(signs, one).addcmul_(signs.sub_(1), zero, value=-1)  # one of the products is 0

    @property
    def _constants(self) -> tuple[object, ...] | None:
        """What the kernel of all pieces depends on, besides their lengths; None if there is no such kernel."""
        sizes = {(part.stop - part.start) // (blocks.stop - blocks.start) for blocks, part, _, _ in self._pieces}
        fits = len(sizes) == 1 and all(by_kernel for *_, by_kernel in self._pieces)
        return (len(self._values), sizes.pop()) if fits else None

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """See ``ShardCoder``."""
        rows, constants = [], self._constants
        for shard in shards:
            plan = shard.coder
            if not isinstance(plan, SignPlan) or constants is None or plan._constants != constants:
                return None
            rows.append((shard.start, shard.numel, shard.at, plan._values.shape[1], plan._bits))
        return Shards.of(rows, shards, device)

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """See ``ShardCoder``."""
        inputs = shards.table.numpy(), messages.view(-1).numpy(), len(self._values)
        source.feed(self._fast.encode_shards, *inputs, NOTHING if rest is None else rest.numpy())

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor | Pieces, weight: float, accumulate: bool, fold: Fold | None
    ) -> None:
        """See ``ShardCoder``."""
        inputs = messages.view(-1).numpy(), shards.table.numpy(), place_of(out), np.float32(weight), accumulate
        self._fast.decode_shards(*inputs, len(self._values))

    def _packed(self, elements: slice) -> slice:
        """Return the slice of a message with the bits of these elements."""
        return slice(self._bits + elements.start // 8, self._bits + packed_size(elements.stop))


def move_values(rows: Tensor, values: Tensor) -> None:
    """Compute the values of each row, and subtract them from the row.

    Sums are computed in float64, so that all devices write the same bytes.

    Args:
        rows: float32 ``[blocks, n]``. Afterwards it holds what was not sent.
        values: float32 ``[1 or 2, blocks]``, overwritten.
    """
    signs, wide = torch.ge(rows, 0, out=torch.empty_like(rows)), rows.double()  # comparison into floats is vectorised
    if len(values) == 1:
        values[0] = wide.abs_().sum(1) / rows.shape[1]
        high, low = values[0], -values[0]
    else:
        count = signs.sum(1, dtype=torch.float64)
        values[0] = wide.clamp(min=0).sum(1) / count.clamp(min=1)
        values[1] = wide.clamp_(max=0).sum(1) / (rows.shape[1] - count).clamp(min=1)
        high, low = values
    rows.addcmul_(signs, high.unsqueeze(1), value=-1).addcmul_(signs.sub_(1), low.unsqueeze(1))
