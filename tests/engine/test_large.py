"""Gradients near the end of what float32 holds."""

import pytest
import torch
from torch import nn

from lightning_compress.codecs import Codec
from lightning_compress.collectives import run_threads
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.settings.run_state import RunState
from tests.cases import CASES
from tests.turns import by_turns

SHAPE = (61, 67)


def train(ranks, case, gradients, **settings):
    """What each step gives, on one rank, and the compression at the end."""
    model = nn.Linear(*SHAPE[::-1], bias=False)
    exchange = "all_gather" if isinstance(case.codec, Codec) else "auto"
    chosen = RunState.of(case.codec, exchange, min_numel=1, check_drift_every=0, **settings)
    compression, optimizer = Compression(trained(model), chosen, ranks), torch.optim.SGD(model.parameters(), 0.0)
    means = []
    for each in gradients:
        model.weight.grad = each.clone()
        compression.reduce(("weight",), [model.weight.grad])
        means.append(model.weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    return means, compression


def noise(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


FED_BACK = [case for case in CASES if case.codec.conserves]


@pytest.mark.parametrize(("case", "size"), by_turns(FED_BACK, (2, 3), 1))
def test_what_would_overflow_is_not_kept(case, size):
    """The largest numbers of float32, twice, among ordinary gradients: as if these two steps had not been."""

    def rank(ranks):
        usual = [noise(10 * step + ranks.rank) for step in range(3)]
        large = torch.full(SHAPE, 3e38 if ranks.rank == 1 else 1.0)
        means, compression = train(ranks, case, [usual[0], large, large, *usual[1:]], error_feedback=True)
        return means, compression.stats(), [group.residual.committed for group in compression.groups]

    for means, stats, residuals in run_threads(size, rank):
        assert [bool(each.isfinite().all()) for each in means] == [True, False, False, True, True]
        assert stats["nonfinite_steps"] == 2
        assert 0 <= stats["residual_norm"] < 1e4
        assert all(bool(each.isfinite().all()) for each in residuals)


@pytest.mark.parametrize(("case", "size"), by_turns(FED_BACK, (2, 3), 1))
def test_large_numbers_are_kept(case, size):
    def rank(ranks):
        means, compression = train(
            ranks, case, [1e29 * noise(10 * step + ranks.rank) for step in range(3)], error_feedback=True
        )
        return means, compression.stats()

    for means, stats in run_threads(size, rank):
        assert all(bool(each.isfinite().all()) for each in means)
        assert stats["residual_norm"] < float("inf")
        assert stats["nonfinite_steps"] == 0
