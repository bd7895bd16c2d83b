"""Pictures in folders, one folder per class, as ImageNet usually lies on a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..loading import draw, own_seed
from .data import IGNORE, image_facts
from .pictures import SUFFIXES, as_tensor, centre, check, random_part, read

__all__ = ["ImageFolder", "Pictures", "class_names", "list_pictures"]

MEAN = (0.485, 0.456, 0.406)
"""Of ImageNet's training pixels in [0, 1], by channel."""
STD = (0.229, 0.224, 0.225)


def class_names(folder: Path) -> tuple[str, ...]:
    """Names of the class folders in a part of the data, sorted: a class's label is its place.

    Args:
        folder: such as ``root/train``.

    Raises:
        ValueError: there are not two classes.
    """
    found = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    if len(found) < 2:
        raise ValueError(
            f"data.root={str(folder.parent)!r}: {folder} holds {len(found)} folders, expected one per class, at least "
            f"2 (such as {folder}/cat/1.jpg); set data.root to the folder that holds train/ and val/"
        )
    return tuple(found)


def list_pictures(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    """Paths and labels of the pictures in a part of the data, in the order of their names.

    Args:
        folder: such as ``root/val``.
        classes: names of the classes; a label is a place among them.

    Raises:
        ValueError: a folder is of no known class, holds no picture, or a picture is empty.
    """
    paths, labels = [], []
    for name in class_names(folder):
        if name not in classes:
            raise ValueError(f"data.root: {folder / name} is of no class of the training part; take it away")
        with os.scandir(folder / name) as entries:
            found = sorted(each.path for each in entries if _is_picture(each))
        if not found:
            raise ValueError(f"data.root: {folder / name} holds no picture ({', '.join(SUFFIXES)}); add some")
        paths += [Path(each) for each in found]
        labels += [classes.index(name)] * len(found)
    return paths, labels


def _is_picture(entry: os.DirEntry[str]) -> bool:
    if not entry.name.lower().endswith(SUFFIXES) or entry.name.startswith("."):
        return False
    if entry.stat().st_size == 0:
        raise ValueError(f"data.root: {entry.path} is empty; replace it or take it away")
    return True


class Rows(DistributedSampler[Any]):
    """Numbers of a rank's training pictures, each with the epoch: ``epoch * len(dataset) + row``.

    So loader processes, which do not see the epoch, augment by it.
    """

    def __iter__(self) -> Iterator[int]:
        """Yield as many numbers on every rank."""
        for row in super().__iter__():
            yield self.epoch * len(self.dataset) + row  # type: ignore[arg-type]


class Pictures(Dataset[tuple[Tensor, int]]):
    """(picture, label), decoded and cut where it is asked for: in the loader's processes.

    Args:
        paths: the files.
        labels: a class each.
        size: pixels a side of what a model takes.
        shorter: pixels of the shorter side before the middle is cut out, for evaluation.
        augment: random parts and mirrors instead.
        seed: seed of the augmentation.
        multiple: blank pictures labelled ``IGNORE`` at the end make the length a multiple of it.
    """

    def __init__(
        self,
        paths: list[Path],
        labels: list[int],
        *,
        size: int,
        shorter: int,
        augment: bool = False,
        seed: int = 0,
        multiple: int = 1,
    ) -> None:
        self.paths = paths
        self.labels = labels
        self.size = size
        self.shorter = shorter
        self.augment = augment
        self.seed = seed
        self.blank = -len(paths) % multiple

    def __len__(self) -> int:
        """Count the pictures, blank ones included."""
        return len(self.paths) + self.blank

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """uint8 [3, size, size] and its label, of ``epoch * len(self) + row``."""
        epoch, row = divmod(number, len(self))
        if row >= len(self.paths):
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), IGNORE
        picture = read(self.paths[row])
        if self.augment:
            bits = int(draw(torch.tensor(row), epoch, self.seed))
            return as_tensor(random_part(picture, self.size, bits)), self.labels[row]
        return as_tensor(centre(picture, self.size, self.shorter)), self.labels[row]


