"""A step is predicted bucket by bucket, as DistributedDataParallel exchanges them."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.models import MODELS
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import COPIES, Link
from lightning_compress.planning.predict import BUCKET, Bucket, Place, backward_seconds, buckets_of, predict
from lightning_compress.settings.run_state import RunState

SPEEDS = dict.fromkeys(["Dense", "FP16", "Rotated", "TopK"], COPIES)


def place(link, ranks=2, **given):
    return Place(ranks, Auto.knowing({"ranks": link}, {**SPEEDS, **given}))


def shapes(model):
    return [(name, tuple(each.shape)) for name, each in model.named_parameters()]


def test_the_last_bucket_never_overlaps():
    # backward 4, 4, 2 s; encoding 1 s each; 3 s on the wire
    buckets = [Bucket(4.0, 1.0, 3.0), Bucket(4.0, 1.0, 3.0), Bucket(2.0, 1.0, 3.0)]
    assert backward_seconds(buckets) == 10 + 3 + 3
    assert backward_seconds([Bucket(4.0, 0.0, 100.0), Bucket(4.0, 0.0, 1.0)]) == 4 + 100 + 1  # the wire is behind
    assert backward_seconds([Bucket(4.0, 1.0, 3.0)]) == 4 + 1 + 3


def _buckets():
    model = MODELS["resnet20"][0]()
    names = {id(each): name for name, each in model.named_parameters()}
    found = []

    def hook(state, bucket):
        found.append([names[id(each)] for each in bucket.parameters()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = DistributedDataParallel(model, bucket_cap_mb=0.25)
    ddp.register_comm_hook(None, hook)
    for _ in range(2):  # buckets are rebuilt after the first step
        found.clear()
        ddp(torch.randn(2, 3, 32, 32)).sum().backward()
    return found, [[name for name, _ in each] for each in buckets_of(shapes(model), 1 << 18)]


def test_buckets_are_those_of_distributed_data_parallel(pools):
    for theirs, ours in pools[2].run(_buckets):
        assert [sorted(each) for each in ours] == [sorted(each) for each in theirs]


def test_exchanges_run_beside_backward():
    half = RunState.of("fp16", "all_reduce")
    mlp = shapes(MODELS["mlp"][0]())
    slow, instant = (predict(half, mlp, place(link), 1.0).step_s for link in (Link(1e-9, 1e9), Link(1e-9, 1e15)))
    assert 0 < slow - instant < 0.8 * 12.5e6 * 2 / 1e9  # the last bucket's message alone, of three layers of four


def test_what_is_ready_early_travels_beside_the_rest_of_backward():
    model, here = [(name, (4096, 2048)) for name in "abc"], place(Link(1e-9, 1e9))  # 34 MB each: a bucket
    early, late = ({"a": 0.9, "b": first, "c": first} for first in (0.3, 0.9))
    alone = predict(None, model, here, 0.0).exchange_s
    assert 0.07 < alone < 0.2
    assert predict(None, model, here, 1.0, early).step_s == pytest.approx(1.0 + alone / 3)
    assert predict(None, model, here, 1.0, late).step_s == pytest.approx(1.0 + alone)


@pytest.mark.parametrize(("computing", "longer"), [(0.5, 0.0), (4.0, 4.0)])
def test_with_a_delay_a_step_takes_the_longer_of_computing_and_communication(computing, longer):
    model, link = shapes(nn.Linear(2048, 2048)), Link(1e-6, 1e7)  # 1.7 s in float32
    now, late = (
        predict(RunState.of("fp16", "all_reduce", delay=delay), model, place(link), computing) for delay in (0, 1)
    )
    assert now.step_s > computing + 0.8
    assert late.step_s == pytest.approx(longer or late.exchange_s, rel=0.05)
    assert late.bytes_sent == now.bytes_sent


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_on_a_slow_link_bytes_decide(ranks):
    model, link = shapes(nn.Linear(2048, 2048)), Link(1e-6, 1e6)
    dense, coded = (predict(each, model, place(link, ranks), 0.01) for each in (None, RunState.of("rotated")))
    assert dense.step_s > 0.95 * dense.bytes_sent / 1e6
    assert 4 < dense.step_s / coded.step_s < 8
    assert coded.exchange in ("all_gather", "two_shot")


def test_what_no_model_predicts_is_said():
    with pytest.raises(ValueError, match="no model predicts its time"):
        predict(RunState.of("powersgd"), shapes(nn.Linear(64, 64)), place(Link(1e-6, 1e6)), 0.01)


def test_a_bucket_is_at_most_one_parameter_above_the_cap():
    parameters = [(f"weight {number}", (1024, 1024)) for number in range(20)]
    buckets = buckets_of(parameters, BUCKET)
    assert sum(map(len, buckets)) == 20
    assert [len(each) for each in buckets] == [1, 7, 7, 5]
    assert buckets[0][0][0] == "weight 19"
