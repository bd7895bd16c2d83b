"""Gradients into a vector, with a residual or without."""

from lightning_compress.kernels.numba.vectors import add, copy

__all__ = ["add", "copy"]
