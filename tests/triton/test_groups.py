"""A group with the kernels of an accelerator does what one on a CPU does, and adds up while it encodes."""

import threading

import pytest
import torch

from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.group import Group
from lightning_compress.settings.run_state import RunState
from tests.helpers.processor import needs_fused_adds

CPU = torch.device("cpu")
PARAMETERS = [("weight", (20, 61)), ("bias", (37,)), ("nothing", (0,)), ("other", (13, 83))]


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch):
    """Triton's interpreter is for one thread."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import GridExecutor

    call, lock = GridExecutor.__call__, threading.Lock()

    def locked(*arguments, **options):
        with lock:
            return call(*arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


def gradients(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for _, shape in PARAMETERS]


def plain(rank, step, parts):
    """Gradients as they come."""


def without(rank, step, parts):
    """One rank has no gradient for a parameter."""
    if rank == step:
        parts[3].zero_()


def spoilt(rank, step, parts):
    """One number on one rank is none."""
    if (rank, step) == (1, 1):
        parts[0][7, 7] = torch.nan


def program(collective, device, settings, happens, twice, unused):
    """What three steps make of gradients, and what is kept then."""
    meter = Meter(device)
    meter.sample_every = 0
    group = Group(PARAMETERS, settings, World(collective, device, meter), unused)
    found = []
    for step in range(3):
        for turn in range(1 + twice):
            parts = [each.to(device) for each in gradients(collective.rank, step + 10 * turn)]
            happens(collective.rank, step, parts)
            rejected = group.reduce(parts, step, None).isnan()
            found += parts
        for state in group.states.values():
            state.commit(rejected, group.names)
    return [each.cpu() for each in found + [state.committed for state in group.states.values()]]


@pytest.mark.parametrize(
    ("happens", "exchange", "twice"),
    [
        (plain, "all_gather", False),
        (plain, "two_shot", True),
        (without, "two_shot", False),
        (without, "all_gather", True),
        (spoilt, "all_gather", False),
        (spoilt, "two_shot", True),
    ],
)
def test_as_on_a_cpu(happens, exchange, twice, device, by):
    if exchange == "all_gather":
        needs_fused_adds()
    unused = happens is without  # else an accelerator does not look
    settings = RunState.of({"name": "onebit", "block": 512}, exchange)

    def run(where):
        return run_threads(3, lambda collective: program(collective, where, settings, happens, twice, unused))

    by("auto")
    slow = run(CPU)
    by("triton")
    for expected, found in zip(slow, run(device), strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_gradient_and_residual_are_added_up_by_the_codec(exchange, device, by, monkeypatch):
    from lightning_compress.codecs.codec import KernelPlan

    calls, encode = [], KernelPlan.encode

    def counted(self, vector, message, key, keep, summands):
        calls.extend([self] * (summands is not None))
        encode(self, vector, message, key, keep, summands)

    monkeypatch.setattr(KernelPlan, "encode", counted)
    by("triton")
    settings = RunState.of({"name": "onebit", "block": 512}, exchange)
    run_threads(2, lambda collective: program(collective, device, settings, plain, False, False))
    assert len(calls) == 2 * 2 * 3  # on two ranks, of two codecs, in three steps


def left_out(collective, device, settings):
    """What is made of a step of two passes, the second of which brings the mean of the first for one parameter."""
    group = Group(PARAMETERS, settings, World(collective, device, Meter(device)))
    first, second = ([each.to(device) for each in gradients(collective.rank, pass_)] for pass_ in range(2))
    group.reduce(first, 0, None)
    second[3] = first[3].clone()
    kept = group.residual.pending.clone()
    group.reduce(second, 0, None, 1, {"other"})
    place = next(slice(each.offset, each.end) for each in group.layout.segments if each.name == "other")
    assert second[3].equal(first[3])
    assert group.residual.pending[place].equal(kept[place])
    return [each.cpu() for each in [*second, group.residual.pending]]


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_what_a_later_pass_leaves_out_stays(exchange, device, by):
    if exchange == "all_gather":
        needs_fused_adds()
    settings = RunState.of({"name": "onebit", "block": 512}, exchange)
    by("auto")
    slow = run_threads(3, lambda collective: left_out(collective, CPU, settings))
    by("triton")
    for expected, found in zip(slow, run_threads(3, lambda each: left_out(each, device, settings)), strict=True):
        assert all(one.equal(other) for one, other in zip(expected, found, strict=True))
