"""How loops are compiled by numba, once a machine; they take contiguous NumPy arrays and let other threads run."""

from __future__ import annotations

from numba import njit

kernel = njit(nogil=True, cache=True, error_model="numpy")
"""Decorates a loop."""

in_any_order = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "nsz"})
"""Decorates a loop that may add up in any order, and so many numbers at a time."""
