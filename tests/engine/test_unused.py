"""What no rank has a gradient for does not move, whatever stands beside it, and loses nothing."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.codecs import Codec
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.corrections import DGC, OneBitAdam
from lightning_compress.engine.group import Group
from lightning_compress.exchanges import TwoShot
from lightning_compress.settings.run_state import RunState
from tests.cases import CASES
from tests.turns import by_turns

CPU = torch.device("cpu")
PARAMETERS = [("body", (37, 61)), ("bias", (37,)), ("unused", (29, 43)), ("words", (61, 33)), ("last", (23, 47))]
"""No size is a multiple of any block."""
ROWS = torch.arange(61) % 7 != 3
"""Those of the embedding that no rank uses."""
KINDS = {"words": "embedding"}

METHODS = {case.name: case.codec for case in CASES} | {
    "dgc": DGC(density=0.05),
    "onebit_adam": OneBitAdam(),
}


def gradients(rank, step, unused=True):
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = [torch.randn(shape, generator=generator) for _, shape in PARAMETERS]
    if unused:
        made[2].zero_()
    made[3][ROWS] = 0.0
    return made


def steps(collective, settings, count, find_unused, make=gradients):
    """Groups of some steps: what each made of the gradients, and the group."""
    meter = Meter(CPU)
    bound = settings.bound(KINDS)
    group = Group(PARAMETERS, bound, World(collective, CPU, meter), find_unused)
    found = []
    for step in range(count):
        parts = make(collective.rank, step)
        rejected = group.reduce(parts, step, None).isnan()
        found.append([each.clone() for each in parts])
        for state in group.states.values():
            state.commit(rejected, group.names)
    return found, group


def residual_of(group, name):
    segment = next(each for each in group.layout.segments if each.name == name)
    return group.residual.committed[segment.offset : segment.end].clone()


def settings_of(method, exchange="auto", **more):
    given = {"name": "auto", "fallback": "never", "link": {"latency_s": 1e-4, "bytes_per_s": 1e7}}
    dense = 1 if isinstance(method, OneBitAdam) else None
    return RunState.of(method, given if exchange == "auto" else exchange, min_numel=1, warmup_steps=dense, **more)


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize(("name", "size"), by_turns(METHODS, take=1))
def test_what_no_rank_uses_does_not_move(name, size, find_unused):
    settings = settings_of(METHODS[name])
    for found, group in run_threads(size, lambda collective: steps(collective, settings, 4, find_unused)):
        assert not any(parts[2].any() for parts in found)
        assert not any(parts[3][ROWS].any() for parts in found)
        assert all(parts[4].any() for parts in found)
        if group.residual:
            assert not residual_of(group, "unused").any()


@pytest.mark.parametrize("size", [2, 4])
def test_adagrad_does_not_move_it(size):
    settings = settings_of("onebit", TwoShot(adagrad=1e-8))
    for found, group in run_threads(size, lambda collective: steps(collective, settings, 4, False)):
        assert not any(parts[2].any() or parts[3][ROWS].any() for parts in found)
        for state in group.states.values():
            assert not state.committed[slice(*unused_range(group))].any()


def unused_range(group):
    segment = next(each for each in group.layout.segments if each.name == "unused")
    return segment.offset, segment.end


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_who_says_so_keeps_zeros(case):
    if not isinstance(case.codec, Codec) or not case.codec.keeps_zeros:
        pytest.skip("zeros are looked for")
    layout = Layout.of(PARAMETERS)
    plan = case.codec.plan(layout, CPU)
    for seed in range(4):
        vector = torch.cat([each.flatten() for each in gradients(0, seed)])
        zeros, message = vector == 0, torch.zeros(plan.message_size, dtype=torch.uint8)
        plan.share(seed)
        plan.encode(vector, message, seed)
        out = torch.empty_like(vector)
        plan.decode(message[None, : plan.used], out, 0.5, accumulate=False)
        assert not vector[zeros].any()
        assert not out[zeros].any()


def alternating(rank, step):
    """The parameter is used in the first steps only."""
    return gradients(rank, step, unused=step >= 2)


@pytest.mark.parametrize(
    ("name", "size"), by_turns([name for name in METHODS if name not in ("none", "bf16", "fp16")], take=1)
)
def test_an_unused_parameter_keeps_its_state(name, size):
    """DistributedDataParallel throws its mean away, and what was sent of the residual would be lost with it."""
    settings = settings_of(METHODS[name])

    def program(collective):
        _, before = steps(collective, settings, 2, True, alternating)
        found, after = steps(collective, settings, 5, True, alternating)
        return found, before, after

    for found, before, after in run_threads(size, program):
        assert not any(parts[2].any() for parts in found[2:])
        for kind, state in before.states.items():
            for segment in state.layout.segments:
                if segment.name == "unused":
                    place = slice(segment.offset, segment.end)
                    assert torch.equal(state.committed[place], after.states[kind].committed[place]), kind


def partly(rank, step):
    """Only rank 1 has a gradient for the parameter, which others own and merge."""
    made = gradients(rank, step, unused=False)
    if rank != 1:
        made[2].zero_()
    return made


@pytest.mark.parametrize("exchange", ["auto", "two_shot", "binomial"])
@pytest.mark.parametrize(("name", "size"), by_turns(["onebit", "efsign", "fft", "topk"], take=1))
def test_a_gradient_that_one_rank_has_arrives(name, size, exchange):
    """Residuals of sums are fed back by whoever holds them, with a gradient of its own or without."""
    settings = settings_of({"name": "topk", "density": 0.1} if name == "topk" else name, exchange)

    def program(collective):
        found, group = steps(collective, settings, 24, True, partly)
        return [parts[2] for parts in found], residual_of(group, "unused")

    ranks = run_threads(size, program)
    applied = size * sum(each.double() for each in ranks[0][0]).flatten()
    given = sum(partly(1, step)[2].double() for step in range(24)).flatten()
    kept = sum(residual.double() for _, residual in ranks)
    assert float((applied + kept - given).norm() / given.norm()) < 1e-4
    late = sum(each.double() for each in ranks[0][0][12:]).flatten()
    assert float(kept.norm() / given.norm()) < 1.5  # bounded, where it grew with every step
    assert late.norm() > 0


LEFT, RIGHT, BOTH = ("left",), ("right",), ("left", "right")
LATER = {
    "later": [(LEFT, True), (RIGHT, True)],
    "back": [(LEFT, True), (RIGHT, True), (LEFT, True)],
    "quiet": [(LEFT, True), (LEFT, False), (RIGHT, True)],
    "quiet first": [(LEFT, False), (RIGHT, True), (RIGHT, True)],
    "some": [(BOTH, True), (None, True), (RIGHT, True)],  # None: a head on rank 0, the other elsewhere
}
"""Heads that the passes of a step use, and whether DistributedDataParallel averages in them."""


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(32, 33, bias=False), nn.Linear(32, 33, bias=False)

    def forward(self, x, heads):
        return sum(getattr(self, head)(x).square().mean() for head in heads)


def _owed(given, passes, view):
    """How far what was applied and what is kept are from the gradients, over all of them, after each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True, gradient_as_bucket_view=view)
    compression = attach(model, given.pop("compressor"), min_numel=1, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    gradients, applied = ([torch.zeros(33, 32, dtype=torch.float64) for _ in names] for _ in range(2))
    errors = []
    for _ in range(3):
        for heads, synced in passes:
            heads = heads or (LEFT if dist.get_rank() == 0 else RIGHT)
            x = torch.randn(8, 32, generator=generator)
            own = torch.autograd.grad(model.module(x, heads), parameters, materialize_grads=True)
            for total, each in zip(gradients, own, strict=True):
                total += each
            with nullcontext() if synced else model.no_sync():
                model(x, heads).backward()
        for total, each in zip(applied, parameters, strict=True):
            total += each.grad
        optimizer.step()
        optimizer.zero_grad()
        for place, name in enumerate(names):
            kept = next(residual_of(group, name) for group in compression.groups if name in group.names)
            missing = (gradients[place] - kept.view(33, 32)).contiguous()  # of this rank
            dist.all_reduce(missing)
            errors.append(float((missing - dist.get_world_size() * applied[place]).norm() / missing.norm()))
    compression.close()
    return max(errors)


def _owed_by_all(given, first):
    return {name: _owed(dict(given), LATER[name], bool((first + turn) % 2)) for turn, name in enumerate(LATER)}


@pytest.mark.parametrize(
    ("size", "given"),
    [
        (2, {"compressor": "topk"}),
        (2, {"compressor": "onebit", "exchange": "two_shot"}),
        (3, {"compressor": "topk", "exchange": "two_shot"}),
        (3, {"compressor": "onebit", "exchange": "all_gather"}),
        (3, {"compressor": "powersgd"}),
    ],
    ids=str,
)
def test_a_later_pass_may_leave_a_parameter_out(pools, size, given):
    """Its ``grad`` still holds the mean of the pass before, which is not sent, nor kept, a second time."""
    for errors in pools[size].run(_owed_by_all, given, size):
        assert not {name: error for name, error in errors.items() if error > 1e-5}
