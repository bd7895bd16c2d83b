"""World sizes by turns: every method runs, and every size, but not every method at every size in each run."""

import pytest


def by_turns(names, sizes=(2, 3, 4, 8), take=2, label=lambda each: getattr(each, "name", each)):
    """Pairs of a name and a size: ``take`` sizes of each name in turn, the others with the thorough tests."""
    pairs = []
    for number, name in enumerate(names):
        first = number % (len(sizes) // take)
        taken = sizes[first :: len(sizes) // take]
        for size in sizes:
            marks = () if size in taken else pytest.mark.thorough
            pairs.append(pytest.param(name, size, id=f"{label(name)}-{size}", marks=marks))
    return pairs
