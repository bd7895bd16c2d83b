"""Pairs of sentences in memory: what every data set of this recipe shares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..loading import BucketSampler, refuse_overfitting
from .tokenizer import BOS, EOS, PAD, Tokenizer, cached_model

__all__ = ["Batch", "Pair", "Pairs", "TranslationData", "padded"]

PARTS = ("train", "val", "test")


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


class Batch(NamedTuple):
    """Sentences of about one length."""

    rows: Tensor
    """Their numbers in the set, int64 [N]."""
    source: Tensor
    """int64 [N, S]: pieces, the end, padding."""
    target: Tensor
    """int64 [N, T]: the beginning, pieces, the end, padding."""
    references: list[str]
    """The translations as they are written."""


def padded(sentences: list[list[int]]) -> Tensor:
    """Rows of numbers -> int64 [N, longest], filled up with ``PAD``."""
    longest = max(map(len, sentences), default=0)
    return torch.tensor([each + [PAD] * (longest - len(each)) for each in sentences], dtype=torch.int64)


class Pairs(Dataset[Batch]):
    """Whole batches, by lists of row numbers.

    Args:
        pairs: the sentences.
        tokenizer: for both languages.
    """

    def __init__(self, pairs: list[Pair], tokenizer: Tokenizer) -> None:
        self.pairs = pairs
        self.source = [[*pieces, EOS] for pieces in tokenizer.encode([pair.source for pair in pairs])]
        self.target = [[BOS, *pieces, EOS] for pieces in tokenizer.encode([pair.target for pair in pairs])]

    def only(self, rows: Sequence[int]) -> Pairs:
        """Some of them, by their numbers."""
        some = copy(self)
        for name in ("pairs", "source", "target"):
            setattr(some, name, [getattr(self, name)[row] for row in rows])
        return some

    def __len__(self) -> int:
        """Count the pairs."""
        return len(self.pairs)

    @property
    def lengths(self) -> list[int]:
        """Pieces of each pair: of the longer side, with its end."""
        return [max(len(s), len(t) - 1) for s, t in zip(self.source, self.target, strict=True)]

    def __getitem__(self, rows: list[int]) -> Batch:
        """One batch; an empty list gives an empty one."""
        return Batch(
            torch.tensor(rows, dtype=torch.int64),
            padded([self.source[row] for row in rows]),
            padded([self.target[row] for row in rows]),
            [self.pairs[row].target for row in rows],
        )


class TranslationData(LightningDataModule):
    """Loaders of batches with about equally many tokens.

    Args:
        tokens: most that a batch of a rank holds, as sentences times the pieces of the longer side; at least 1.
        vocab_size: pieces of both languages together, learnt from the training part alone.
        train_size: use only the first so many training pairs; None: all.
        max_length: training pairs with more pieces on a side are left out.
        cache: folder for what is made once.
        seed: of the order.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        *,
        tokens: int = 1024,
        vocab_size: int = 10_000,
        train_size: int | None = None,
        max_length: int = 128,
        cache: str = "~/.cache/lightning_compress",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if tokens < 1:
            raise ValueError(f"data.tokens={tokens}: must be at least 1")
        if vocab_size < 8:
            raise ValueError(f"data.vocab_size={vocab_size}: must be at least 8; thousands are usual")
        if train_size is not None and train_size < 1:
            raise ValueError(f"data.train_size={train_size}: must be at least 1, or null for all pairs")
        if not 2 <= max_length <= tokens:
            raise ValueError(f"data.max_length={max_length}: must be from 2 to data.tokens={tokens}")
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.train_size = train_size
        self.max_length = max_length
        self.cache = Path(cache).expanduser()
        self.seed = seed
        self._parts: dict[str, list[Pair]] = {}
        self._tokenizer: Tokenizer | None = None
        self.sets: dict[str, Pairs] = {}

    @abstractmethod
    def load(self) -> dict[str, list[Pair]]:
        """Read ``train``, ``val`` (which may be empty) and ``test``.

        Raises:
            ValueError: the data is missing or damaged; raised on every rank.
        """

    @property
    def parts(self) -> dict[str, list[Pair]]:
        """The sentences, read once."""
        if not self._parts:
            parts = self.load()
            self._parts = parts | {"train": parts["train"][: self.train_size]}
        return self._parts

    @property
    def tokenizer(self) -> Tokenizer:
        """Learnt from the training part, by one process for all."""
        if self._tokenizer is None:
            sentences = [sentence for pair in self.parts["train"] for sentence in pair]
            self._tokenizer = Tokenizer(cached_model(sentences, self.vocab_size, self.cache / "nmt"))
        return self._tokenizer

    @property
    def dims(self) -> dict[str, int]:
        """What a model must know of the data, as its arguments."""
        return {"vocab_size": len(self.tokenizer)}

    @property
    def facts(self) -> dict[str, Any]:
        """What prediction must know: the pieces, as bytes of a sentencepiece model."""
        return {"tokenizer": self.tokenizer.model}

    def setup(self, stage: str) -> None:
        """Encode once; Lightning calls this on every rank.

        Raises:
            ValueError: the data is missing or damaged, there is no full training batch for every rank, or the trainer
                has ``overfit_batches``.
        """
        refuse_overfitting(self.trainer)
        if self.sets:
            return
        sets = {part: Pairs(pairs, self.tokenizer) for part, pairs in self.parts.items()}
        short = np.flatnonzero(np.array(sets["train"].lengths) <= self.max_length)
        sets["train"] = sets["train"].only(short.tolist())
        self.sets = sets
        if not len(self.sampler("train")):
            raise ValueError(
                f"{len(short)} training pairs for {self._ranks} ranks of data.tokens={self.tokens}: not one full step; "
                "lower data.tokens, or raise data.train_size or data.max_length"
            )

    @property
    def _ranks(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def sampler(self, part: str) -> BucketSampler:
        """This rank's batches of a part."""
        lengths = self.sets[part].lengths
        return BucketSampler(
            lengths,
            budget=self.tokens if part == "train" else max([self.tokens, *lengths]),
            shuffle=part == "train",
            seed=self.seed,
            num_replicas=self._ranks,
            rank=self.trainer.global_rank if self.trainer else 0,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; as many batches on every rank."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """By length; no loader where there is no validation set."""
        return self._loader("val") if len(self.sets["val"]) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """By length."""
        return self._loader("test")

    def _loader(self, part: str) -> DataLoader[Any]:
        return DataLoader(self.sets[part], batch_size=None, sampler=self.sampler(part))
