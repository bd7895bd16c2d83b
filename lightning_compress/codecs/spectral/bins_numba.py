"""CPU kernels of ``bins.py``, which choose the same coefficients without a sort."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import copy, kernel, spectra
from lightning_compress.kernels.numba.words import ones

_MANY, _STEP = spectra.MANY, 96
"""Energies that are compared at a time, and the first step of the threshold's higher half from where it was guessed."""


@kernel
def _count(energies, least):
    """Return how many energies, int32 or their higher halves, int16, are at least ``least``."""
    found = 0
    for index in range(0, len(energies), _MANY):
        found += spectra.count(energies, index, energies.dtype.type(least))
    return found


@kernel
def _between(low, enough, high, few, keep, tries):
    """Return the next number to try; see ``_threshold``."""
    if tries % 4 == 3:
        return (low + high) // 2
    # as if they were evenly spread between the two
    return low + 1 + int((high - low - 2) * (np.float64(enough - keep + 0.5) / (enough - few)))


@kernel
def _threshold(energies, coarse, bins, keep, guess):
    """Find the largest number that at least ``keep`` energies reach, or one that exactly ``keep`` reach.

    Args:
        energies: int32, a multiple of 64.
        coarse: int16, their higher halves.
        bins: number of energies that are not negative.
        keep: number of energies.
        guess: a number between 0 and 32767, tried first.

    Returns:
        The number, how many energies reach it, and ``guess`` for similar energies.
    """
    low, enough, high, few = 0, bins, 1 << 15, 0  # what is looked for is in [low, high)
    least, step, tries = guess, _STEP, 0
    while high - low > 1 and enough != keep:
        found = _count(coarse, least)
        if found >= keep:
            low, enough = least, found
        else:
            high, few = least, found
        tries += 1
        if high == 1 << 15:
            least = min(low + max(step, (found - keep) * step // keep), high - 1)
            step *= 4
        elif low == 0:
            least = max(high - max(step, (keep - found) * step // keep), 1)
            step *= 4
        else:
            least = _between(low, enough, high, few, keep, tries)
    guess, tries = low, 0
    low, high = low << 16, high << 16
    while high - low > 1 and enough != keep:
        least = _between(low, enough, high, few, keep, tries)
        found = _count(energies, least)
        if found >= keep:
            low, enough = least, found
        else:
            high, few = least, found
        tries += 1
    return low, enough, guess


@kernel
def choose(energies, coarse, bins, keep, guess, words):
    """Mark the largest energies in a bitmap; of equal ones the first.

    Args:
        energies: see ``_threshold``.
        coarse: see ``_threshold``.
        bins: see ``_threshold``.
        keep: number of energies.
        guess: see ``_threshold``.
        words: uint64 ``[len(energies) / 64]``, overwritten.

    Returns:
        ``guess`` for similar energies.
    """
    least, found, guess = _threshold(energies, coarse, bins, keep, guess)
    for word in range(len(words)):
        words[word] = spectra.reaching(energies, word * _MANY, np.int32(least))
    index = len(energies)
    while found > keep:  # the last of those that are equal
        index -= 1
        if energies[index] == least:
            words[index // _MANY] &= ~(np.uint64(1) << np.uint64(index % _MANY))
            found -= 1
    return guess


@kernel
def expand(words, places):
    """Write the positions of the bits that are 1, and return their number.

    Args:
        words: uint32 ``[n]``.
        places: uint32, overwritten; longer than this number by 8.
    """
    count = 0
    for number in range(len(words)):
        word = words[number]
        after, rest = count + ones(word), spectra.write_places(places, count, word, np.int32(32 * number))
        while rest:
            count += 8
            rest = spectra.write_places(places, count, rest, np.int32(32 * number))
        count = after
    return count


@kernel
def read_places(packed, shape, words, places):
    """Read a row's positions; returns False if they are damaged."""
    bins, _, keep, size, listed = shape
    if listed:
        given = packed.view(np.uint16)
        for index in range(keep):
            places[index] = given[index]
            if given[index] >= bins:
                return False
    elif size:
        words[len(words) - 1] = 0
        copy(packed, words.view(np.uint8)[:size])
        if bins % _MANY:
            words[len(words) - 1] &= (np.uint64(1) << np.uint64(bins % _MANY)) - np.uint64(1)
        return expand(words.view(np.uint32), places) == keep
    else:
        for index in range(keep):
            places[index] = index
    return True
