"""Sums along a chain of ranks, in chunks, to the first one, and from there to all.

Of the hierarchical reduction of S-Caffe: Awan, Hamidouche, Hashmi, Panda, "S-Caffe: Co-designing MPI Runtimes and Caffe
for Scalable Deep Learning on Modern GPU Clusters", PPoPP 2017.
"""

from __future__ import annotations

import torch

from lightning_compress.collectives import Collective
from lightning_compress.collectives.counting import all_gather_rounds

CHUNK = 1 << 18
"""Elements that are worth a message of their own: at 10 GB/s they travel for a tenth of a millisecond."""
MOST = 64
"""Chunks at most."""


class Chain:
    """The ranks of a node as a chain, from the last one to the first, the leader.

    While a rank sends one chunk on it gets the next one; no rank gets more than one message at a time. Numbers have no
    checksum: whatever a rank sent, all of the chain get the same in the end, but another node's chain does not.

    Attributes:
        row: float32 ``[numel]``: what is summed, then what is shared.
        rounds: messages that wait for one another.
        bytes_sent: by this rank.
        waited_bytes: by others, while this rank has nothing to send.
    """

    def __init__(self, inside: Collective, numel: int, device: torch.device) -> None:
        self._inside = inside
        size = inside.size
        count = min(MOST, max(1, numel // CHUNK)) if size > 2 else 1  # two ranks have nothing to overlap
        chunk, part = -(-numel // count), -(-numel // size)
        room = torch.zeros(max(count * chunk, size * part), device=device)
        self.row = room[:numel]
        self._chunks, self._parts = room[: count * chunk].view(count, chunk), room[: size * part].view(size, part)
        self._received, self._own = torch.empty(chunk, device=device), torch.empty(part, device=device)
        self._steps = count + size - 2 if size > 1 else 0
        self.rounds = self._steps + 1 + all_gather_rounds(size) if size > 1 else 0
        scattered, gathered = 4 * (size - 1) * part, 4 * (size - 1) * part
        self.bytes_sent = gathered + (4 * count * chunk if inside.rank else scattered)
        self.waited_bytes = 4 * self._steps * chunk + scattered + gathered - self.bytes_sent

    def reduce(self) -> None:
        """Leave the sum over the ranks in the leader's row, added from the last rank on."""
        rank, count = self._inside.rank, len(self._chunks)
        before = self._inside.size - 1 - rank  # ranks that a chunk passes before this one
        for step in range(self._steps):
            sent, due = step - before, step - before + 1
            sends = {rank - 1: self._chunks[sent]} if rank and 0 <= sent < count else {}
            receives = {rank + 1: self._received} if before and 0 <= due < count else {}
            self._inside.swap(sends, receives)
            if receives:
                self._chunks[due].add_(self._received)

    def share(self) -> None:
        """Make the leader's row every rank's: each gets a part of it and shows that to all (van de Geijn)."""
        rank, size = self._inside.rank, self._inside.size
        if size == 1:
            return
        others = {peer: self._parts[peer] for peer in range(1, size)}
        self._own.copy_(self._parts[0])
        self._inside.swap({} if rank else others, {0: self._own} if rank else {})
        self._inside.all_gather(self._own, self._parts)
