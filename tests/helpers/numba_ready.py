"""Imported by the server of forks: what Numba does once in each process, two thirds of a second, is then done."""

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
