"""Top-k by kernels of accelerators where its choice is hard: equals, too few or too many candidates, extremes."""

import pytest
import torch

from lightning_compress.codecs import TopK
from lightning_compress.core.layout import Layout

CPU = torch.device("cpu")
LONG = 8300
"""Enough elements for a sample of every third one."""
KEY = 5
LAYOUT = Layout.of([("weight", (LONG,)), ("bias", (5,))])


def _normal():
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(2))


def _ties():
    """More equals than there is room for, among them the k-th largest."""
    return torch.round(_normal()) * torch.where(torch.arange(LAYOUT.numel) % 2 == 0, 1.0, -1.0)


def _misled():
    """Only what the sample sees is large, and fewer than k: the bound is too high."""
    numbers = _normal() * 1e-3
    numbers[KEY % 3 : LONG : 135] = 5.0
    return numbers


def _extremes():
    numbers = torch.full((LAYOUT.numel,), 1e-45)
    numbers[7::900], numbers[8::1700] = -torch.finfo(torch.float32).max, torch.finfo(torch.float32).max
    numbers[100:200] = -0.0
    return numbers


VECTORS = {
    "normal": _normal(),
    "ties": _ties(),
    "constant": torch.full((LAYOUT.numel,), -0.25),
    "zeros": torch.zeros(LAYOUT.numel),
    "few": torch.zeros(LAYOUT.numel).index_fill_(0, torch.tensor([0, 17, 8200]), 3.0),
    "misled": _misled(),
    "extremes": _extremes(),
}


def _both(vector, device, by, key=KEY, repeat=1, **settings):
    """Messages and what stays, by a CPU's and an accelerator's plan."""
    found = []
    for choice, where in (("auto", CPU), ("triton", device)):
        by(choice)
        plan = TopK(**settings).plan(LAYOUT, where)
        for _ in range(repeat):
            rest = vector.to(where, copy=True)
            message = torch.full((plan.message_size,), 7, dtype=torch.uint8, device=where)
            plan.encode(rest, message, key)
        found.append((message.cpu(), rest.cpu()))
    return found


ONE_WAY = {"constant", "zeros", "few", "misled"}
"""Vectors that are hard for a sample; without one, they are thorough."""


@pytest.mark.parametrize(
    ("vector", "selection"),
    [
        pytest.param(vector, selection, id=f"{name}-{selection}", marks=marks)
        for name, vector in VECTORS.items()
        for selection in ("exact", "sampled")
        for marks in [pytest.mark.thorough if selection == "exact" and name in ONE_WAY else ()]
    ],
)
def test_hard_choices_are_those_of_a_cpu(vector, selection, device, by):
    expected, actual = _both(vector, device, by, selection=selection)
    assert actual[0].equal(expected[0])
    assert actual[1].equal(expected[1])


@pytest.mark.parametrize(("density", "repeat"), [(1e-9, 1), (0.3, 2), (1.0, 1)])
def test_any_share_may_be_sent_and_a_plan_leaves_nothing_behind(density, repeat, device, by):
    given = {"density": density, "selection": "sampled"}
    expected, actual = _both(VECTORS["ties"], device, by, key=2**64 - 1, repeat=repeat, **given)
    assert actual[0].equal(expected[0])
    assert actual[1].equal(expected[1])


@pytest.mark.parametrize(("name", "listed"), [("normal", 1), ("ties", 0), ("misled", 0)])
def test_the_vector_stands_in_where_the_list_has_too_few_or_too_many(name, listed, device, by):
    from lightning_compress.codecs.sparse import topk_steps_triton

    by("triton")
    plan = TopK().plan(LAYOUT, device)
    message = torch.zeros(plan.message_size, dtype=torch.uint8, device=device)
    plan.encode(VECTORS[name].to(device, copy=True), message, KEY)
    assert plan.kernel._state[0, topk_steps_triton.LISTED.value] == listed


@pytest.mark.parametrize(
    ("density", "values", "accumulate"), [(1e-3, "fp16", False), (0.3, "fp32", False), (0.05, "fp32", True)]
)
def test_lists_are_added_in_their_order(accumulate, density, values, device, by):
    """Of three ranks, which all send some elements; long lists are searched in steps."""
    found, numbers = [], [VECTORS[name] for name in ("normal", "ties", "extremes")]
    for choice, where in (("auto", CPU), ("triton", device)):
        by(choice)
        plan = TopK(density, values=values).plan(LAYOUT, where)
        messages = torch.zeros(3, plan.message_size + -plan.message_size % 16, dtype=torch.uint8, device=where)
        messages = messages[:, : plan.message_size]
        for message, vector in zip(messages, numbers, strict=True):
            plan.encode(vector.to(where, copy=True), message, KEY)
        out = torch.full((LAYOUT.numel,), 0.1, device=where)
        plan.decode(messages, out, 1 / 3, accumulate)
        found.append(out.cpu())
    assert found[1].equal(found[0])


def test_places_beyond_the_vector_are_left_out(device, by):
    by("triton")
    plan = TopK().plan(LAYOUT, device)
    message = torch.full((1, plan.message_size), 0x7F, dtype=torch.uint8, device=device)
    out = torch.zeros(LAYOUT.numel, device=device)
    plan.decode(message, out, 1.0, accumulate=False)
    assert not out.any()
