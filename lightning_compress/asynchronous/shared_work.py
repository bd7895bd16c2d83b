"""Batches that the ranks take from one list, so that a slow rank takes fewer, and no other waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, Sampler


class SharedBatches(Sampler[list[int]]):
    """A batch sampler over the whole data set, from which each rank takes the next batch that no other has.

    Every rank gets one batch at least, so that all of them see the end of an epoch. It has no length, because nobody
    knows how many batches a rank will take.

    Args:
        sampler: of the whole data set, in the same order on all ranks.
        batch_size: indices of a batch.
        drop_last: drop a last batch that is not full.
        rank: of this process.
        ranks: that share the batches.
        take: is called before each batch but the first of an epoch; returns how many all ranks have taken so in this
            epoch, this one included.
    """

    def __init__(
        self, sampler: Sampler[Any], batch_size: int, drop_last: bool, rank: int, ranks: int, take: Callable[[int], int]
    ) -> None:
        self.sampler = sampler  # which Lightning tells the epoch
        self.batch_size, self.drop_last = batch_size, drop_last
        self._rank, self._ranks, self._take, self._passes = rank, ranks, take, 0

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over lists of indices.

        Raises:
            ValueError: there are fewer batches than ranks.
        """
        self._passes += 1
        return self._batches(self._passes)

    def _batches(self, number: int) -> Iterator[list[int]]:
        batches = list(BatchSampler(self.sampler, self.batch_size, self.drop_last))
        if len(batches) < self._ranks:
            raise ValueError(
                f"the training data has {len(batches)} batches of {self.batch_size}, fewer than the {self._ranks} "
                "ranks that share them; use smaller batches, fewer ranks or share_work=False"
            )
        place = self._rank
        while place < len(batches):
            yield batches[place]
            place = self._ranks - 1 + self._take(number)
