"""CIFAR-10 (Krizhevsky 2009) from the authors' binary files."""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from .data import ImageData, Split

__all__ = ["Cifar10", "read_batches"]

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILES = ("test_batch.bin",)
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image: its label, then its red, green and blue plane."""
RECORDS = 10_000
"""Images per file."""
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""As in the authors' batches.meta.txt."""


def read_batches(folder: Path, names: tuple[str, ...]) -> Split:
    """Read binary batches.

    Args:
        folder: holds the files.
        names: file names, in order.

    Returns:
        Images uint8 [10,000 per file, 3, 32, 32] and labels int64.

    Raises:
        ValueError: a file is missing, has another length than 10,000 records, or a label above 9.
    """
    _check(folder, names)
    return read_records([folder / name for name in names])


def read_records(paths: Sequence[Path]) -> Split:
    """Read files of whole records, however many.

    Args:
        paths: the files, in order, in one folder.

    Returns:
        Images uint8 [n, 3, 32, 32] and labels int64.

    Raises:
        ValueError: there is a label above 9.
    """
    parts = [np.fromfile(path, np.uint8).reshape(-1, RECORD) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if (most := part[:, 0].max()) > 9:
            raise ValueError(f"data.root: {path} holds a label of {most}, expected 0 to 9; fetch it anew")
    records = np.concatenate(parts)
    labels = records[:, 0]
    images = torch.from_numpy(np.ascontiguousarray(records[:, 1:])).view(-1, 3, 32, 32)
    return Split(images, torch.from_numpy(labels.astype(np.int64)))


def _check(folder: Path, names: tuple[str, ...]) -> None:
    fix = (
        f"set data.root to the folder that holds {FOLDER}/ (the binary version of {URL}), "
        "or data.download=true to fetch it there"
    )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"data.root={str(folder.parent)!r}: no {', '.join(missing)} in {folder}; {fix}")
    for name in names:
        size = (folder / name).stat().st_size
        if size != RECORDS * RECORD:
            raise ValueError(
                f"data.root={str(folder.parent)!r}: {folder / name} has {size:,} bytes, expected "
                f"{RECORDS * RECORD:,}: truncated or not the binary version; delete it, then {fix}"
            )


def fetch(root: Path, url: str = URL, md5: str = MD5) -> None:
    """Download the archive, check its sum, unpack it into ``root``, file by file, each whole or not at all.

    Raises:
        ValueError: the page does not answer, the archive's checksum is wrong, or ``root`` cannot be written.
    """
    rank_zero_info(f"fetching {url} (162 MB) into {root}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            archive, unpacked = Path(scratch) / "archive.tar.gz", Path(scratch) / FOLDER
            _download(url, archive, md5)
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            (root / FOLDER).mkdir(exist_ok=True)
            for file in sorted(unpacked.iterdir()):
                os.replace(file, root / FOLDER / file.name)
    except OSError as error:
        raise ValueError(f"data.root={str(root)!r}: cannot be written ({error}); set it elsewhere") from None


def _download(url: str, archive: Path, md5: str) -> None:
    try:
        urllib.request.urlretrieve(url, archive)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"data.download=true: {url} cannot be fetched ({getattr(error, 'reason', error)}); try again, or fetch and "
            "unpack it elsewhere, and set data.root to the folder it is in"
        ) from None
    found = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(f"{url}: md5 {found}, expected {md5}: a broken or changed download; try again")


class Cifar10(ImageData):
    """50,000 training and 10,000 test images of 32x32 colour pixels in ten classes.

    Args:
        root: folder that holds ``cifar-10-batches-bin/``.
        download: fetch the files from the authors' page when one is not there; one process per node does it.
        val_size: validation images, the last of the training ones, 0 to 49,999 (He et al. 2015: 5,000).
        **kwargs: see :class:`ImageData`.

    Raises:
        ValueError: a value is out of its range.
    """

    in_channels = 3
    image_size = 32
    classes = CLASSES

    def __init__(self, *, root: str = "data", download: bool = False, val_size: int = 5000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 <= val_size < 50_000:
            raise ValueError(f"data.val_size={val_size}: must be from 0 to 49,999")
        self.root = Path(root)
        self.download = download
        self.val_size = val_size

    def prepare_data(self) -> None:
        """Download where that was asked for and is due; files that are there are left alone."""
        if self.download and not all((self.root / FOLDER / name).is_file() for name in TRAIN_FILES + TEST_FILES):
            fetch(self.root)

    def load(self) -> tuple[Split, Split, Split, Tensor, Tensor]:
        """See ``ImageData.load``."""
        train = read_batches(self.root / FOLDER, TRAIN_FILES)
        test = read_batches(self.root / FOLDER, TEST_FILES)
        cut = len(train.labels) - self.val_size
        return train.rows(0, cut), train.rows(cut), test, 255 * torch.tensor(MEAN), 255 * torch.tensor(STD)
