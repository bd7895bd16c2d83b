"""What is done to whole vectors, and to parameters all at once."""

import pytest
import torch

from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.core.vector import clean, poison


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


@pytest.mark.parametrize("numel", [0, 1, 64, 65, 4096, 9001])
def test_errors_in_8_bits(numel, device, by):
    """LoCo's, with blocks of zeros, of tiny and of large numbers, and halves to round; tensor operations do it."""
    from lightning_compress.core import blocks

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(numel, generator=generator) * 10 ** (3 * torch.randn(numel, generator=generator))
        numbers[100:200], numbers[256:320] = 0.0, 1e-37
        numbers[320:384] = torch.arange(64)[: len(numbers[320:384])] + 0.5
        numbers[384:400] = 1e38
        return numbers

    def found(choice, where):
        by(choice)
        old = torch.full((blocks.coded_bytes(numel),), 130, dtype=torch.uint8, device=where)
        blocks.encode(drawn(1).to(where), old)  # whatever there was before
        new, out = torch.zeros_like(old), drawn(2).to(where)
        blocks.blend(old, 0.95, drawn(3).to(where), 0.05, new)
        blocks.add(new, out)
        blocks.blend(old, 0.5, drawn(4).to(where), 0.5, old)
        return [each.cpu() for each in (old, new, out)]

    expected = found("torch", torch.device("cpu"))
    assert all(one.equal(other) for one, other in zip(found("triton", device), expected, strict=True))
