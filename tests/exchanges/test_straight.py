"""Groups of which all is sent as it is take a shorter way, and give the same bits."""

import math

import pytest
import torch

from lightning_compress.collectives import CountingCollective, TorchCollective, World, run_threads
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.engine.group import Group
from lightning_compress.exchanges.all_reduce import extremes
from lightning_compress.settings.run_state import RunState

CPU, SOUND = torch.device("cpu"), torch.tensor(False)
PARAMETERS = [("small", (37,)), ("large", (1500, 1001)), ("nothing", (0,)), ("bias", (1001,)), ("larger", (1001, 1300))]
"""Large enough to travel in several messages; small ones come last in the vector."""
WARM = {"compressor": "topk", "warmup_steps": 9}
CAST = {"compressor": "bf16", "exchange": "all_reduce"}
STOCK = {"compressor": "qsgd", "warmup_steps": 9}
"""Nothing is kept from step to step."""


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for _, shape in PARAMETERS]


def averaged(collective, settings, straight, owed=(), steps=2, spoilt=(), spoiling=torch.inf, scale=None):
    """Gradients of all steps, the flags, the bytes, and who took the short way."""
    meter = Meter(CPU)
    group = Group(
        PARAMETERS,
        RunState.of(**settings),
        World(CountingCollective(collective, meter), CPU, meter),
        unused=False,
    )
    if collective.rank in owed:
        group.residual.committed.fill_(0.25)
    ways, goes = [], group._nothing_else

    def watched(*arguments):
        ways.append(straight and goes(*arguments))
        return ways[-1]

    group._nothing_else = watched
    found, flags = [], []
    for step in range(steps):
        parts = gradients(collective.rank, step)
        if collective.rank in spoilt:
            parts[1][7, 7] = spoiling
        flags.append(group.reduce(parts, step, scale))
        found += parts
        for state in group.states.values():
            state.commit(SOUND, [name for name, _ in PARAMETERS])
    return found, flags, meter.bytes_sent, ways, group.nonfinite


def over_gloo(settings, straight):
    found, *_ = averaged(TorchCollective(), settings, straight)
    return found, averaged(TorchCollective(), settings, straight)[3]


def alike(one, other):
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("settings", [WARM, CAST], ids=["warming up", "cast"])
def test_the_same_bits_and_bytes(settings, size):
    short = run_threads(size, lambda collective: averaged(collective, settings, True))
    long = run_threads(size, lambda collective: averaged(collective, settings, False))
    for (found, _, sent, ways, _), (expected, _, bytes_sent, _, _) in zip(short, long, strict=True):
        assert alike(found, expected)
        assert sent == bytes_sent
        assert ways == [True, True]


@pytest.mark.parametrize("settings", [WARM, CAST], ids=["warming up", "cast"])
def test_the_same_bits_over_sockets(pools, settings):
    long = pools[3].run(over_gloo, settings, False)
    for (found, ways), (expected, _) in zip(pools[3].run(over_gloo, settings, True), long, strict=True):
        assert alike(found, expected)
        assert ways == [True, True]


def test_who_owes_something_goes_the_long_way_and_meets_the_others():
    ranks = run_threads(3, lambda collective: averaged(collective, WARM, True, owed=(1,), steps=1))
    expected = [sum(parts) / 3 for parts in zip(*[gradients(rank, 0) for rank in range(3)], strict=True)]
    assert [ways for *_, ways, _ in ranks] == [[True], [False], [True]]
    for found, *_ in ranks:
        assert alike(found, ranks[0][0])
        for part, mean in zip(found, expected, strict=True):
            assert torch.allclose(part, mean + 0.25 / 3, atol=1e-6)


def test_news_of_what_is_not_finite_reach_everybody():
    ranks = run_threads(3, lambda collective: averaged(collective, WARM, True, spoilt=(2,), steps=1))
    for found, flags, *_ in ranks:
        assert flags[0].isnan()
        assert all(part.isnan().all() for part in found)
    assert [nonfinite for *_, nonfinite in ranks] == [[], [], ["large"]]


