"""What is done to whole vectors, and to parameters all at once."""

import pytest
import torch

from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.engine.gradients import clean, spoil


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
    flag = clean(numbers, 65504.0)
    assert bool(flag.isnan()) == (bad is not None)
    assert float(flag) == 0 or flag.isnan()
    assert numbers.equal(wanted)
    assert clean(numbers, torch.inf) == 0


def test_spoiling(device):
    mean = torch.randn(5000, device=device)
    before = mean.clone()
    spoil(mean, torch.zeros((), device=device))
    assert mean.equal(before)
    spoil(mean, torch.full((), torch.nan, device=device))
    assert mean.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replacing(dtype, device):
    target, source = torch.zeros(5001, dtype=dtype, device=device), torch.randn(5001, device=device).to(dtype)
    from lightning_compress.core import state_triton

    state_triton.replace(torch.tensor(False, device=device), target, source)
    assert not target.any()
    state_triton.replace(torch.tensor(True, device=device), target, source)
    assert target.equal(source)


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
    unused_triton.find_used(tiles, vector, used)
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
