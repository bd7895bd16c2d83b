"""Twins of the hot loops, each a single pass; what they write equals what the codecs' own tensor operations write.

On the CPU they are compiled by numba, where it is installed (``pip install lightning_compress[cpu]``), and on an
accelerator by Triton, which comes with PyTorch there. ``LIGHTNING_COMPRESS_KERNELS`` chooses: "auto", "torch" for
tensor operations everywhere, or "triton" also on the CPU, in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

Summands = tuple[Tensor, Tensor] | None
"""A gradient and a residual, float32, whose sum a vector is to be first; None where it holds what is meant."""

TILE = 16
"""Neighbours that are handled as one; lengths that are multiples of it are fast."""


INFINITE = 0x7F800000
"""The bits of infinity; NaNs have more, and numbers fewer."""

VARIABLE = "LIGHTNING_COMPRESS_KERNELS"
CHOICES = ("auto", "torch", "triton")


def sound(largest: int) -> bool:
    """Whether the largest of some magnitudes, as the bits of a float32, is that of finite numbers, not all 0."""
    return 0 < largest < INFINITE


def chosen() -> str:
    """What the environment asks for.

    Raises:
        ValueError: it asks for something else.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice!r} must be one of {', '.join(CHOICES)}; unset it for 'auto'")
    return choice


def of(device: torch.device) -> ModuleType | None:
    """The kernels of a CPU, which take NumPy arrays, or None: then ``fused`` or tensor operations do the work."""
    return _cpu() if device.type == "cpu" and chosen() == "auto" else None


def fused(device: torch.device) -> ModuleType | None:
    """The kernels of an accelerator, which take tensors, or None.

    Raises:
        ValueError: they were asked for on a CPU, where only an interpreter runs them, or Triton is not there.
    """
    choice = chosen()
    if choice == "torch" or (choice == "auto" and (device.type != "cuda" or not _has_triton())):
        return None
    if device.type not in ("cpu", "cuda"):
        return None
    if not _has_triton():
        raise ValueError(f"{VARIABLE}=triton, but there is no Triton here; pip install triton, or unset {VARIABLE}")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{VARIABLE}=triton on a CPU runs in Triton's interpreter only; set TRITON_INTERPRET=1, or unset {VARIABLE}"
        )
    from lightning_compress.kernels import triton

    return triton


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _cpu() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    from lightning_compress.kernels import cpu  # a second, which only those pay who need it

    return cpu
