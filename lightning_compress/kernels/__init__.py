"""Twins of the hot loops, each a single pass; what they write equals what the codecs' own tensor operations write.

A module's kernels stand beside it: those of ``signs.py`` are ``signs_numba.py``, compiled by numba for a CPU where it
is installed (``pip install lightning_compress[cpu]``), which take contiguous NumPy arrays, and ``signs_triton.py``,
compiled by Triton, which comes with PyTorch on an accelerator, which take tensors.

``LIGHTNING_COMPRESS_KERNELS`` chooses: "auto", "torch" for tensor operations everywhere, or "triton" also on the CPU,
in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
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
from torch import Tensor

Summands = tuple[Tensor, Tensor] | None
"""A gradient and a residual, float32, whose sum a vector is to be first; None where it holds what is meant."""

TILE = 16
"""Neighbours that are handled as one; lengths that are multiples of it are fast."""


LARGEST = 2.0**100
"""The largest magnitude of a gradient, 1.3e30: sums of larger ones with what was kept would overflow some day."""
LARGEST_BITS = 0x71800000
"""The same as the bits of a float32; infinity and NaNs have more."""

VARIABLE = "LIGHTNING_COMPRESS_KERNELS"
CHOICES = ("auto", "torch", "triton")


def sound(largest: int) -> bool:
    """Whether the largest of some magnitudes, as the bits of a float32, is not 0, nor above ``LARGEST``."""
    return 0 < largest <= LARGEST_BITS


_asked = os.environ.get(VARIABLE, "auto")


@contextmanager
def using(choice: str) -> Iterator[None]:
    """Have plans made with kernels of another choice than the environment's; those that are made keep theirs."""
    global _asked
    before, _asked = _asked, choice
    try:
        yield
    finally:
        _asked = before


def compiler(device: torch.device) -> str | None:
    """What compiles the kernels of a device: "numba", "triton", or None, where tensor operations do the work.

    Raises:
        ValueError: the environment asks for something else, or for Triton on a CPU, where only an
            interpreter runs it, or it is not there.
    """
    if _asked not in CHOICES:
        raise ValueError(f"{VARIABLE}={_asked!r} must be one of {', '.join(CHOICES)}; unset it for 'auto'")
    if _asked == "auto":
        wanted = {"cpu": "numba", "cuda": "triton"}.get(device.type)
        return wanted if wanted and _installed(wanted) else None
    if _asked == "torch" or device.type not in ("cpu", "cuda"):
        return None
    if not _installed("triton"):
        raise ValueError(f"{VARIABLE}=triton, but there is no Triton here; pip install triton, or unset {VARIABLE}")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{VARIABLE}=triton on a CPU runs in Triton's interpreter only; set TRITON_INTERPRET=1, or unset {VARIABLE}"
        )
    return "triton"


def backend(module: str, device: torch.device, by: str | None = None) -> ModuleType | None:
    """The kernels beside a module, or None: then tensor operations do the work.

    Args:
        module: its ``__name__``.
        device: where the numbers are.
        by: a compiler, for a module that has kernels of both and treats them differently; None where another one
            compiles those of the device.
    """
    used = compiler(device)
    return _beside(module, used) if used and by in (None, used) else None


@cache
def _installed(name: str) -> bool:
    """Whether a compiler is there, and numba works: it refuses a NumPy that is newer than it knows."""
    if find_spec(name) is None:
        return False
    try:
        if name == "numba":
            import_module(name)
    except ImportError as error:
        warnings.warn(
            f"numba is installed, but cannot be imported ({error}): tensor operations do its work, which takes longer; "
            "install a numba that knows this NumPy (pip install -U numba)",
            stacklevel=2,
        )
        return False
    return True


@cache
def _beside(module: str, compiled_by: str) -> ModuleType | None:
    name = f"{module}_{compiled_by}"
    return import_module(name) if find_spec(name) else None  # a second, which only those pay who need it
