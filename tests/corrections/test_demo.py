"""DeMo's momentum (Peng et al., 2024, arXiv:2411.19870) is the residual with a decay."""

import pytest

from tests.corrections.helpers import COMPRESSED, Walker, gradient, named, on_ranks

STEPS, BETA = 50, 0.999


@pytest.mark.parametrize("compressor", [{"name": "topk", "density": 0.02}, {"name": "dct", "theta": 0.95, "bits": 8}])
def test_demo_sends_the_bits_of_a_residual_with_decay(compressor):
    """``m <- beta m + g; q = T(m); m <- m - q``, against ``error_feedback={"decay": beta}``, over 50 steps."""

    def program(collective):
        ours = Walker(collective, compressor, exchange="all_gather", error_feedback={"decay": BETA})
        plain = Walker(collective, compressor, exchange="all_gather", error_feedback=True)
        momentum, same = None, []
        for step in range(STEPS):
            given = gradient(collective.rank, step)
            sent = ours.reduce(given, step)
            ours.commit()
            # DeMo: the momentum is what is encoded, and what was sent leaves it
            momentum = given.clone() if momentum is None else given.add(momentum, alpha=BETA)
            for name in ("bias", "tiny"):  # which are sent as they are
                named(momentum)[name].copy_(named(given)[name])
            theirs = plain.reduce(momentum, step)
            left = _pending(plain)
            plain.roll_back()
            for name in COMPRESSED:
                named(momentum)[name].copy_(left[name])
            same.append(sent.equal(theirs))
        return same

    assert on_ranks(2, program) == [[True] * STEPS] * 2


def _pending(walker):
    state = walker.group.states["residual"]
    return {each.name: state.pending[each.offset : each.end].clone() for each in state.layout.segments}
