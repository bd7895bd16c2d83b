"""Slow references for sums of sparse vectors over ranks: dictionaries from places to float32 numbers."""

import numpy as np


def add(one, other):
    """The sum of two, at the places of either."""
    total = dict(one)
    for place, value in other.items():
        total[place] = np.float32(total[place] + value) if place in total else value
    return total


def butterfly(parts, degrees, numel):
    """Kylix: layer after layer every rank adds up the stretch that is its own; then all of them side by side."""
    held, stretches, stride = list(parts), [(0, numel)] * len(parts), 1
    for degree in degrees:
        sums, cut = [], []
        for rank in range(len(parts)):
            digit = rank // stride % degree
            start, stop = stretches[rank]
            first, last = (start + (stop - start) * each // degree for each in (digit, digit + 1))
            total = {}
            for place in range(degree):
                theirs = held[rank + (place - digit) * stride]
                total = add(total, {where: value for where, value in theirs.items() if first <= where < last})
            sums.append(total)
            cut.append((first, last))
        held, stretches, stride = sums, cut, stride * degree
    assert sorted(stretches)[0][0] == 0
    return {place: value for each in held for place, value in each.items()}


def largest(numbers, count):
    """The places of the largest; of equal ones the first."""
    return set(sorted(numbers, key=lambda place: (-abs(numbers[place]), place))[:count])


def gtopk(parts):
    """gTop-k's tree: what rank 0 has in the end, and what each rank dropped while it merged."""
    held, dropped, distance = list(parts), [{} for _ in parts], 1
    while distance < len(parts):
        for rank in range(0, len(parts) - distance, 2 * distance):
            one, other = held[rank], held[rank + distance]
            total = add(one, other)
            kept = largest(total, max(len(one), len(other)))
            held[rank] = {place: total[place] for place in kept}
            dropped[rank] = add(dropped[rank], {place: total[place] for place in total.keys() - kept})
        distance *= 2
    return held[0], dropped
