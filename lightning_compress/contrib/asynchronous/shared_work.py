"""Batches that the ranks take from one list, so that a slow rank takes fewer, and no other waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler, Sampler


class Rest(NamedTuple):
    """What is left of an epoch for a rank.

    Args:
        mine: places of the batches that this rank has taken and not trained.
        taken: number of batches that all ranks have taken, equal on all of them.
        done: batches that the training loop has counted in this epoch.
    """

    mine: Sequence[int]
    taken: int
    done: int = 0


class SharedBatches(Sampler[list[int]]):
    """A batch sampler over the whole data set, from which each rank takes the next batch that no other has.

    Every rank gets one batch at least, so that all of them see the end of an epoch. It has no length, because nobody
    knows how many batches a rank will take.

    Args:
        sampler: of the whole data set, in the same order on all ranks; has an ``epoch``.
        batch_size: indices of a batch.
        drop_last: drop a last batch that is not full.
        rank: of this process.
        ranks: that share the batches.
        take: is called before each batch but the first of an epoch; returns how many all ranks have taken so in this
            epoch, this one included.

    Attributes:
        rest: what the next pass begins with; None for a whole epoch.
    """

    rest: Rest | None = None

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        batch_size: int,
        drop_last: bool,
        rank: int,
        ranks: int,
        take: Callable[[int], int],
    ) -> None:
        self.sampler = sampler  # which Lightning tells the epoch
        self.batch_size, self.drop_last = batch_size, drop_last
        self._rank, self._ranks, self._take, self._passes = rank, ranks, take, 0
        self._epoch, self._mine, self._taken, self._done = 0, list[int](), 0, 0

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
        rest, self.rest = self.rest or Rest([self._rank], self._ranks), None
        self._epoch, self._mine, self._taken, self._done = self.sampler.epoch, [], rest.taken, rest.done
        mine = deque(rest.mine)
        while True:
            place = mine.popleft() if mine else rest.taken - 1 + self._take(number)
            self._taken = max(self._taken, place + 1)
            if place >= len(batches):
                return
            self._mine.append(place)
            yield batches[place]

    def state_dict(self, done: int) -> dict[str, Any]:
        """Return what this rank knows of the current pass, as ``load_state_dict`` takes it.

        Args:
            done: batches that the training loop has counted in this epoch; those taken ahead are not among them.
        """
        left = self._mine[done - self._done :]
        return {"epoch": self._epoch, "taken": self._taken, "left": left, "last": self._mine[-1:] or [self._rank]}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        epoch: int,
        done: int,
        ended: bool,
        most: Callable[[Sequence[int]], Sequence[int]],
    ) -> bool:
        """Go on in an epoch in which a rank has left it, and return whether it goes on. Collective.

        Args:
            state: of this rank.
            epoch: that may go on; a rank that was in another one begins it.
            done: see ``state_dict``.
            ended: the training loop has counted all batches of the rank whose progress all have got.
            most: returns the largest of each number over all ranks. Collective.
        """
        here = state["epoch"] == epoch
        taken, left = most([state["taken"], len(state["left"])] if here else [0, 0])
        if left or not ended:  # a rank that has none left gets its last one again, and so sees the end of the epoch
            mine = state["left"] or state["last"] if here else [self._rank]
            self.rest = Rest(mine, max(taken, self._ranks), done)
        return self.rest is not None
