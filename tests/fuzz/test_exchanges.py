"""Whatever one rank sends, all ranks end alike: with the same mean, or with an error each."""

import pytest

from tests.fuzz.decoding import randomness
from tests.fuzz.exchanging import WAYS, exchange

SEED = 20
ROUNDS = 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("way", "size"), WAYS)
def test_a_rank_that_sends_garbage(way, size):
    for round in range(ROUNDS):
        exchange(way, size, randomness(SEED, way, size, round))