@pytest.mark.parametrize("spoiling", [6e4, torch.inf, torch.nan])
@pytest.mark.parametrize("scale", [None, torch.tensor(8.0)], ids=["", "scaled"])
def test_who_has_more_than_a_cast_can_hold_goes_the_long_way_and_meets_the_others(scale, spoiling):
    settings, unusual = {"compressor": "fp16", "exchange": "all_reduce"}, {"spoilt": (1,), "spoiling": spoiling}
    short = run_threads(3, lambda collective: averaged(collective, settings, True, **unusual, scale=scale))
    long = run_threads(3, lambda collective: averaged(collective, settings, False, **unusual, scale=scale))
    for (found, flags, _, _, nonfinite), (expected, heard, *_, named) in zip(short, long, strict=True):
        assert [flag.isnan() for flag in flags] == [flag.isnan() for flag in heard]
        assert nonfinite == named
        assert all(
            torch.equal(a, b) or (a.isnan().all() and b.isnan().all()) for a, b in zip(found, expected, strict=True)
        )
    whole = [parts[1][7, 7] for parts in (gradients(rank, 0) for rank in (0, 2))]
    saturated = (65504 / 3 + sum(whole)) / 3
    assert short[0][1][0].isnan() == (scale is not None or spoiling != 6e4)
    if not short[0][1][0].isnan():
        assert short[0][0][1][7, 7] == pytest.approx(float(saturated), rel=1e-2)


def test_what_is_fed_back_is_not_cast_and_forgotten():
    ranks = run_threads(2, lambda collective: averaged(collective, CAST | {"error_feedback": True}, True))
    assert all(not any(ways) for *_, ways, _ in ranks)


def test_a_residual_is_looked_at_again_once_it_was_written():
    group = Group(PARAMETERS, RunState.of("topk"), World(run_threads(1, lambda each: each)[0], CPU, Meter(CPU)))
    residual = group.residual
    assert residual.empty
    residual.pending[5] = 1.0
    residual.touch()
    assert not residual.empty
    residual.commit(SOUND, group.names)
    assert not residual.empty
    residual.committed.zero_()
    assert residual.empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_where_nothing_is_kept_it_is_what_ddp_does(size, dtype):
    """Divided and added up in the gradients' own memory and dtype: its bits and bytes."""

    def program(collective):
        meter = Meter(CPU)
        world = World(CountingCollective(collective, meter), CPU, meter)
        group = Group(PARAMETERS, RunState.of(**STOCK), world, dtype=dtype)
        bucket = torch.cat([each.flatten() for each in gradients(collective.rank, 0)]).to(dtype)
        parts = [
            each.view(shape)
            for each, (_, shape) in zip(
                bucket.split([math.prod(shape) for _, shape in PARAMETERS]), PARAMETERS, strict=True
            )
        ]
        expected = bucket / size
        collective.all_reduce(expected)
        flag = group.reduce(parts, 0, None)
        return bucket.equal(expected), float(flag), meter.bytes_sent, all_reduce_bytes(bucket.nbytes, size)

    for same, flag, sent, stock in run_threads(size, program):
        assert same
        assert flag == 0.0
        assert sent == stock


@pytest.mark.parametrize("spoiling", [torch.inf, torch.nan])
def test_an_element_that_is_not_finite_is_passed_on_alone(spoiling):
    ranks = run_threads(
        3, lambda collective: averaged(collective, STOCK, True, spoilt=(2,), spoiling=spoiling, steps=1)
    )
    for found, flags, *_ in ranks:
        assert flags[0].isnan()
        assert sum(int((~part.isfinite()).sum()) for part in found) == 1


@pytest.mark.parametrize("spoiling", [torch.inf, -torch.inf, torch.nan, 1.0])
@pytest.mark.parametrize("settings", [WARM, CAST], ids=["warming up", "cast"])
def test_all_parameters_at_once_as_on_an_accelerator_have_the_same_bits(settings, spoiling, monkeypatch):
    """Gradients of a bucket stand side by side there, and are asked together whether they are finite."""
    kinds = {"spoilt": (1,), "spoiling": spoiling}
    each = run_threads(2, lambda collective: averaged(collective, settings, True, **kinds))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    all_at_once = run_threads(2, lambda collective: averaged(collective, settings, True, **kinds))
    for one, other in zip(each, all_at_once, strict=True):
        assert alike(one[0], other[0])
        assert alike(one[1], other[1])


def test_extremes_of_a_bucket_are_looked_for_once(monkeypatch):
    bucket = torch.arange(60.0)
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch, "aminmax", lambda each, found=torch.aminmax: asked.append(each) or found(each))
    assert extremes(bucket.split([10, 30, 20])).tolist() == [0.0, 59.0]
    assert len(asked) == 1
    assert extremes([bucket[:10], bucket[20:]]).tolist() == [0.0, 9.0, 20.0, 59.0]
