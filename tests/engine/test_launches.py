"""What averaging a bucket starts on a GPU: as many kernels and collectives for any number of ranks."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.harness.launches import calls, launches
from benchmarks.launches import CASES

pytest.importorskip("triton")

GATHERED = {"qsgd": 7, "rotated": 7, "onebit": 8, "efsign": 8, "topk": 13, "fft": 8, "dgc": 34}
SHARDED = {"qsgd": 11, "rotated": 11, "onebit": 12, "efsign": 12}
"""What users get: ``onebit`` and ``efsign`` with LoCo."""
RESNET50 = 64
"""The most that a step may start with onebit."""


def total(method, exchange, ranks, **more):
    return len(launches(method, exchange, ranks, **more).average)


@pytest.mark.parametrize("method", GATHERED)
def test_messages_that_are_gathered(method):
    assert total(method, "all_gather", 2) == GATHERED[method]
    assert total(method, "all_gather", 8) == GATHERED[method]


@pytest.mark.parametrize("method", SHARDED)
def test_shards(method):
    assert {total(method, "two_shot", ranks) for ranks in (2, 4, 8, 64)} == {SHARDED[method]}


MATRICES = [(256, 256)] * 6
"""One section: all of it is compressed."""


def test_matrices_alone():
    gathered = {"qsgd": 5, "rotated": 5, "onebit": 6, "topk": 11, "fft": 6}
    assert {method: total(method, "all_gather", 8, shapes=MATRICES) for method in gathered} == gathered
    sharded = {"qsgd": 8, "rotated": 8, "onebit": 9}
    for ranks in (2, 8, 64):
        assert {method: total(method, "two_shot", ranks, shapes=MATRICES) for method in sharded} == sharded


def test_others():
    assert total("bf16", "all_reduce", 2) == 3
    assert total("powersgd", "auto", 2) == 20


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("method", ["qsgd", "rotated", "onebit", "topk", "fft"])
def test_what_is_unused_and_a_loss_scale_cost_no_more(method, exchange):
    if method in ("topk", "fft") and exchange == "two_shot":
        pytest.skip("two_shot encodes their shards one by one")
    usual = total(method, exchange, 4)
    assert total(method, exchange, 4, unused=True) == usual
    scale = torch.ones((), device="meta")
    assert total(method, exchange, 4, scale=lambda: scale) == usual
    assert launches(method, exchange, 4, unused=True).average.count("NCCL all_reduce") == 0


def test_a_dense_step_is_an_all_reduce():
    started = launches("qsgd", "all_gather", 4, warmup_steps=10)
    assert [each for each in started.average if each.startswith("NCCL")] == ["NCCL all_reduce"]
    assert len(started.average) <= 6


def resnet50():
    """Shapes of the parameters of ResNet-50, in buckets of 25 MB from the last one on."""
    shapes, inner = [(64, 3, 7, 7), (64,), (64,)], 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(width, inner, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, inner, 1, 1)] if block == 0 else []
            shapes += [shape for each in convolutions for shape in (each, each[:1], each[:1])]
            inner = 4 * width
    buckets, size = [[]], 0
    for shape in reversed([*shapes, (1000, 2048), (1000,)]):
        if size >= 25 << 20:
            buckets.append([])
            size = 0
        buckets[-1].append(shape)
        size += 4 * torch.Size(shape).numel()
    return buckets


def test_a_step_of_resnet50():
    started = [launches("onebit", "all_gather", 8, shapes=bucket) for bucket in resnet50()]
    assert sum(len(each.average) + len(each.commit) for each in started) <= RESNET50


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("method", SHARDED)
def test_calls_hardly_grow_with_the_ranks(method, device):
    few, many = (sum(calls(method, "two_shot", ranks, device, recorded=False)) for ranks in (2, 32))
    assert many <= few + 2 * 30  # at most two for each further rank


def test_the_page_has_these_counts():
    page = (Path(__file__).parents[2] / "docs" / "results" / "gpu.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\d+) \| \d+ \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert len(rows) == len(CASES)
    for method, exchange, ranks, count, *said in rows:
        assert total(method, exchange, int(ranks)) == int(count)
        if method != "powersgd":  # whose operations PyTorch's version decides
            for recorded, most in zip((False, True), said, strict=True):
                assert sum(calls(method, exchange, int(ranks), recorded=recorded)) <= 1.1 * int(most.replace(",", ""))
