"""Small images in memory: what every data set of this recipe shares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..loading import draw, own_seed

__all__ = ["IGNORE", "ImageData", "Images", "Split", "crop_and_flip", "image_facts"]


def crop_and_flip(images: Tensor, bits: Tensor, padding: int = 4) -> Tensor:
    """Pad with zeros, cut a window of the old size, mirror half of the images (He et al. 2015, section 4.2).

    Args:
        images: [N, C, H, W], any dtype.
        bits: non-negative integers [N] that decide, as from :func:`recipes.loading.draw`.
        padding: pixels on each side, at least 0; there are ``(2 padding + 1)^2`` windows.

    Returns:
        [N, C, H, W], a new tensor of the same dtype.
    """
    count, channels, height, width = images.shape
    places = 2 * padding + 1
    top, left, flip = bits % places, bits // places % places, bits // places**2 % 2
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(count, -1)
    columns = left[:, None] + torch.where(flip[:, None] == 1, width - 1 - columns, columns)
    return F.pad(images, (padding,) * 4)[
        torch.arange(count, device=images.device)[:, None, None, None],
        torch.arange(channels, device=images.device)[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


IGNORE = -1
"""Label of the blank images that make the ranks' shares of an evaluation equal; metrics leave them out."""


class Split(NamedTuple):
    """Images uint8 [N, C, H, W] and their labels int64 [N]."""

    images: Tensor
    labels: Tensor

    def rows(self, start: int, stop: int | None = None) -> Split:
        """Rows ``start`` to ``stop``, without a copy."""
        return Split(self.images[start:stop], self.labels[start:stop])

    def pad(self, multiple: int) -> Split:
        """Blank images labelled ``IGNORE`` at the end, up to a multiple, so that a sampler repeats no real one."""
        extra = -len(self.labels) % multiple
        if not extra:
            return self
        blank = self.images.new_zeros(extra, *self.images.shape[1:])
        return Split(torch.cat([self.images, blank]), F.pad(self.labels, (0, extra), value=IGNORE))


class Images(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """(image, label, row number), or a whole batch of each at once.

    Args:
        split: the images and labels.
    """

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        """Count the images."""
        return len(self.split.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 [C, H, W], int64 [], int64 []."""
        return self.split.images[row], self.split.labels[row], torch.tensor(row)

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 [N, C, H, W], int64 [N], int64 [N]: one gather in place of N small ones."""
        index = torch.tensor(rows)
        return self.split.images[index], self.split.labels[index], index


def _as_is(batch: Any) -> Any:
    return batch


def image_facts(
    classes: Sequence[str], mean: Tensor, std: Tensor, size: int, shorter: int, white: float = 255.0
) -> dict[str, Any]:
    """What prediction must know of images, in plain Python.

    Args:
        classes: names, in the order of the labels.
        mean: of the pixels per channel, [C].
        std: their deviation, [C].
        size: height and width that the model takes.
        shorter: pixels of the shorter side before ``size`` of them are cut out of the middle.
        white: the largest value of a pixel.
    """
    plain = {"mean": mean.tolist(), "std": std.tolist()}
    return {"classes": list(classes), "size": size, "shorter": shorter, "white": white} | plain


class ImageData(LightningDataModule):
    """Loaders of raw images; augmentation and normalisation follow on the device, a batch at a time.

    The model gets (images float32 [N, C, H, W], labels int64 [N]). Augmentation depends on (seed, epoch, row number)
    alone, so any number of ranks and workers sees the same images.

    Args:
        batch_size: images per rank and step, at least 1.
        train_size: use only the first so many training images; None: all.
        augment: random crops and flips in training.
        num_workers: loader processes; 0 is best for images in memory.
        seed: seed of order and augmentation.

    Raises:
        ValueError: a value is out of its range.
    """

    in_channels: int
    image_size: int
    """Height and width."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of their labels."""
    white: float = 255.0
    """The largest value of a pixel."""

    def __init__(
        self,
        *,
        batch_size: int = 128,
        train_size: int | None = None,
        augment: bool = True,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size}: must be at least 1")
        if train_size is not None and train_size < 1:
            raise ValueError(f"data.train_size={train_size}: must be at least 1, or null for all images")
        self.batch_size = batch_size
        self.train_size = train_size
        self.augment = augment
        self.num_workers = num_workers
        self.seed = seed
        self.splits: dict[str, Split] = {}
        self.mean = self.std = torch.ones(1)

    @property
    def num_classes(self) -> int:
        """Count the classes."""
        return len(self.classes)

    @property
    def dims(self) -> dict[str, int]:
        """What a model must know of the data, as its arguments."""
        return {"in_channels": self.in_channels, "num_classes": self.num_classes, "image_size": self.image_size}

    @property
    def facts(self) -> dict[str, Any]:
        """What prediction must know, once :meth:`setup` has run: see :func:`image_facts`."""
        return image_facts(self.classes, self.mean, self.std, self.image_size, self.image_size, self.white)

    @abstractmethod
    def load(self) -> tuple[Split, Split, Split, Tensor, Tensor]:
        """Read train, val, test, and the training pixels' mean and standard deviation per channel, [C] each.

        Raises:
            ValueError: the data is missing or damaged; raised on every rank.
        """

    def setup(self, stage: str) -> None:
        """Load once; Lightning calls this on every rank before training.

        Raises:
            ValueError: as ``load``, or there is no full training batch for every rank.
        """
        if self.splits:
            return
        train, val, test, self.mean, self.std = self.load()
        train = train.rows(0, self.train_size)
        if len(train.labels) < self.batch_size * self._ranks:
            raise ValueError(
                f"{len(train.labels)} training images for {self._ranks} ranks of data.batch_size={self.batch_size}: "
                "not one full step; lower data.batch_size or raise data.train_size"
            )
        self.splits = {"train": train, "val": val, "test": test}

    @property
    def _ranks(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled, anew in each epoch; an incomplete last batch is left out."""
        split = self.splits["train"]
        rank = self.trainer.global_rank if self.trainer else 0
        seed = own_seed(self.seed)
        sampler: DistributedSampler[Any] = DistributedSampler(
            Images(split), self._ranks, rank, seed=seed, drop_last=True
        )
        return self._loader(split, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """In order; no loader where there is no validation set."""
        return self._loader(self.splits["val"].pad(self._ranks)) if len(self.splits["val"].labels) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """In order."""
        return self._loader(self.splits["test"].pad(self._ranks))

    def _loader(self, split: Split, **kwargs: Any) -> DataLoader[Any]:
        return DataLoader(Images(split), self.batch_size, num_workers=self.num_workers, collate_fn=_as_is, **kwargs)

    def on_after_batch_transfer(
        self, batch: tuple[Tensor, Tensor, Tensor], dataloader_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Raw (images, labels, rows) -> (augmented and normalised images, labels)."""
        images, labels, rows = batch
        if self.augment and self.trainer is not None and self.trainer.training:
            images = crop_and_flip(images, draw(rows, self.trainer.current_epoch, self.seed))
        mean, std = (x.to(images.device)[:, None, None] for x in (self.mean, self.std))
        return (images - mean) / std, labels
