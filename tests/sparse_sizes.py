"""Formulas of the table of cases for sparse messages and such that vary in length."""

import math
from itertools import pairwise

from lightning_compress.codecs import QSGD
from lightning_compress.layout import Layout


def omega_bits(number: float) -> float:
    """At least the length of the omega code of a number: straight lines between some that have the greatest."""
    corners = [(1, 1), (2, 3), (4, 6), (16, 11), (2**16, 28), (2**32, 44)]
    for (low, few), (high, many) in pairwise(corners):
        if number <= high:
            return few + (number - low) * (many - few) / (high - low)
    raise AssertionError(number)


def qsgd_elias(codec: QSGD, layout: Layout) -> int:
    """Norms and lengths, and codes with the L2 norm: what is expected in the worst case, and four deviations."""
    assert codec.norm == "l2"
    n, s = min(codec.bucket, 8 * -(-layout.numel // 8)), 2 ** (codec.bits - 1) - 1
    buckets = -(-layout.numel // n)
    most = min(n, s * math.sqrt(n))
    counts = [most * i / 256 for i in range(1, 257)]
    expected = max(c * (1 + omega_bits(n / c) + omega_bits(s * math.sqrt(n) / c)) for c in counts)
    levels = {1: 1, 3: 3, 7: 6, 15: 7, 31: 11, 63: 12, 127: 13}
    bits = min(layout.numel * (2 + levels[s]), expected * (buckets + 4 * math.sqrt(buckets / most)))
    return 6 * buckets + math.ceil(math.ceil(bits) / 8)
