"""The hook on CUDA: ranks stay equal, nothing waits for the device, memory does not grow, a compiled step works."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.reducers import REDUCERS
from tests.cases import CASES

pytestmark = pytest.mark.gpu
METHODS = list(
    dict.fromkeys(case.codec.name for case in CASES if case.triton or case.codec.name in REDUCERS.complete())
)
METHODS.remove("none")  # which is stock DDP
METHODS.append({"name": "dgc", "density": 0.01})
DEVICE = "cuda:0"


def model():
    torch.manual_seed(3)
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers).to(DEVICE)


def data(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(64, 512, generator=generator).to(DEVICE), torch.randint(10, (64,), generator=generator).to(
        DEVICE
    )


def trained(compressor, settings, steps=6, strict_from=None, compiled=False, spoilt=()):
    """Train on this rank; with ``strict_from`` whatever waits for the device from that step on is an error."""
    torch.cuda.set_device(0)
    net = model()
    ddp = DistributedDataParallel(torch.compile(net) if compiled else net, [0], bucket_cap_mb=2)
    momentum = 0.9 if compressor_name(compressor) == "dgc" else 0.0
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=momentum)
    handle = attach(ddp, compressor, **{"exchange": "all_gather", **settings})
    handle.meter.sample_every = 0
    try:
        losses, memory, state = steps_of(ddp, optimizer, handle, steps, strict_from, spoilt)
    finally:  # the process goes on with other tests
        torch.cuda.set_sync_debug_mode("default")
        stats = handle.stats()
        handle.close()
    numbers = torch.cat([each.detach().flatten() for each in net.parameters()]).cpu()
    kept = [one["numbers"].cpu() for group in state["groups"] for one in group["states"].values()]
    return numbers, losses.cpu(), memory, kept, stats


def steps_of(ddp, optimizer, handle, steps, strict_from, spoilt):
    """Losses, allocated bytes after each step, and the state after the last one."""
    rank = torch.distributed.get_rank()
    batches, memory, losses = [data(rank, step) for step in range(steps)], [], torch.zeros(steps, device=DEVICE)
    for step, (images, labels) in enumerate(batches):
        if step == strict_from:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        loss = nn.functional.cross_entropy(ddp(images), labels)
        if (rank, step) in spoilt:
            loss = loss * torch.full((), torch.nan, device=DEVICE)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        memory.append(torch.cuda.memory_allocated())
    torch.cuda.set_sync_debug_mode("default")
    return losses, memory, copy.deepcopy(handle.state_dict())


def compressor_name(compressor):
    return compressor if isinstance(compressor, str) else compressor["name"]


@pytest.mark.parametrize("compressor", METHODS, ids=compressor_name)
def test_ranks_stay_equal_and_nothing_waits(ranks, compressor):
    exchange = {"bf16": "all_reduce", **dict.fromkeys(REDUCERS, "auto")}.get(compressor_name(compressor), "all_gather")
    (one, losses, memory, _, stats), (other, *_) = ranks("nccl").run(trained, compressor, {"exchange": exchange}, 8, 4)
    assert one.equal(other)
    assert losses.isfinite().all()
    assert stats["bytes_sent"] < 0.6 * stats["bytes_dense"]
    assert len(set(memory[4:])) == 1


@pytest.mark.parametrize(
    "settings", [{"exchange": "auto"}, {"error_feedback": {"dtype": "bfloat16"}}, {"exchange": "two_shot"}], ids=str
)
def test_other_settings(ranks, settings):
    (one, losses, *_), (other, *_) = ranks("nccl").run(trained, "onebit", settings, 6)
    assert one.equal(other)
    assert losses.isfinite().all()


def test_gloo_with_tensors_of_a_gpu_gives_what_nccl_gives(ranks):
    (one, *_), (other, *_) = ranks("gloo").run(trained, "onebit", {}, 4)
    (same, *_), _ = ranks("nccl").run(trained, "onebit", {}, 4)
    assert one.equal(other)
    assert one.equal(same)


def test_a_compiled_step(ranks):
    (one, losses, *_), (other, *_) = ranks("nccl").run(trained, "onebit", {}, 4, None, True)
    assert one.equal(other)
    assert losses.isfinite().all()


def test_a_number_that_is_none_on_one_rank_changes_no_residual(ranks):
    found = ranks("nccl").run(trained, "onebit", {}, 3, None, False, [(1, 2)])
    before = ranks("nccl").run(trained, "onebit", {}, 2)
    for (_, _, _, kept, stats), (_, _, _, wanted, _) in zip(found, before, strict=True):
        assert stats["nonfinite_steps"] == 1
        assert all(one.equal(other) for one, other in zip(kept, wanted, strict=True))


def test_a_captured_backward_is_refused():
    from lightning_compress.engine.hook import StreamHook

    class Bucket:
        def buffer(self):
            return torch.zeros(8, device=DEVICE)

    compression = type("Compression", (), {"device": torch.device(DEVICE)})()
    hook = StreamHook(compression)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(graph):
        hook.reduce(None, Bucket())
