"""Kernels of accelerators write the bytes that a CPU writes, and leave and decode the same numbers."""

import pytest
import torch

from lightning_compress.codecs import CODECS
from lightning_compress.codecs.codec import aligned
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Source
from tests.helpers.processor import needs_fused_adds
from tests.triton.cases import METHODS

CPU = torch.device("cpu")
LAYOUTS = {
    "odd": Layout.of([("weight", (53, 81)), ("bias", (37,))]),
    "whole": Layout.of([("weight", (8192,))]),
    "short": Layout.of([("weight", (7,))]),
    "one": Layout.of([("weight", (1,))]),
    "empty": Layout.of([("weight", (0,))]),
}


def _plan(given, layout, device):
    settings = dict(given)
    return CODECS[settings.pop("name")](**settings).plan(layout, device)


def _correlate(given, plans, rank):
    for plan in plans if given.get("correlated") else ():
        plan.correlate(5, rank, 3)


def _numbers(numel, seed):
    """What gradients may be: heavy tails, zeros of both signs, numbers that hardly are, and a large one."""
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3
    numbers[numel // 5 : numel // 4] = -0.0 if seed % 2 else 1e-30
    numbers[numel // 3 : numel // 3 + 600] = 0.0
    numbers[-numel // 4 :] *= torch.logspace(-28, -36, len(numbers[-numel // 4 :]))
    numbers[numel // 2 : numel // 2 + 1] = 1e20
    return numbers


def _rows(count, size, device):
    """Messages inside of a larger buffer, each at a multiple of 16 bytes."""
    return torch.full((count, aligned(size) + 32), 7, dtype=torch.uint8, device=device)[:, 16 : 16 + size]


def _bits(tensor):
    return tensor.cpu().view(torch.uint8)


def _encode(plan, rank, parts, got):
    """What stays; each rank comes by another way of the three, and who sends is not asked what stays."""
    gradient, residual = (part.to(got.device) for part in parts)
    if rank == 1:
        vector = torch.full_like(gradient, torch.nan)
        plan.encode_from(Source(gradient, residual), vector, got[rank], 11 * rank)
        return vector
    vector = gradient + residual
    plan.encode_from(Source(vector), vector if rank != 2 else None, got[rank], 11 * rank)
    return vector


def _cases():
    """Every setting over the layout with a rest; others for a method's first, whole ones for every second of these."""
    first = {method["name"]: method for method in reversed(METHODS)}
    halved = sorted(first)[::2]
    for given in METHODS:
        for name, layout in LAYOUTS.items():
            usual = name == "odd" or (given == first[given["name"]] and (name != "whole" or given["name"] in halved))
            label = "-".join(map(str, (name, *given.values())))
            yield pytest.param(given, layout, id=label, marks=() if usual else pytest.mark.thorough)


@pytest.mark.parametrize(("given", "layout"), list(_cases()))
def test_the_same_bytes_as_on_a_cpu(given, layout, device, by):
    if given == {"name": "none"}:
        needs_fused_adds()
    by("auto")
    slow = _plan(given, layout, CPU)
    by("triton")
    fast = _plan(given, layout, device)
    assert fast.message_size == slow.message_size
    sent, got = (_rows(3, slow.message_size, where) for where in (CPU, device))
    for rank in range(3):
        gradient, residual = _numbers(layout.numel, rank), _numbers(layout.numel, rank + 3)
        expected = gradient + residual
        _correlate(given, (slow, fast), rank)
        slow.encode(expected, sent[rank], 11 * rank)
        stays = _encode(fast, rank, (gradient, residual), got)
        assert _bits(got[rank]).equal(sent[rank])
        assert rank == 2 or stays.cpu().equal(expected)
    for accumulate in (False, True):
        expected = _numbers(layout.numel, 9)
        actual = expected.to(device, copy=True)
        slow.decode(sent, expected, 1 / 3, accumulate)
        fast.decode(got, actual, 1 / 3, accumulate)
        assert actual.cpu().equal(expected)
    fast.decode(got[:0], actual, 1.0, accumulate=False)
    assert not actual.any()


def test_a_sample_of_zeros(device, by):
    vector = torch.zeros(20 * 64)
    vector[64:128] = torch.randn(64, generator=torch.Generator().manual_seed(0))  # the second block is in no sample
    messages = []
    for kernels, where in (("auto", CPU), ("triton", device)):
        by(kernels)
        plan = _plan({"name": "range_float", "block": 64}, Layout.of([("weight", vector.shape)]), where)
        messages.append(torch.empty(plan.message_size, dtype=torch.uint8, device=where))
        plan.encode(vector.to(where, copy=True), messages[-1], 0)
    assert _bits(messages[1]).equal(messages[0])
    assert messages[0][:4].view(torch.int32) > 0


@pytest.mark.parametrize("name", ["qsgd", "onebit", "terngrad"])
def test_one_row_of_any_length_is_decoded(name, device, by):
    by("triton")
    plan = _plan({"name": name}, LAYOUTS["odd"], device)
    before = torch.randn(plan.layout.numel, device=device)
    vector, message = before.clone(), torch.zeros(1, plan.message_size, dtype=torch.uint8, device=device)
    assert message.stride(0) % 4
    plan.encode(vector, message[0], 3)
    decoded = torch.empty_like(vector)
    plan.decode(message, decoded, 1.0, accumulate=False)
    assert (decoded + vector).allclose(before, atol=1e-6)
