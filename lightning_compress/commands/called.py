"""Call what a command line names."""

from __future__ import annotations

import os
import sys
from importlib import import_module


def called(given: str, failed: str, fix: str) -> object:
    """Return what a class or a function gives without arguments; the working directory is searched first.

    Args:
        given: ``module:name``; the module also as a path of a file, such as ``src/train.py``.
        failed: begins the message of an error.
        fix: ends it.

    Raises:
        ValueError: there is none, or it cannot be called so.
    """
    path, _, name = given.partition(":")
    if path.endswith(".py"):
        path = os.path.relpath(path).removesuffix(".py").replace(os.sep, ".")
    sys.path.insert(0, os.getcwd())
    try:
        result: object = getattr(import_module(path), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"{failed} ({type(error).__name__}: {error}); {fix}") from error
    return result
