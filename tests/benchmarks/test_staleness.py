"""The benchmark of bounded staleness says who waits, and what is sent."""

from benchmarks import staleness
from lightning_compress.contrib.asynchronous.ssp import SSP


def test_a_slow_rank_is_waited_for_within_the_bound():
    def one_rank(rank, _):
        return 0.03 * rank

    strict, loose = (staleness.train(SSP(bound), 2, 12, 0.02, 0, one_rank) for bound in (0, 4))
    assert strict.lead == 0 < loose.lead <= 4
    assert strict.waited > 0
    assert strict.sent == loose.sent > 4 * 64 * staleness.WIDTH
    coded = staleness.train(SSP(2, "qsgd", min_numel=100), 2, 12, 0.02, 0, lambda *_: 0.0)
    assert coded.sent < strict.sent / 5
    assert coded.loss < 2.4
