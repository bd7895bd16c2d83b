"""Numbers of 16 bits, by kernels: residuals in bfloat16, and what casts seldom meet."""

import math

import pytest
import torch

from lightning_compress.codecs import BF16, FP16
from lightning_compress.codecs.cast import StochasticRounding
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.engine.group import Group
from lightning_compress.settings.run_state import RunState
from tests.triton.test_messages import CPU


def test_rounded_at_random_as_on_a_cpu(device, by):
    values = torch.randn(5003, generator=torch.Generator().manual_seed(0)) ** 5
    values[7:9] = torch.tensor([3.4e38, -3.4e38])
    expected, actual = (torch.empty(5003, dtype=torch.bfloat16, device=where) for where in (CPU, device))
    by("auto")
    StochasticRounding(5003, CPU).round(values, expected, 2**64 - 3)
    by("triton")
    StochasticRounding(5003, device).round(values.to(device), actual, 2**64 - 3)
    assert actual.cpu().view(torch.int16).equal(expected.view(torch.int16))
    assert not expected.equal(values.bfloat16())


@pytest.mark.parametrize("codec", [BF16(), FP16()], ids=repr)
def test_ties_and_numbers_too_large_or_too_small(codec, device, by):
    halfway = torch.arange(1.0, 2.0, 1 / 512).repeat(3) * torch.tensor([1.0, -(2.0**-20), 2.0**-130]).repeat_interleave(
        512
    )
    vector = torch.cat([halfway, torch.tensor([3.4e38, -3.4e38, 65519.0, 65520.0, -7e4, 1e-45, -6e-8])])
    layout, messages = Layout.of([("weight", (len(vector),))]), []
    for choice, where in (("auto", CPU), ("triton", device)):
        by(choice)
        plan, left = codec.plan(layout, where, summands=3), vector.to(where, copy=True)
        message = torch.empty(plan.message_size, dtype=torch.uint8, device=where)
        plan.encode(left, message, 0)
        messages.append(torch.cat([message.cpu(), left.cpu().view(torch.uint8)]))
    assert messages[0].equal(messages[1])


SHAPES = [("weight", (70, 61)), ("bias", (37,)), ("nothing", (0,)), ("other", (16, 128))]
BAD = {"finite": None, "too large": 3.3e38, "infinite": -torch.inf, "none": torch.nan}


def _averaged(collective, device, method, happens, lying):
    """What buckets of two steps become, with their flags, and the messages; the first bucket may be bad."""
    sent, all_reduce = [], collective.all_reduce
    collective.all_reduce = lambda numbers, *more: (sent.append(numbers.clone().cpu()), all_reduce(numbers, *more))
    collective.begin = lambda name, *given: (getattr(collective, name)(*given), lambda: None)[1]
    group = Group(SHAPES, RunState.of(method, "all_reduce"), World(collective, device, Meter(device)))
    found = []
    for step in range(2):
        sizes = [math.prod(shape) for _, shape in SHAPES]
        random = torch.Generator().manual_seed(7 * step + collective.rank)
        bucket = torch.randn(sum(sizes), generator=random) ** 3
        bucket[5:9] = torch.tensor([-0.0, 1e-40, 1.00390625, -1.01171875])  # the last two are halfway
        if step == 0 and collective.rank == 1 and BAD[happens] is not None:
            bucket[4271] = BAD[happens]
        parts = list(bucket.to(device).split(sizes))
        parts = [each.clone() for each in parts] if lying == "apart" else parts
        found += [group.reduce(parts, step, None).cpu(), *(each.cpu() for each in parts)]
    return found, sent


@pytest.mark.parametrize(
    ("method", "happens", "lying"),
    [
        *((method, "finite", "side by side") for method in ("bf16", "fp16")),
        *(("bf16", happens, "side by side") for happens in list(BAD)[1:]),
        ("bf16", "finite", "apart"),
        ("bf16", "none", "apart"),
    ],
)
def test_a_bucket_is_cast_and_averaged_as_on_a_cpu(method, happens, lying, device, by, one_at_a_time):
    found = []
    for choice, where in (("auto", CPU), ("triton", device)):
        by(choice)
        found.append(run_threads(2, lambda ranks, where=where: _averaged(ranks, where, method, happens, lying)))
    whole = BAD[happens] is None or abs(BAD[happens]) < torch.inf
    for (expected, sent), (actual, own) in zip(*found, strict=True):
        for one, other in zip(expected, actual, strict=True):
            assert one.nan_to_num(9.0).view(torch.int32).equal(other.nan_to_num(9.0).view(torch.int32))
        for one, other in list(zip(sent, own, strict=True))[0 if whole else 1 :]:
            assert one.view(torch.uint8).equal(other.view(torch.uint8))
        assert all(flag.isnan() != (whole or step) for step, flag in enumerate(actual[:: 1 + len(SHAPES)]))
