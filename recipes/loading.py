"""What the data of every recipe shares: random numbers by example, batches by length, files that are made once."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from filelock import FileLock
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

__all__ = ["BucketSampler", "draw", "made_once", "own_seed", "refuse_overfitting", "release"]

Bits = TypeVar("Bits", int, Tensor)


def draw(index: Tensor, epoch: int, seed: int) -> Tensor:
    """Uniform integers in [0, 2^32), one per example, from a hash of seed, epoch and index.

    Args:
        index: numbers of the examples, int64, any shape.
        epoch: epoch, from 0.
        seed: seed of the run.

    Returns:
        int64, the shape of ``index``.
    """
    return _absorb(index, seed, epoch)


def own_seed(seed: int, number: int = 0) -> int:
    """Seed in [0, 2^32) for what counts on from it, as ``DistributedSampler`` does by the epoch.

    Args:
        seed: seed of the run.
        number: such as a rank, where each has its own.
    """
    return _absorb(number, seed, 0)  # what draw() gives, in plain integers: at every step, that is 20 times as fast


def _absorb(last: Bits, *first: int) -> Bits:
    """A hash of them all, and not of their sum, by which seed 1 would have the draws of seed 0, an epoch late."""
    state = 0
    for value in first:
        state = _mix((state + (value & 0xFFFFFFFF)) & 0xFFFFFFFF)
    return _mix((state + (last & 0xFFFFFFFF)) & 0xFFFFFFFF)


def _mix(x: Bits) -> Bits:
    """Mix 32 bits (constants by C. Wellons); products wrap, and the mask keeps the low half."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


WIDTH = 1.08
"""Longest by shortest length of a bucket, whose examples are mixed: padding is 4 % of a batch on average."""


def refuse_overfitting(trainer: Trainer | None) -> None:
    """Stop what would take a :class:`BucketSampler` away.

    Raises:
        ValueError: with ``overfit_batches`` Lightning puts a sampler in its place that gives single rows.
    """
    if share := getattr(trainer, "overfit_batches", 0):
        raise ValueError(
            f"trainer.overfit_batches={share}: batches are made by length here, and this would undo "
            "them; to train on a few of them, trainer.limit_train_batches"
        )


class BucketSampler(DistributedSampler[list[int]]):
    """Yields this rank's batches as lists of row numbers: ``DataLoader(dataset, batch_size=None, sampler=sampler)``.

    Lightning leaves a ``DistributedSampler`` as it is, and tells it the epoch. The batches that the ranks have at the
    same time are neighbours in length, so that no rank waits long for another.

    Training (``shuffle``): lengths are rounded up to buckets, rows are mixed within a bucket, and the rounds of batches
    are shuffled, all anew in each epoch and the same on all ranks. What does not fill a round is left out, drawn at
    random each time. Evaluation: every row once, by length; ranks that run out yield empty lists, so that all ranks
    have equally many batches.

    Args:
        lengths: length of each row, such as tokens or frames, at least 1.
        budget: most that a batch holds, as rows times the longest of them; or
        size: rows of a batch instead.
        shuffle: for training.
        seed: of the order.
        num_replicas: ranks.
        rank: this one's number.

    Raises:
        ValueError: not one of ``budget`` and ``size`` is given, or a row does not fit into ``budget``.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        budget: int | None = None,
        size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(cast("Dataset[Any]", lengths), num_replicas, rank, shuffle=shuffle, seed=seed)
        if (budget is None) == (size is None) or (budget or size or 0) < 1:
            raise ValueError(f"budget={budget}, size={size}: give one of the two, at least 1")
        self.lengths = np.asarray(lengths, np.int64)
        longest = int(self.lengths.max(initial=0))
        if budget is not None and longest > budget:
            raise ValueError(f"a batch of at most {budget} cannot hold row {self.lengths.argmax()} of {longest}")
        self.budget, self.size = budget, size
        self.keys = self._buckets() if shuffle else self.lengths
        rows = self._kept(np.arange(len(lengths)))
        count = len(self._cut(rows[np.argsort(self.keys[rows], kind="stable")]))
        self.num_samples = count // num_replicas if shuffle else math.ceil(count / num_replicas)

    def __len__(self) -> int:
        """Batches of this rank in an epoch, the same in all epochs and on all ranks."""
        return self.num_samples

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches of the epoch that ``set_epoch`` told, until the first is asked for."""
        rng = np.random.default_rng((self.seed, self.epoch))
        order = np.arange(len(self.lengths))
        if self.shuffle:
            order = self._kept(rng.permutation(order))
        batches = self._cut(order[np.argsort(self.keys[order], kind="stable")])
        ranks = self.num_replicas
        if not self.shuffle:
            batches += [[]] * (-len(batches) % ranks)
            yield from batches[self.rank :: ranks]
            return
        left_out = set(rng.permutation(len(batches))[: len(batches) % ranks].tolist())
        batches = [batch for number, batch in enumerate(batches) if number not in left_out]
        yield from (batches[turn * ranks + self.rank] for turn in rng.permutation(len(self)))

    def _buckets(self) -> NDArray[np.int64]:
        """Each row's bucket, as the longest length in it: what a batch is cut by must be the same in every epoch."""
        number = np.ceil(np.log(np.maximum(self.lengths, 1)) / math.log(WIDTH) - 1e-9).astype(np.int64)
        longest = np.zeros(int(number.max(initial=0)) + 1, np.int64)
        np.maximum.at(longest, number, self.lengths)
        return longest[number]

    def _kept(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """With ``size``, training has full batches alone; the order is random, so what is left out is too."""
        return order[: len(order) - len(order) % self.size] if self.shuffle and self.size else order

    def _cut(self, order: NDArray[np.int64]) -> list[list[int]]:
        """Rows in ascending order of their keys -> batches."""
        rows = order.tolist()
        if self.size is not None:
            return [rows[start : start + self.size] for start in range(0, len(rows), self.size)]
        assert self.budget is not None
        batches: list[list[int]] = []
        batch: list[int] = []
        for row, key in zip(rows, self.keys[order].tolist(), strict=True):
            if batch and (len(batch) + 1) * key > self.budget:
                batches.append(batch)
                batch = []
            batch.append(row)
        return [*batches, batch] if batch else batches


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """A file of the cache: the first process that wants it makes it, whole or not at all; the others wait.

    A file that is there is only read, so that a cache may belong to another user.

    Args:
        path: of the file; its folder is made where it is not there.
        make: writes it to the path that it is given.

    Raises:
        ValueError: the folder cannot be written.
    """
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"), tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            if not path.is_file():
                draft = Path(scratch) / path.name
                make(draft)
                os.replace(draft, path)
    except OSError as error:
        raise ValueError(f"data.cache: {path.parent} cannot be written ({error}); set it elsewhere") from None
    return path


def release(library: str) -> str:
    """The installed version of a library; ``unknown`` where there is none.

    Args:
        library: as pip knows it.
    """
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "unknown"
