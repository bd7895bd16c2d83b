"""Kernels of accelerators send what a CPU sends of a spectrum, within rounding: their transforms are others."""

import pytest
import torch

from lightning_compress.codecs import CODECS
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Source
from tests.triton.cases import TOLERANT

CPU = torch.device("cpu")
NUMELS = {"whole": 1, "odd": 2.3, "short": 0.4, "shorter": 0.2, "shortest": 0.1}


def _plan(given, layout, device):
    settings = dict(given)
    return CODECS[settings.pop("name")](**settings).plan(layout, device)


def _decoded(plan, messages, device, weight=1.0):
    out = torch.full((plan.layout.numel,), torch.nan, device=device)
    plan.decode(messages.to(device), out, weight, accumulate=False)
    return out.cpu()


@pytest.fixture(params=TOLERANT, ids=lambda given: "-".join(map(str, given.values())))
def given(request):
    return request.param


def _cases():
    """Every setting over a rest and a part of a block; a whole block for each transform's first, or thoroughly."""
    first = {each["name"]: each for each in reversed(TOLERANT)}
    for given in TOLERANT:
        for name, share in NUMELS.items():
            usual = name in ("odd", "short") or given == first[given["name"]] or given["block"] == 64
            label = "-".join(map(str, (name, *given.values())))
            yield pytest.param(given, share, id=label, marks=() if usual else pytest.mark.thorough)


@pytest.mark.parametrize(("given", "share"), list(_cases()))
def test_messages_agree_and_either_side_decodes_the_others(given, share, device, by):
    layout = Layout.of([("weight", (int(share * given.get("block", 4096)),))])
    by("auto")
    slow = _plan(given, layout, CPU)
    by("triton")
    fast = _plan(given, layout, device)
    assert fast.message_size == slow.message_size
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1)) ** 3
    residual = gradient.roll(1) * 1e-3
    before = gradient + residual
    bound = 1e-5 * before.norm()
    left, right = before.clone(), torch.full((layout.numel,), torch.nan, device=device)
    sent, got, again = (torch.full((plan.message_size,), 7, dtype=torch.uint8) for plan in (slow, fast, fast))
    got, again = got.to(device), again.to(device)
    slow.encode(left, sent, 0)
    fast.encode_from(Source(gradient.to(device), residual.to(device)), right, got, 0)
    twice = before.to(device, copy=True)
    fast.encode(twice, again, 0)
    assert again.equal(got)
    assert twice.equal(right)
    assert sent[:4].equal(got[:4].cpu())
    assert (right.cpu() - left).norm() <= bound
    expected = _decoded(slow, sent[None], CPU)
    assert (right.cpu() + _decoded(fast, got[None], device) - before).norm() <= bound
    for plan, message, where in ((slow, got.cpu(), CPU), (fast, got, device), (fast, sent, device)):
        assert (_decoded(plan, message[None], where) - expected).norm() <= bound


def test_messages_are_summed_and_added(given, device, by):
    layout = Layout.of([("weight", (given.get("block", 4096),))])
    by("triton")
    plan = _plan(given, layout, device)
    vectors = torch.randn(2, layout.numel, generator=torch.Generator().manual_seed(2)).to(device)
    messages = torch.zeros(2, plan.message_size + (-plan.message_size) % 16, dtype=torch.uint8, device=device)
    messages = messages[:, : plan.message_size]
    for vector, message in zip(vectors.clone(), messages, strict=True):
        plan.encode(vector, message, 0)
    total = sum(_decoded(plan, message[None], device, 0.5) for message in messages)
    out = torch.ones(layout.numel, device=device)
    plan.decode(messages, out, 0.5, accumulate=True)
    assert (out.cpu() - 1 - total).norm() <= 1e-5 * total.norm()
    plan.decode(messages[:0], out, 0.5, accumulate=False)
    assert not out.any()


def test_any_bytes_and_large_numbers_give_finite_ones(given, device, by):
    layout = Layout.of([("weight", (given.get("block", 4096),))])
    by("triton")
    plan = _plan(given, layout, device)
    noise = torch.randint(0, 256, (1, plan.message_size), generator=torch.Generator().manual_seed(3))
    out = torch.zeros(layout.numel, device=device)
    plan.decode(noise.to(torch.uint8).to(device), out, 1.0, accumulate=False)
    vector = torch.full((layout.numel,), 3e38, device=device)
    message = torch.zeros(plan.message_size, dtype=torch.uint8, device=device)
    plan.encode(vector, message, 0)
    assert vector.isfinite().all()
    vector.zero_()
    plan.encode(vector, message, 0)
    assert not vector.any()
    assert not _decoded(plan, message[None], device).any()
