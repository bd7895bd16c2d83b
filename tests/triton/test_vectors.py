"""What is done to whole vectors, and to parameters all at once."""

import pytest
import torch

from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Memory
from lightning_compress.core.state import State
from lightning_compress.core.vector import Vector, clean, kernel_of, poison


@pytest.fixture(autouse=True)
def _by_kernels(by):
    by("triton")


@pytest.mark.parametrize("numel", [1, 4096, 9001])
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -torch.inf, 70000.0])
def test_cleaning(numel, bad, device):
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(device)
    if bad is not None:
        numbers[numel // 2] = bad
    wanted = torch.where(numbers.isfinite(), numbers, 0.0)
    flag = clean(numbers, 65504.0, torch.zeros((), device=device))
    assert bool(flag.isnan()) == (bad is not None)
    assert float(flag) == 0 or flag.isnan()
    assert numbers.equal(wanted)
    assert clean(numbers, torch.inf, torch.zeros((), device=device)) == 0


def test_spoiling(device):
    mean = torch.randn(5000, device=device)
    before = mean.clone()
    poison([mean], torch.zeros((), device=device))
    assert mean.equal(before)
    poison([mean], torch.full((), torch.nan, device=device))
    assert mean.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replacing(dtype, device):
    target, source = torch.zeros(5001, dtype=dtype, device=device), torch.randn(5001, device=device).to(dtype)
    from lightning_compress.core import state_triton

    state_triton.replace(torch.tensor(False, device=device), target, source)
    assert not target.any()
    state_triton.replace(torch.tensor(True, device=device), target, source)
    assert target.equal(source)


@pytest.mark.parametrize("rejected", [False, True])
def test_some_parameters_are_rolled_back(rejected, device):
    state = State(Layout.of([("a", (3,)), ("b", (5, 401)), ("c", (7,)), ("d", (1,))]), device)
    state.pending.copy_(torch.arange(2016.0) + 1)
    state.touch()
    state.commit(torch.tensor(rejected, device=device), {"b", "d"})
    kept = torch.arange(2016.0) + 1
    assert state.committed.cpu().equal(
        kept * torch.tensor([0.0] * 3 + [1.0] * 2005 + [0.0] * 7 + [1.0]) * (not rejected)
    )
    state.commit(torch.tensor(False, device=device), {"a", "c"})
    assert state.committed[:3].tolist() == [1, 2, 3]
    assert state.committed[-8:-1].tolist() == list(range(2009, 2016))


def test_kernels_run_where_their_tensors_are(launched, device):
    """A main thread that never called set_device(r) rolls back the residuals of the GPU r."""
    state = State(Layout.of([("weight", (64,))]), device)
    state.reject(torch.tensor(False, device=device))
    assert [each.device for each in launched] == [state.pending.device]


def test_parameters_that_are_not_used(device):
    from lightning_compress.engine import unused_triton

    parts = [slice(0, 9000), slice(9000, 9003), slice(9003, 13099), slice(13099, 13100)]
    vector = torch.randn(13100, device=device)
    vector[parts[0]] = 0
    vector[8999], vector[parts[1]], vector[parts[3]] = 1, 0, 0
    used = torch.zeros(4, dtype=torch.uint8, device=device)
    tiles = unused_triton.table([(number, part.start, part.stop) for number, part in enumerate(parts)], device)
    unused_triton.find_used(tiles, used, vector)
    assert used.tolist() == [1, 0, 1, 0]
    kept, other = torch.randn(13100, device=device), torch.randn(13100, device=device)
    wanted = other.clone()
    for place in (parts[1], parts[3]):
        wanted[place] = kept[place]
    unused_triton.restore_unused(tiles, used, other, kept)
    assert other.equal(wanted)
    for place in (parts[1], parts[3]):
        wanted[place] = 0
    unused_triton.zero_unused(tiles, used, other)
    assert other.equal(wanted)
    last = torch.zeros(13100, device=device)
    last[-1] = 1
    unused_triton.find_used(tiles, used, vector, last)
    assert used.tolist() == [1, 0, 1, 1]
    vectors = torch.ones(2, 13100, device=device)
    unused_triton.zero_unused(tiles, used, *vectors)
    assert not vectors[:, parts[1]].any()
    assert vectors.sum() == 2 * (13100 - 3)


SIZES = (1, 64, 65, 9001, 700, 4096)
CODED = (9000, 11000, 12000, 13000, -1, 0)


def test_errors_in_8_bits(device, by):
    """LoCo's, with blocks of zeros, of tiny and of large numbers, and halves to round; tensor operations do it."""
    from lightning_compress.core import blocks
    from lightning_compress.core.vector import add_errors

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(sum(SIZES), generator=generator) * 10 ** (
            3 * torch.randn(sum(SIZES), generator=generator)
        )
        numbers[100:200], numbers[256:320], numbers[384:400] = 0.0, 1e-37, 1e38
        numbers[320:384] = torch.arange(64) + 0.5
        return numbers

    def found(treated, choice, where):
        by(choice)
        segments = blocks.Segments((0,) * 6, SIZES, CODED, treated)
        old = torch.randint(0, 256, (25000,), generator=torch.Generator().manual_seed(5)).to(torch.uint8).to(where)
        new, out = torch.zeros_like(old), drawn(2).to(where)
        blocks.blend(segments, old, 0.95, drawn(3).to(where), 0.05, new)
        add_errors(segments, new, out, torch.zeros((), device=where))
        blocks.blend(segments, old, 0.5, drawn(4).to(where), 0.5, old)
        places = [slice(code, code + blocks.coded_bytes(size)) for code, size in zip(CODED, SIZES, strict=True)]
        return [out.cpu(), *(each[place].cpu() for each in (old, new) for place in places[:4])]

    for treated in ((2, 2, 2, 2, 2, 2), (1, 2, 0, 2, 2, 1), (0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1)):
        expected = found(treated, "torch", torch.device("cpu"))
        assert all(one.equal(other) for one, other in zip(found(treated, "triton", device), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan, 3e4])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), None])
def test_gradients_are_gathered_and_means_scattered(order, bad, dtype, device, by):
    """From a bucket whose parameters have another order, in one pass; else one by one."""
    generator = torch.Generator().manual_seed(1)
    sizes = (3000, 1, 7000)
    bucket = torch.randn(sum(sizes), generator=generator).to(dtype)
    if bad is not None:
        bucket[2500] = bad

    def found(choice, where):
        by(choice)
        memory = bucket.clone().to(where)
        parts = list(memory.split([sizes[place] for place in order or (0, 1, 2)]))
        pieces = [parts[(order or (0, 1, 2)).index(place)] for place in range(3)]
        pieces = pieces if order else [each.clone() for each in pieces]
        vector = Vector(Memory(pieces, fast=False), limit=1e4, fused=kernel_of(where, "triton"))
        whole = vector.whole().clone()
        vector.send()
        vector.out().copy_(2 * whole)
        vector.give()
        return vector.flag.cpu(), whole.cpu(), [each.cpu() for each in pieces]

    (flag, whole, pieces), (own_flag, own_whole, own) = found("torch", torch.device("cpu")), found("triton", device)
    assert bool(flag.isnan()) == bool(own_flag.isnan()) == (bad is not None)
    if bad is None:
        assert whole.equal(own_whole)
    assert own_whole.isfinite().all()
    assert all(one.nan_to_num(7.0).equal(other.nan_to_num(7.0)) for one, other in zip(pieces, own, strict=True))
