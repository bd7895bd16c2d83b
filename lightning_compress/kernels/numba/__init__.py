"""Compilation of loops by numba. They take contiguous NumPy arrays and release the GIL."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit

Function = Callable[..., Any]


def kernel(function: Function, **settings: Any) -> Function:
    """Compile a loop. The compiled code is cached on disk."""
    try:
        return njit(function, nogil=True, cache=True, error_model="numpy", **settings)  # type: ignore[no-any-return]
    except RuntimeError:  # no writable folder for the cache, as in containers
        _warn()
        return njit(function, nogil=True, error_model="numpy", **settings)  # type: ignore[no-any-return]


def in_any_order(function: Function) -> Function:
    """Compile a loop whose sums may be reordered, so that they are vectorised."""
    return kernel(function, fastmath={"reassoc", "nsz"})


@kernel
def copy(values: Any, out: Any) -> None:
    """Copy an array to the beginning of another.

    ``out[:] = values`` would do so, too; but each kernel with such a line compiles a check of shapes and its message,
    which takes seconds.
    """
    for index in range(len(values)):
        out[index] = values[index]


@cache
def _warn() -> None:
    warnings.warn(
        "numba finds no writable folder for its cache, so every process compiles again, which takes seconds; "
        "set NUMBA_CACHE_DIR to a writable folder",
        stacklevel=4,
    )
