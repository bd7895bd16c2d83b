"""Gradients are finite, and their sum over the ranks is not."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.codecs import Dense
from lightning_compress.collectives import Collective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather
from lightning_compress.exchanges.composite import plan_with_states
from lightning_compress.exchanges.message import Section
from lightning_compress.reducers import REDUCERS
from tests.reducers.helpers import CPU


@pytest.mark.parametrize("largest", ["weight", "bias"])
@pytest.mark.parametrize("name", REDUCERS.complete())
def test_a_mean_that_is_not_finite_is_flagged_on_all_ranks(name: str, largest: str) -> None:
    layout, bias = Layout.of([("weight", (64, 48))]), Layout.of([("bias", (48,))])
    sections = [Section(REDUCERS[name](), layout, 0), Section(Dense(), bias, layout.numel)]
    numel = layout.numel + bias.numel

    def program(collective: Collective) -> tuple[float, torch.Tensor]:
        plan, _ = plan_with_states(sections, AllGather(), layout, World(collective, CPU, Meter(CPU)))
        vector, out, flag = torch.ones(numel), torch.empty(numel), torch.tensor(0.0)
        vector[: layout.numel] *= 3e38 if largest == "weight" else 1.0
        vector[layout.numel :] *= 3e38 if largest == "bias" else 1.0
        plan.mean(vector, out, 5, flag)
        return float(flag), out

    ranks = run_threads(4, program)
    flags = [flag for flag, _ in ranks]
    assert all(flag != flag for flag in flags) or (flags == [0.0] * 4 and largest == "weight")
    assert all(out.isfinite().all() and out.equal(ranks[0][1]) for _, out in ranks)
