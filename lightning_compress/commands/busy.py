"""Whether what is timed here is timed alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SPARE = 0.5
"""Cores that must be idle, besides those that others use, for a time to be right."""


def load() -> str:
    """Return that other programs use this machine's cores, in words; empty if they do not."""
    cores, waiting = os.cpu_count() or 1, os.getloadavg()[0]
    return f"load {waiting:.3g} on {cores} cores" if waiting > cores - SPARE else ""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread within a block, as most ranks do that share a host."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
