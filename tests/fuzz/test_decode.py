"""Whatever the bytes, decoding stays inside, ends, and refuses with one kind of error."""

import pytest

from tests.fuzz.decoding import LAYOUTS, NAMES, Target, randomness

SEED = 20
ROUNDS = [10, 10, 15, 3]


@pytest.mark.timeout(60)  # a decode that never ends
@pytest.mark.parametrize("name", NAMES)
def test_decoding_survives(name):
    for number, rounds in zip(range(len(LAYOUTS)), ROUNDS, strict=True):
        target = Target(name, number)
        for round in range(rounds):
            target.attempt(randomness(SEED, name, number, round))
