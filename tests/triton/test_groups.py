"""A group with the kernels of an accelerator does what one on a CPU does, and adds up while it encodes."""

import math
from functools import partial

import pytest
import torch

from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.source import Source
from lightning_compress.engine.group import Group
from lightning_compress.settings.run_state import RunState
from tests.helpers.processor import needs_fused_adds

CPU = torch.device("cpu")
PARAMETERS = [("weight", (20, 61)), ("bias", (37,)), ("nothing", (0,)), ("other", (13, 83))]


pytestmark = pytest.mark.usefixtures("one_at_a_time")


def gradients(rank, step):
    """Side by side, as in a bucket."""
    sizes = [math.prod(shape) for _, shape in PARAMETERS]
    bucket = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(100 * step + rank))
    return [part.view(shape) for part, (_, shape) in zip(bucket.split(sizes), PARAMETERS, strict=True)]


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


def beyond(rank, step, parts):
    """Sums are too large for float32: in the first step of a matrix, in the second of a vector."""
    if step < 2:
        parts[step][-1:] = 3e38


def program(collective, device, settings, happens, twice, unused, scale=None):
    """What three steps make of gradients, and what is kept then."""
    meter = Meter(device)
    meter.sample_every = 0
    group = Group(PARAMETERS, settings, World(collective, device, meter), unused)
    found = []
    for step in range(3):
        for turn in range(1 + twice):
            parts = gradients(collective.rank, step + 10 * turn)
            bucket = parts[0]._base.to(device)
            parts = [bucket[each.storage_offset() :][: each.numel()].view(each.shape) for each in parts]
            happens(collective.rank, step, parts)
            factor = None if scale is None else torch.tensor(scale, device=device)
            rejected = group.reduce(parts, step, factor).isnan()
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
    _same(by, device, lambda ranks, where: program(ranks, where, settings, happens, twice, unused))


def nowhere(rank, step, parts):
    """No rank has gradients for two parameters, and one rank alone for another."""
    for part in (parts[1], parts[3], *([parts[2]] if rank != step else [])):
        part.zero_()


@pytest.mark.parametrize("scale", [None, 1000.0])
@pytest.mark.parametrize("happens", [nowhere, spoilt])
@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize(
    ("method", "feedback"),
    [("qsgd", "none"), ("rotated", "none"), ("onebit", "loco"), ("onebit", True), ("topk", True)],
)
def test_few_launches(method, feedback, unused, exchange, happens, scale, device, by, monkeypatch):
    """Who copies gradients writes the heads, and who writes the means reads them, and both know the loss scale."""
    if method == "topk" and exchange == "two_shot":
        pytest.skip("two_shot is another algorithm for sparsifiers")
    monkeypatch.setitem(globals(), "PARAMETERS", LONG)
    given = {} if feedback == "none" else {"error_feedback": feedback}
    settings = RunState.of(method, exchange, **given)
    _same(by, device, lambda ranks, where: program(ranks, where, settings, happens, False, unused, scale))


def rows(rank, step, parts):
    """Rows of an embedding, of which no rank uses some."""
    parts[3][torch.arange(13) % 3 != rank % 2] = 0.0


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("method", ["rotated", "onebit"])
def test_rows_that_no_rank_uses(method, exchange, device, by):
    given = {"error_feedback": "loco"} if method == "onebit" else {}
    settings = RunState.of(method, exchange, **given).bound({"other": "embedding"})
    _same(by, device, lambda ranks, where: program(ranks, where, settings, rows, False, False))


def rows_of_second(rank, step, parts):
    """Rows of another embedding."""
    parts[2][torch.arange(131) % 3 == 1] = 0.0


LONG = [("first", (96, 61)), ("bias", (37,)), ("second", (131, 83)), ("scale", (61,))]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("happens", [plain, spoilt, "rows"])
@pytest.mark.parametrize(
    ("method", "feedback"),
    [("qsgd", "none"), ("rotated", "none"), ("onebit", "loco"), ("onebit", True), ("efsign", "loco")],
)
def test_shards_are_encoded_and_decoded_by_one_launch(method, feedback, happens, ranks, device, by, monkeypatch):
    """As one by one on a CPU, of any number of ranks, where each shard has whole blocks."""
    from lightning_compress.exchanges.shards import ShardMessages

    launched, encode = [], ShardMessages.encode
    monkeypatch.setattr(ShardMessages, "encode", lambda self, *given: launched.append(self) or encode(self, *given))
    monkeypatch.setitem(globals(), "PARAMETERS", LONG)
    rows_of = {"second": "embedding"} if happens == "rows" else {}
    happening = rows_of_second if rows_of else happens
    given = {} if feedback == "none" else {"error_feedback": feedback}
    settings = RunState.of({"name": method, **({"block": 256} if "bit" in method else {})}, "two_shot", **given)
    settings = settings.bound(rows_of)
    _same(by, device, lambda world, where: program(world, where, settings, happening, False, False), ranks)
    assert len(launched) == 2 * 2 * 3 * ranks  # own values and sums, in three steps, here and on a CPU


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("method", ["qsgd", "rotated", "onebit"])
def test_sums_that_overflow(method, device, by, monkeypatch):
    """Whoever adds up what arrived finds it, and tells all ranks."""
    monkeypatch.setitem(globals(), "PARAMETERS", LONG)
    given = {"error_feedback": "loco"} if method == "onebit" else {}
    settings = RunState.of(method, "two_shot", **given)
    _same(by, device, lambda ranks, where: program(ranks, where, settings, beyond, False, False))


def _same(by, device, run, ranks=3):
    """Compare what kernels find on an accelerator with what a CPU does."""
    run = partial(lambda run, where: run_threads(ranks, lambda world: run(world, where)), run)
    by("auto")
    slow = run(CPU)
    by("triton")
    for expected, found in zip(slow, run(device), strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_gradient_and_residual_are_added_up_by_the_codec(exchange, device, by, monkeypatch):
    calls, pointers = [], Source.pointers

    def counted(source, rest):
        calls.extend([source] * (source.addend is not None))
        return pointers(source, rest)

    monkeypatch.setattr(Source, "pointers", counted)
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
