"""Steady state allocates nothing of the vector's size, by torch's account and by NumPy's."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.collectives import LocalCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.reducers.signsgd import SignSGD
from lightning_compress.contrib.reducers.terngrad_shared import TernGradShared
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.reducers import Reducer
from tests.helpers.memory import check_steady
from tests.reducers.helpers import CPU

LAYOUT = Layout.of([("a", (1 << 10, 1 << 10)), ("b", ((1 << 20) + 1234,))])


@pytest.mark.parametrize("reducer", [TernGradShared(), SignSGD(), SignSGD("tally", 0.0)], ids=repr)
def test_no_large_allocations(reducer: Reducer) -> None:
    states = {name: State(each.layout, CPU) for name, each in reducer.state(LAYOUT).items()}
    plan = reducer.plan(LAYOUT, 1, World(LocalCollective(), CPU, Meter(CPU)), states)
    vector, out, carried = torch.randn(LAYOUT.numel), torch.zeros(LAYOUT.numel), torch.zeros(1)

    def step() -> None:
        plan.mean(vector, out, carried, 1)

    check_steady(step)
