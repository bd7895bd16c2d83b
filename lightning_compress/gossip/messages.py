"""What ranks tell each other in a round of Moniqua: codes of a vector, and hashes of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import torch
from torch import Tensor

from lightning_compress.codecs.codec import aligned
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits
from lightning_compress.core.workspace import pieces
from lightning_compress.gossip.lattice import Blocks, Lattice
from lightning_compress.gossip.moniqua import Moniqua

BLOCK = 1 << 12
"""Parameters at most that share a theta and a hash, and are sent whole if it is wrong."""
CHUNK = 1 << 16
"""Parameters that are handled at a time: a multiple of a block."""


def cut(layout: Layout) -> list[slice]:
    """Blocks: parameter tensors, cut at each multiple of ``BLOCK``."""
    ends = {*range(0, layout.numel, BLOCK), *(each.offset for each in layout.segments), layout.numel}
    return [slice(start, stop) for start, stop in pairwise(sorted(ends))]


def largest(theirs: Tensor, own: Tensor, sizes: Tensor) -> Tensor:
    """The largest difference in each block, float64 ``[blocks]``; of what is no number, 0."""
    apart = torch.nan_to_num(theirs.double() - own.double(), nan=0.0, posinf=0.0, neginf=0.0).abs_()
    found = apart.new_zeros(len(sizes))
    return found.scatter_reduce_(0, torch.repeat_interleave(sizes), apart, "amax")


class Messages:
    """Messages are written, checked and mixed, a chunk at a time.

    A message is the codes, the first one lowest in each byte, zeros up to a multiple of 16 bytes, and the hashes as
    int64; without hashes the codes alone.

    Args:
        settings: of the method.
        layout: of the parameters.
        device: where they are.

    Attributes:
        blocks: of the vector.
        sizes: int64 ``[blocks]``: of each.
        steps: float64 ``[blocks]``: width of a cell, the same on all ranks in a round.
        key: of the random bits of a round, likewise.
    """

    def __init__(self, settings: Moniqua, layout: Layout, device: torch.device) -> None:
        self.blocks = cut(layout)
        self.sizes = torch.tensor([each.stop - each.start for each in self.blocks], dtype=torch.int64, device=device)
        self.steps, self.key = torch.ones(len(self.blocks), dtype=torch.float64, device=device), 0
        self._chunks = list(_chunks(self.blocks, layout.numel))
        self._bits, self._verify, rounding = settings.bits, settings.verify, settings.way
        self._lattice = Lattice(settings.bits, rounding, device)
        self._random = None if rounding == "nearest" else RandomBits(CHUNK, device)
        body = -(-layout.numel * settings.bits // 8)
        self._hashes = aligned(body)
        size = self._hashes + 8 * len(self.blocks) if settings.verify else body
        self._own = torch.zeros(size, dtype=torch.uint8, device=device)

    def apart(self, theirs: Tensor, own: Tensor) -> Tensor:
        """See ``largest``; of whole vectors."""
        return torch.cat([largest(theirs[at], own[at], self.sizes[inside]) for at, inside in self._chunks])

    def write(self, vector: Tensor) -> Tensor:
        """This rank's message; the next one overwrites it."""
        for chunk, inside, blocks, draws in self._all():
            packed = self._codes(self._own, chunk)
            found = self._lattice.encode(vector[chunk], blocks, draws, chunk.start, packed)
            if self._verify:
                self._hashes_of(self._own)[inside] = found
        return self._own

    def wrong(self, vector: Tensor, theirs: dict[int, Tensor]) -> dict[int, Tensor]:
        """By neighbour, uint8 ``[blocks]``: 1 where its hash is not that of what was recovered here."""
        found = {peer: torch.zeros(len(self.blocks), dtype=torch.uint8, device=vector.device) for peer in theirs}
        for chunk, inside, blocks, draws in self._all():
            for peer, message in theirs.items():
                packed = self._codes(message, chunk)
                recovered = self._lattice.hash(vector[chunk], blocks, draws, chunk.start, packed)
                found[peer][inside] = (self._hashes_of(message)[inside] != recovered).to(torch.uint8)
        return found

    def move(
        self,
        vector: Tensor,
        theirs: dict[int, Tensor],
        weights: dict[int, float],
        share: float,
        exact: dict[tuple[int, int], Tensor],
        moved: Tensor | None = None,
    ) -> None:
        """Move the vector towards neighbours, in place.

        Args:
            vector: this rank's.
            theirs: messages, by neighbour.
            weights: of the neighbours.
            share: how far to move by codes; what was sent whole has no noise, and counts in full.
            exact: what was sent whole, by neighbour and block.
            moved: see ``Averaging.average``.
        """
        scales = share * torch.tensor([weights[peer] for peer in theirs], dtype=torch.float64, device=vector.device)
        by_block = scales[:, None].repeat(1, len(self.blocks))
        for row, peer in enumerate(theirs):
            by_block[row, [block for whose, block in exact if whose == peer]] = 0.0
        for chunk, inside, blocks, draws in self._all():
            own, extra = vector[chunk], None
            for block, peer in product(range(inside.start, inside.stop), theirs):
                if (peer, block) in exact:
                    extra = torch.zeros(len(own), dtype=torch.float64, device=own.device) if extra is None else extra
                    place = self.blocks[block]
                    difference = exact[peer, block].double() - vector[place].double()
                    extra[place.start - chunk.start : place.stop - chunk.start] += weights[peer] * difference
            packed = [self._codes(each, chunk) for each in theirs.values()]
            sums = None if moved is None else moved[chunk]
            self._lattice.move(own, blocks, draws, packed, by_block[:, inside], extra, sums)

    def _all(self) -> Iterator[tuple[slice, slice, Blocks, Tensor | None]]:
        """Each chunk, which blocks are its own, these, and its random bits."""
        for chunk, inside in self._chunks:
            count = chunk.stop - chunk.start
            draws = None if self._random is None else self._random.draw(self.key, chunk.start, count)
            yield chunk, inside, Blocks(self.sizes[inside], self.steps[inside]), draws

    def _codes(self, message: Tensor, chunk: slice) -> Tensor:
        return message[chunk.start * self._bits // 8 : -(-chunk.stop * self._bits // 8)]

    def _hashes_of(self, message: Tensor) -> Tensor:
        return message[self._hashes :].view(torch.int64)


def _chunks(blocks: list[slice], numel: int) -> Iterator[tuple[slice, slice]]:
    """Chunks, each with the numbers of its blocks."""
    first = 0
    for chunk in pieces(numel, CHUNK):
        last = first
        while last < len(blocks) and blocks[last].start < chunk.stop:
            last += 1
        yield chunk, slice(first, last)
        first = last
