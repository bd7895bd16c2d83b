"""Sections of one message."""

import pytest
import torch

from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges.message import MessagePlan, Section
from tests.cases import unbiased_cases

CPU = torch.device("cpu")
NUMEL = 1 << 14


def left(codec, first, second):
    """What encoding leaves of two sections of one message."""
    layout = Layout.of([("matrix", (NUMEL // 128, 128))])
    plan = MessagePlan([Section(codec, layout, 0), Section(codec, layout, NUMEL)], CPU, Meter(CPU))
    vector = torch.cat([first, second])
    plan.share(5)
    plan.encode(vector, torch.zeros(plan.size, dtype=torch.uint8), 5, torch.tensor(0.0))
    return vector.view(2, NUMEL)


@pytest.mark.parametrize("case", unbiased_cases(), ids=lambda case: case.name)
def test_sections_do_not_share_their_noise(case):
    same = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    assert abs(torch.corrcoef(left(case.codec, same, same))[0, 1]) < 0.1


def test_sections_of_a_random_k_draw_their_own_elements():
    ones = torch.ones(NUMEL)
    first, second = left(RandomK(density=0.1), ones, ones) == 0
    assert 0.05 < (first & second).sum() / first.sum() < 0.15  # as independent draws meet
