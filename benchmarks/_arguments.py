"""What the command lines share: help, numbers and files that are looked at before anything runs, errors in a line."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def described(text: str | None) -> argparse.ArgumentParser:
    """A command line whose help is a module's docstring, line by line."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def positive(text: str) -> int:
    """A whole number from 1 on; for argparse, as the next ones."""
    return _whole(text, least=1)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, least=0)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def positives(text: str) -> list[int]:
    """Whole numbers from 1 on, by commas."""
    return [positive(each) for each in text.split(",")]


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Names by commas, each of which is known."""

    def read(text: str) -> list[str]:
        if unknown := [each for each in text.split(",") if each not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return text.split(",")

    return read


def file_to_write(text: str) -> Path:
    """A file that can be written: what was measured for an hour must not be lost."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        why = "is a folder" if path.is_dir() else f"cannot be written, look at {folder}"
        raise argparse.ArgumentTypeError(f"{text} {why}; name a file in a folder that is there")
    return path


@contextmanager
def plain_errors() -> Iterator[None]:
    """End the process by a line in place of a traceback, where arguments, files or the machine are not as they must be.

    Decorates a ``main``. The exit status is 1; after Ctrl-C 130.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(1)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} on")
    return value
