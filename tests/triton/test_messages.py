"""Kernels of accelerators write the bytes that a CPU writes, and leave and decode the same numbers."""

import pytest
import torch

from lightning_compress.codecs import CODECS
from lightning_compress.codecs.base import aligned
from lightning_compress.layout import Layout
from tests.triton.cases import METHODS

CPU = torch.device("cpu")
LAYOUTS = {
    "odd": Layout.of([("weight", (61, 101)), ("bias", (37,))]),
    "whole": Layout.of([("weight", (8192,))]),
    "short": Layout.of([("weight", (7,))]),
    "one": Layout.of([("weight", (1,))]),
    "empty": Layout.of([("weight", (0,))]),
}


def _plan(given, layout, device):
    settings = dict(given)
    return CODECS[settings.pop("name")](**settings).plan(layout, device)


def _numbers(numel, seed):
    """What gradients may be: heavy tails, zeros of both signs, numbers that hardly are, and a large one."""
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3
    numbers[numel // 5 : numel // 4] = -0.0 if seed % 2 else 1e-30
    numbers[numel // 3 : numel // 3 + 600] = 0.0
    numbers[numel // 2 : numel // 2 + 1] = 1e20
    return numbers


def _rows(count, size, device):
    """Messages inside of a larger buffer, each at a multiple of 16 bytes."""
    return torch.full((count, aligned(size) + 32), 7, dtype=torch.uint8, device=device)[:, 16 : 16 + size]


def _bits(tensor):
    return tensor.cpu().view(torch.uint8)


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request):
    return request.param


@pytest.mark.parametrize("given", METHODS, ids=lambda given: "-".join(map(str, given.values())))
@pytest.mark.parametrize("summed", [False, True], ids=["vector", "sum"])
def test_the_same_bytes_as_on_a_cpu(given, layout, summed, device, by):
    by("auto")
    slow = _plan(given, layout, CPU)
    by("triton")
    fast = _plan(given, layout, device)
    assert fast.message_size == slow.message_size
    sent = _rows(3, slow.message_size, CPU)
    got = _rows(3, slow.message_size, device)
    for rank in range(3):
        gradient, residual = _numbers(layout.numel, rank), _numbers(layout.numel, rank + 3) * summed
        expected, actual = gradient + residual, torch.full((layout.numel,), torch.nan, device=device)
        slow.encode(expected, sent[rank], 11 * rank)
        if summed:
            fast.encode_sum(gradient.to(device), residual.to(device), actual, got[rank], 11 * rank)
        else:
            fast.encode(actual.copy_(gradient + residual), got[rank], 11 * rank)
        assert _bits(got[rank]).equal(sent[rank])
        assert actual.cpu().equal(expected)
    for accumulate in (False, True):
        expected = _numbers(layout.numel, 9)
        actual = expected.to(device, copy=True)
        slow.decode(sent, expected, 1 / 3, accumulate)
        fast.decode(got, actual, 1 / 3, accumulate)
        assert actual.cpu().equal(expected)


@pytest.mark.parametrize("given", METHODS, ids=lambda given: "-".join(map(str, given.values())))
def test_sending_writes_the_same_bytes_and_no_message_is_zero(given, device, by):
    layout = LAYOUTS["odd"]
    by("triton")
    plan = _plan(given, layout, device)
    numbers = _numbers(layout.numel, 1).to(device)
    messages = _rows(2, plan.message_size, device)
    plan.encode(numbers.clone(), messages[0], 5)
    plan.send(numbers.clone(), messages[1], 5)
    assert messages[0].equal(messages[1])
    out = torch.ones(layout.numel, device=device)
    plan.decode(messages[:0], out, 1.0, accumulate=False)
    assert not out.any()
