"""Files that are made once and kept, such as a corpus or a vocabulary."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from filelock import FileLock

__all__ = ["made_once", "release"]


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
