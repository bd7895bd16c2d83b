"""Sounds and their texts in memory: what every data set of this recipe shares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from ..loading import BucketSampler, draw, refuse_overfitting
from .features import Features, Masks, spec_augment
from .text import Alphabet

__all__ = ["Batch", "SpeechData", "Utterance", "Utterances"]

PARTS = ("train", "val", "test")


class Utterance(NamedTuple):
    """Sound, int16 or float32 [samples], and what is said."""

    sound: Tensor
    text: str


class Batch(NamedTuple):
    """Utterances of about one length; without any, where a rank has run out of them."""

    features: Tensor
    """float32 [N, T, size], zeros behind the end of an utterance."""
    lengths: Tensor
    """int64 [N], steps of each."""
    targets: Tensor
    """int64 [N, U], symbols from 1, zeros behind the end of a text."""
    target_lengths: Tensor
    """int64 [N]."""
    rows: Tensor
    """int64 [N], numbers of the utterances in their part."""


class Utterances(Dataset[Batch]):
    """Batches by their row numbers; features are computed when first asked for, then kept.

    Args:
        utterances: what there is.
        features: how sound becomes numbers.
        alphabet: knows every character of the texts.
    """

    def __init__(self, utterances: Sequence[Utterance], features: Features, alphabet: Alphabet) -> None:
        self.utterances, self.features, self.alphabet = utterances, features, alphabet
        self.lengths = [features.steps(len(each.sound)) for each in utterances]
        self._computed: list[tuple[Tensor, Tensor] | None] = [None] * len(utterances)

    def __len__(self) -> int:
        """Count the utterances."""
        return len(self.utterances)

    def example(self, row: int) -> tuple[Tensor, Tensor]:
        """Features float32 [steps, size] and symbols int64 [characters] of one utterance."""
        known = self._computed[row]
        if known is None:
            sound, text = self.utterances[row]
            sound = sound.float() / 32768 if sound.dtype == torch.int16 else sound
            known = self._computed[row] = self.features(sound), self.alphabet.encode(text)
        return known

    def __getitem__(self, rows: list[int]) -> Batch:
        """The batch of these rows."""
        index = torch.tensor(rows, dtype=torch.int64)
        if not rows:
            none = torch.zeros(0, 0, dtype=torch.int64)
            return Batch(torch.zeros(0, 0, self.features.size), index, none, index, index)
        frames, symbols = zip(*map(self.example, rows), strict=True)
        lengths, target_lengths = (torch.tensor([len(each) for each in part]) for part in (frames, symbols))
        return Batch(
            pad_sequence(list(frames), batch_first=True),
            lengths,
            pad_sequence(list(symbols), batch_first=True),
            target_lengths,
            index,
        )

    def too_short(self) -> int:
        """Count the utterances with fewer steps than their text needs: one a symbol, one between equal neighbours."""
        return sum(
            steps < len(text) + sum(one == other for one, other in pairwise(text))
            for steps, (_, text) in zip(self.lengths, self.utterances, strict=True)
        )


def _as_is(batch: Any) -> Any:
    return batch


class SpeechData(LightningDataModule):
    """Loaders of batches of about one length, with parts hidden in training.

    What is hidden depends on (seed, epoch, row number) alone, so any number of ranks sees the same.

    Args:
        batch_size: utterances per rank and step, at least 1.
        rate: samples per second.
        mels: filters per frame.
        frames: frames of 10 ms side by side in one step of the network.
        augment: what SpecAugment hides, as :class:`~recipes.lstm_speech.features.Masks`; None: nothing.
        seed: of the order and of what is hidden.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        *,
        batch_size: int = 16,
        rate: int = 8000,
        mels: int = 40,
        frames: int = 3,
        augment: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size}: must be at least 1")
        self.features = Features(rate, mels, frames)
        self.features.check()
        self.masks = None if augment is None else Masks.of(augment)
        self.batch_size = batch_size
        self.seed = seed
        self.parts: dict[str, Utterances] = {}

    @property
    @abstractmethod
    def alphabet(self) -> Alphabet:
        """The characters of the training part.

        Raises:
            ValueError: they must be read, and the data is missing or damaged; raised on every rank.
        """

    @abstractmethod
    def load(self) -> dict[str, list[Utterance]]:
        """Read ``train``, ``val``, which may be empty, and ``test``.

        Raises:
            ValueError: the data is missing or damaged; raised on every rank.
        """

    @property
    def dims(self) -> dict[str, Any]:
        """What a model must know of the data, as its arguments."""
        return {"features": self.features.size, "alphabet": self.alphabet.characters}

    @property
    def facts(self) -> dict[str, Any]:
        """What prediction needs to know of the data."""
        return dict(self.features._asdict())

    def setup(self, stage: str) -> None:
        """Load once; Lightning calls this on every rank before training.

        Raises:
            ValueError: as ``load``, a text has a character that training has not, there is no full batch for every
                rank, or the trainer has ``overfit_batches``.
        """
        refuse_overfitting(self.trainer)
        if self.parts:
            return
        found = self.load()
        alphabet = self.alphabet
        for part in PARTS:
            for row, (_, text) in enumerate(found[part]):
                if unknown := alphabet.unknown(text):
                    raise ValueError(
                        f"{part} text {row + 1}, {text!r}: {''.join(unknown)!r} is not among the characters of the "
                        f"training part, {alphabet.characters!r}; correct it, or train on it too"
                    )
        parts = {part: Utterances(found[part], self.features, alphabet) for part in PARTS}
        count = len(parts["train"])
        if count < self.batch_size * self._ranks:
            raise ValueError(
                f"{count} training utterances for {self._ranks} ranks of data.batch_size={self.batch_size}: not one "
                "full step; lower data.batch_size, or add utterances"
            )
        for part, utterances in parts.items():
            if short := utterances.too_short():
                rank_zero_warn(
                    f"{short} of {len(utterances)} {part} utterances are shorter than their text, and count as a loss "
                    f"of 0: check the manifest, or lower data.frames={self.features.frames}"
                )
        self.parts = parts

    @property
    def _ranks(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; what fills no round of batches is left out, other utterances in each epoch."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """By length; no loader where there is no validation part."""
        return self._loader("val") if len(self.parts["val"]) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """By length."""
        return self._loader("test")

    def _loader(self, part: str) -> DataLoader[Any]:
        utterances = self.parts[part]
        sampler = BucketSampler(
            utterances.lengths,
            size=self.batch_size,
            shuffle=part == "train",
            seed=self.seed,
            num_replicas=self._ranks,
            rank=self.trainer.global_rank if self.trainer else 0,
        )
        return DataLoader(utterances, batch_size=None, sampler=sampler, collate_fn=_as_is)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Hide parts of what is heard, in training."""
        if self.masks is None or self.trainer is None or not self.trainer.training:
            return batch
        bits = draw(batch.rows, self.trainer.current_epoch, self.seed)
        return batch._replace(
            features=spec_augment(batch.features, batch.lengths, bits, self.features.mels, self.masks)
        )
