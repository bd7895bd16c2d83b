"""Shards that are handled together are handled as they are one by one."""

import pytest
import torch

from lightning_compress import kernels
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.group import Group
from lightning_compress.exchanges import two_shot
from lightning_compress.settings.run_state import RunState

CPU = torch.device("cpu")
PARAMETERS = [("first", (96, 61)), ("bias", (37,)), ("second", (131, 83)), ("scale", (61,)), ("third", (300, 70))]
"""No section is a multiple of any block, and one parameter is an embedding with rows that nobody uses."""
METHODS = ["qsgd", "rotated", "onebit", "efsign", "bf16", {"name": "qsgd", "bits": 8}, {"name": "qsgd", "norm": "l2"}]
METHODS += [{"name": "onebit", "block": 800}]


def trained(collective, settings, spoilt):
    """Means and states of three steps."""
    group = Group(PARAMETERS, settings, World(collective, CPU, Meter(CPU)))
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + collective.rank)
        parts = [torch.randn(shape, generator=generator) for _, shape in PARAMETERS]
        parts[2][torch.arange(131) % 3 == 1] = 0.0
        if spoilt and step == collective.rank == 1:
            parts[4][299, 69] = torch.inf
        rejected = group.reduce(parts, step, None).isnan()
        found += [*parts, rejected]
        for state in group.states.values():
            state.commit(rejected, group.names)
    return found + [state.committed for state in group.states.values()]


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("feedback", [{}, {"error_feedback": "loco"}, {"error_feedback": True}])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_alike(ranks, method, feedback, spoilt, monkeypatch):
    settings = RunState.of(method, "two_shot", **feedback).bound({"second": "embedding"})
    planned, plan = [], two_shot._Together.of
    monkeypatch.setattr(two_shot._Together, "of", lambda *given: planned.append(plan(*given)) or planned[-1])
    together = run_threads(ranks, lambda collective: trained(collective, settings, spoilt))
    assert all(planned)
    if kernels.compiler(CPU) == "numba" and method in METHODS[:4]:
        shards = [(each._to_owners, each._sums) for each in planned]
        assert all(len(each.together) + len(each.alone) <= 4 for pair in shards for each in pair)
    monkeypatch.setattr(two_shot._Together, "of", lambda *_: None)
    for one, other in zip(together, run_threads(ranks, lambda ranks: trained(ranks, settings, spoilt)), strict=True):
        assert all(left.nan_to_num(9.0).equal(right.nan_to_num(9.0)) for left, right in zip(one, other, strict=True))
