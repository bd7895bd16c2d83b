"""Benchmarks of codecs: what feedback costs, and what rounding by shared random bits leaves."""

import pytest

from benchmarks import _feedback, correlated
from lightning_compress.codecs import QSGD
from lightning_compress.exchanges import AllGather
from lightning_compress.planning.choose import Auto


def test_both_kinds_of_feedback_are_timed():
    found = _feedback.measure(["onebit", "topk", "rotated"], 5000, 2)
    assert all(times["residual"] > 0 < times["loco"] for times in found.values())
    assert _feedback.table(found, 5000).row_count == 3
    assert "bf16" not in _feedback.ENCODED


@pytest.mark.parametrize(("ranks", "way"), [(2, "all_gather"), (4, "two_shot")])
def test_the_exchange_is_the_one_that_auto_takes(ranks, way):
    auto = Auto("never", link=correlated.LINK)
    own, description = correlated.variance(QSGD(2), auto, ranks, 0.5, 1)
    gathered, _ = correlated.variance(QSGD(2), AllGather(), ranks, 0.5, 1)
    assert description == way
    assert own == pytest.approx(gathered, rel=0.1) if ranks == 2 else own > gathered