class ImageFolder(LightningDataModule):
    """Colour pictures of any size in ``root/train/<class>/`` and ``root/val/<class>/``.

    The model gets (images float32 [N, 3, size, size], labels int64 [N]). Training takes random parts, evaluation the
    middle (He et al. 2015, section 3.4). Augmentation depends on (seed, epoch, picture) alone.

    Args:
        root: holds ``train`` and ``val``, and ``test`` where tests are not to be on ``val``, as ImageNet's are; a
            ``test`` without class folders, which is ImageNet's, is passed over.
        batch_size: pictures per rank and step, at least 1.
        size: pixels a side, at least 8.
        shorter: pixels of the shorter side before the middle is cut out, at least ``size``; None: 256 / 224 of it.
        augment: random parts and mirrors in training; else the middle.
        num_workers: processes that decode, per rank.
        check: look at every file before training, whether it is a whole picture (two minutes for ImageNet).
        seed: seed of order and augmentation.

    Raises:
        ValueError: a value is out of its range, or a folder is not as it should be.
    """

    def __init__(
        self,
        *,
        root: str = "data",
        batch_size: int = 32,
        size: int = 224,
        shorter: int | None = None,
        augment: bool = True,
        num_workers: int = 4,
        check: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size}: must be at least 1")
        if size < 8:
            raise ValueError(f"data.size={size}: must be at least 8 pixels")
        self.shorter = round(size * 256 / 224) if shorter is None else shorter
        if self.shorter < size:
            raise ValueError(f"data.shorter={shorter}: must be at least data.size={size}, or null")
        self.root = Path(root).expanduser()
        self.batch_size = batch_size
        self.size = size
        self.augment = augment
        self.num_workers = num_workers
        self.check = check
        self.seed = seed
        self.classes = class_names(self.root / "train")
        self.parts: dict[str, tuple[list[Path], list[int]]] = {}

    @property
    def dims(self) -> dict[str, int]:
        """What a model must know of the data, as its arguments."""
        return {"in_channels": 3, "num_classes": len(self.classes), "image_size": self.size}

    @property
    def facts(self) -> dict[str, Any]:
        """What prediction must know: see :func:`recipes.resnet.data.image_facts`."""
        return image_facts(self.classes, 255 * torch.tensor(MEAN), 255 * torch.tensor(STD), self.size, self.shorter)

    def setup(self, stage: str) -> None:
        """List the files once; Lightning calls this on every rank before training.

        Raises:
            ValueError: as :func:`list_pictures`, a picture is damaged, or there is no full training batch for every
                rank.
        """
        if self.parts:
            return
        test = "test" if self._has_tests() else "val"
        parts = {name: list_pictures(self.root / name, self.classes) for name in dict.fromkeys(("train", "val", test))}
        count = len(parts["train"][0])
        if count < self.batch_size * self._ranks:
            raise ValueError(
                f"{count} training pictures for {self._ranks} ranks of data.batch_size={self.batch_size}: not one full "
                "step; lower data.batch_size"
            )
        if self.check:
            self._check([path for paths, _ in parts.values() for path in paths])
        self.parts = parts | {"test": parts[test]}

    def _check(self, paths: list[Path]) -> None:
        """Look at this rank's share of the files; all ranks raise what the first of them found."""
        found: list[str | None] = [None] * self._ranks
        rank = self.trainer.global_rank if self.trainer else 0
        try:
            for path in paths[rank :: self._ranks]:
                check(path)
        except ValueError as error:
            found[rank] = str(error)
        if self._ranks > 1:
            dist.all_gather_object(found, found[rank])
        if damage := next(filter(None, found), None):
            raise ValueError(damage)

    def _has_tests(self) -> bool:
        """Whether there are class folders in ``test``: ImageNet's own holds pictures alone, which nobody has named."""
        folder = self.root / "test"
        if not folder.is_dir() or any(each.is_dir() for each in folder.iterdir()):
            return folder.is_dir()
        rank_zero_info(f"{folder} holds no class folders: tests are on {self.root / 'val'}")
        return False

    @property
    def _ranks(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; an incomplete last batch is left out."""
        rank = self.trainer.global_rank if self.trainer else 0
        pictures = self._pictures("train", augment=self.augment, seed=self.seed)
        sampler = Rows(pictures, self._ranks, rank, shuffle=True, seed=own_seed(self.seed), drop_last=True)
        return self._loader(pictures, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """In order; Lightning adds the sampler that shares it among ranks."""
        return self._loader(self._pictures("val", multiple=self._ranks))

    def test_dataloader(self) -> DataLoader[Any]:
        """In order."""
        return self._loader(self._pictures("test", multiple=self._ranks))

    def _pictures(self, part: str, **kwargs: Any) -> Pictures:
        return Pictures(*self.parts[part], size=self.size, shorter=self.shorter, **kwargs)

    def _loader(self, pictures: Pictures, **kwargs: Any) -> DataLoader[Any]:
        return DataLoader(pictures, self.batch_size, num_workers=self.num_workers, **kwargs)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Raw (images, labels) -> (normalised images, labels)."""
        images, labels = batch
        mean, std = (255 * torch.tensor(x, device=images.device)[:, None, None] for x in (MEAN, STD))
        return (images - mean) / std, labels
