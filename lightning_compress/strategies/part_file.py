"""Read one rank's file of a checkpoint: tensors and primitives only."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from fsspec.core import url_to_fs

from lightning_compress.core.foreign import foreign_class


class Files(Protocol):
    """The methods that are used of a Lightning ``CheckpointIO``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Write a checkpoint."""

    def load_checkpoint(self, path: Any, *, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; tensors and primitives only."""


def content_of(files: Files, path: str, save: str) -> Mapping[str, Any]:
    """Return what a file holds.

    Raises:
        ValueError: it is missing, damaged or of another save.
    """
    fs, place = url_to_fs(path)
    if not fs.exists(place):
        raise ValueError(
            f"{path} is missing: the run ended before it was written, or the folder was not copied with the "
            "checkpoint. Copy the folder too"
        )
    try:
        content = _load(files, path)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if foreign := foreign_class(error):
            reason = f"it holds a {foreign}, and only tensors, numbers, texts, lists and mappings are allowed"
        raise ValueError(f"{path} cannot be read: {reason}") from error
    if not isinstance(content, Mapping) or content.get("save") != save:
        raise ValueError(f"{path} is of another save than the checkpoint")
    return content


def _load(files: Files, path: str) -> object:
    """Read tensors and primitives only: no code in a file runs, and nothing unpacks to more than the file's size.

    Files of torch.save are read here, because a user's CheckpointIO, or that of an older Lightning, may not accept
    ``weights_only``. A CheckpointIO with its own format must accept it.
    """
    fs, place = url_to_fs(path)
    with fs.open(place, "rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                records = archive.infolist()
                size = file.seek(0, os.SEEK_END)
                stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
                if not stored or sum(record.file_size for record in records) > size:
                    raise ValueError("it is not a file that torch.save writes")
                file.seek(0)
                content = torch.load(file, map_location="cpu", weights_only=True)
                # earlier versions used another checksum, so check the archive's own
                if isinstance(content, dict) and "state" in content and archive.testzip():
                    raise ValueError("it is damaged: its checksum is wrong")
                return content
    return files.load_checkpoint(path, weights_only=True)
