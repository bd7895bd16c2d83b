"""Compiled kernels that replace tensor operations by a single pass, and write the same bits.

A module's kernels are in files beside it. For ``signs.py``:

* ``signs_numba.py`` is compiled by numba for a CPU, if numba is installed (``pip install lightning_compress[cpu]``).
  Its functions take contiguous NumPy arrays.
* ``signs_triton.py`` is compiled by Triton for a GPU. Triton comes with PyTorch. Its functions take tensors.

The environment variable ``LIGHTNING_COMPRESS_KERNELS`` selects them: "auto" (the default), "torch" for tensor
operations everywhere, or "triton" for Triton on the CPU too, in its interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

TILE = 16
"""Elements that CPU kernels handle together. Lengths that are multiples of it are fast."""

LARGEST = 2.0**100
"""Largest magnitude of a gradient, 1.3e30. Adding larger ones to a residual could overflow after some steps."""

VARIABLE = "LIGHTNING_COMPRESS_KERNELS"
CHOICES = ("auto", "torch", "triton")


_asked = os.environ.get(VARIABLE, "auto")


@contextmanager
def using(choice: str) -> Iterator[None]:
    """Override the environment's choice within a block. Existing plans keep their kernels."""
    global _asked
    before, _asked = _asked, choice
    try:
        yield
    finally:
        _asked = before


def compiler(device: torch.device) -> str | None:
    """Return what compiles the kernels of a device: "numba", "triton", or None for tensor operations.

    Raises:
        ValueError: the environment variable has another value, or it is "triton" and Triton is not installed, or runs
            on a CPU without its interpreter.
    """
    if _asked not in CHOICES:
        raise ValueError(f"{VARIABLE}={_asked!r} must be one of {', '.join(CHOICES)}; unset it for 'auto'")
    if _asked == "auto":
        wanted = {"cpu": "numba", "cuda": "triton"}.get(device.type)
        return wanted if wanted and _installed(wanted) else None
    if _asked == "torch" or device.type not in ("cpu", "cuda"):
        return None
    if not _installed("triton"):
        raise ValueError(f"{VARIABLE}=triton, but Triton is not installed; pip install triton, or unset {VARIABLE}")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{VARIABLE}=triton needs Triton's interpreter on a CPU; set TRITON_INTERPRET=1, or unset {VARIABLE}"
        )
    return "triton"


def backend(module: str, device: torch.device, by: str | None = None) -> ModuleType | None:
    """Return the kernels of a module for a device, or None for tensor operations.

    Args:
        module: the module's ``__name__``.
        device: device of the tensors.
        by: return kernels of this compiler only. For a module whose numba and Triton kernels differ in signature.
    """
    used = compiler(device)
    return _beside(module, used) if used and by in (None, used) else None


@cache
def _installed(name: str) -> bool:
    """Return True if a compiler is installed. Numba must also import: it refuses a NumPy newer than it supports."""
    if find_spec(name) is None:
        return False
    try:
        if name == "numba":
            import_module(name)
    except ImportError as error:
        warnings.warn(
            f"numba cannot be imported ({error}), so slower tensor operations are used; install a numba that supports "
            "this NumPy (pip install -U numba)",
            stacklevel=2,
        )
        return False
    return True


@cache
def _beside(module: str, compiled_by: str) -> ModuleType | None:
    name = f"{module}_{compiled_by}"
    return import_module(name) if find_spec(name) else None  # imported when needed: it takes a second
