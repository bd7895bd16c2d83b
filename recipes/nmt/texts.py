"""Translations in files: Multi30k as it is published, and anybody's own two texts."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from .data import PARTS, Pair, TranslationData

__all__ = ["Multi30k", "Parallel", "read_lines", "read_pairs"]

FILES = {"train": ("train",), "val": ("val",), "test": ("test_2016_flickr", "test2016")}
"""Multi30k's names of the parts: task 1, and the test set of 2016, which goes by two."""
FOLDER = "multi30k"


def read_lines(path: Path, setting: str) -> list[str]:
    """Sentences of a text file, one a line, UTF-8; ``.gz`` is unpacked.

    Args:
        path: the file.
        setting: what names it, for messages.

    Raises:
        ValueError: the file is missing, damaged, empty, or has an empty line.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = raw.decode("utf-8-sig").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise ValueError(f"{setting}: there is no {path}; set data.root to its folder, or name the file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}: {path} cannot be read as UTF-8 text: {error}; fetch it anew") from None
    lines = [line.strip() for line in lines]
    if "" in lines:
        raise ValueError(f"{setting}: line {lines.index('') + 1} of {path} is empty; each line must hold a sentence")
    return lines


def read_pairs(source: Path, target: Path, settings: tuple[str, str]) -> list[Pair]:
    """Two files with a sentence and its translation in the same lines.

    Args:
        source: file of the language to translate from.
        target: file of the other.
        settings: what names each, for messages.

    Raises:
        ValueError: a file is missing or damaged, or they differ in length.
    """
    sides = [read_lines(path, setting) for path, setting in zip((source, target), settings, strict=True)]
    counts = [len(side) for side in sides]
    if counts[0] != counts[1]:
        raise ValueError(
            f"{settings[0]}: {source} has {counts[0]:,} lines, {target} has {counts[1]:,}; line by line they must be "
            "translations of each other"
        )
    return list(map(Pair, *sides))


class Multi30k(TranslationData):
    """Captions of 31,000 pictures (Elliott et al. 2016, arXiv:1605.00459): 29,000, 1,014 and 1,000 pairs.

    Args:
        root: folder that holds ``train.en.gz``, ``train.de.gz``, ``val.*`` and ``test_2016_flickr.*`` (or
            ``test2016.*``), as published under https://github.com/multi30k/dataset/tree/master/data/task1/raw, or has
            them in ``multi30k/``; unpacked ones will do.
        source: language to translate from: ``en``, ``de``, or another that is there.
        target: language to translate to.
        **kwargs: see :class:`~recipes.nmt.data.TranslationData`.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(self, *, root: str = "data", source: str = "en", target: str = "de", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if source == target:
            raise ValueError(f"data.source={source}, data.target={target}: must be two languages, such as en and de")
        self.root = Path(root)
        self.languages = source, target

    def load(self) -> dict[str, list[Pair]]:
        """See ``TranslationData.load``."""
        files = {part: [self._file(names, each) for each in self.languages] for part, names in FILES.items()}
        setting = f"data.root={str(self.root)!r}"
        return {part: read_pairs(source, target, (setting, setting)) for part, (source, target) in files.items()}

    def _file(self, names: Sequence[str], language: str) -> Path:
        for folder, name, packed in product((self.root, self.root / FOLDER), names, (".gz", "")):
            if (path := folder / f"{name}.{language}{packed}").is_file():
                return path
        raise ValueError(
            f"data.root={str(self.root)!r}: there is no {names[0]}.{language}.gz; set data.root to the folder that "
            "holds the files of https://github.com/multi30k/dataset, data/task1/raw, and data.source and data.target "
            "to what it has"
        )


class Parallel(TranslationData):
    """Text files of one's own: for each part, two with a sentence and its translation in the same lines.

    Args:
        train: the two files of the training part, from and to; ``.gz`` is unpacked.
        val: of the validation part; None: no validation.
        test: of the test part.
        **kwargs: see :class:`~recipes.nmt.data.TranslationData`.

    Raises:
        ValueError: a part does not have two files.
    """

    def __init__(
        self, *, train: list[str] | None, test: list[str] | None, val: list[str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.files = dict(zip(PARTS, (train, val, test), strict=True))
        for part, files in self.files.items():
            if files is None and part == "val":
                continue
            if not files or len(files) != 2:
                raise ValueError(f"data.{part}={files}: must be two files, as in 'data.{part}=[{part}.en,{part}.de]'")

    def load(self) -> dict[str, list[Pair]]:
        """See ``TranslationData.load``."""
        return {
            part: read_pairs(Path(files[0]), Path(files[1]), (f"data.{part}[0]", f"data.{part}[1]")) if files else []
            for part, files in self.files.items()
        }
