"""Random numbers that depend on the example alone, not on the worker, the rank or the order."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

__all__ = ["draw", "own_seed"]

Bits = TypeVar("Bits", int, Tensor)


def draw(index: Tensor, epoch: int, seed: int) -> Tensor:
    """Uniform integers in [0, 2^32), one per example, from a hash of seed, epoch and index.

    Args:
        index: numbers of the examples, int64, any shape.
        epoch: epoch, from 0.
        seed: seed of the run.

    Returns:
        int64, the shape of ``index``.
    """
    return _absorb(index, seed, epoch)


def own_seed(seed: int, number: int = 0) -> int:
    """Seed in [0, 2^32) for what counts on from it, as ``DistributedSampler`` does by the epoch.

    Args:
        seed: seed of the run.
        number: such as a rank, where each has its own.
    """
    return _absorb(number, seed, 0)  # what draw() gives, in plain integers: at every step, that is 20 times as fast


def _absorb(last: Bits, *first: int) -> Bits:
    """A hash of them all, and not of their sum, by which seed 1 would have the draws of seed 0, an epoch late."""
    state = 0
    for value in first:
        state = _mix((state + (value & 0xFFFFFFFF)) & 0xFFFFFFFF)
    return _mix((state + (last & 0xFFFFFFFF)) & 0xFFFFFFFF)


def _mix(x: Bits) -> Bits:
    """Mix 32 bits (constants by C. Wellons); products wrap, and the mask keeps the low half."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)
