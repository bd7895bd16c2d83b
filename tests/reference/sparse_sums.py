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


class OkTopk:
    """Ok-Topk over ranks that are numbers in a loop, for one parameter: its threshold, clock and regions."""

    def __init__(self, evaluate_every, rebalance_every):
        self.every, self.rebalance = evaluate_every, rebalance_every
        self.threshold, self.clock, self.loads = np.float32(0), 0, None

    def step(self, parts, numel):
        """What is applied, and what each rank takes back."""
        if self.clock % self.rebalance == 0:
            self.loads = self.count(parts, numel)
        total = {}
        for part in parts:
            total = add(total, part)
        k = max(len(part) for part in parts)
        if self.threshold == 0 or self.clock % self.every == 0:
            sizes = sorted((abs(value) for value in total.values()), reverse=True)
            used = sizes[k - 1] if 0 < k < len(sizes) else np.float32(0)
            self.threshold = used
            kept = {place: value for place, value in total.items() if abs(value) >= used}
        else:
            used = self.threshold
            kept = {place: value for place, value in total.items() if abs(value) >= used}
            if len(kept) > 4 * k / 3:
                self.threshold = sorted((abs(value) for value in kept.values()), reverse=True)[k - 1]
            elif len(kept) < 2 * k / 3:
                self.threshold = np.float32(float(used) / 1.008)
        self.clock += 1
        gone = kept.keys() if used > 0 else total.keys()
        return kept, [{place: value for place, value in part.items() if place not in gone} for part in parts]

    def count(self, parts, numel):
        """How many elements the ranks selected in each of 64 parts."""
        bins = min(64, numel)
        edges = [numel * each // bins for each in range(bins + 1)]
        return edges, [sum(edges[b] <= place < edges[b + 1] for part in parts for place in part) for b in range(bins)]

    def bounds(self, ranks):
        """Where regions end: as many elements in each, if they are spread evenly within each of the 64."""
        edges, counts = self.loads
        reached, bounds = 0, []
        for b, count in enumerate(counts):
            while len(bounds) < ranks - 1 and count and reached + count >= sum(counts) * (len(bounds) + 1) / ranks:
                share = (sum(counts) * (len(bounds) + 1) / ranks - reached) / count
                bounds.append(int(np.floor(edges[b] + share * (edges[b + 1] - edges[b]))))
            reached += count
        return [0, *bounds, edges[-1]]
