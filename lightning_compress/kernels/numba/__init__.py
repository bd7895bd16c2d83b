"""How loops are compiled by numba, once a machine; they take contiguous NumPy arrays and let other threads run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit

Function = Callable[..., Any]


def kernel(function: Function, **settings: Any) -> Function:
    """Compile a loop."""
    try:
        return njit(function, nogil=True, cache=True, error_model="numpy", **settings)  # type: ignore[no-any-return]
    except RuntimeError:  # a package that cannot be written to, and no home, as in containers
        _warn()
        return njit(function, nogil=True, error_model="numpy", **settings)  # type: ignore[no-any-return]


def in_any_order(function: Function) -> Function:
    """Compile a loop that may add up in any order, and so many numbers at a time."""
    return kernel(function, fastmath={"reassoc", "nsz"})


@cache
def _warn() -> None:
    warnings.warn(
        "numba finds no folder to keep compiled code in, and compiles it again in every process, which takes seconds; "
        "set NUMBA_CACHE_DIR to a folder that can be written to",
        stacklevel=4,
    )
