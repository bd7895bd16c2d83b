"""Segments of all lengths, and runs of digits, by the kernels of ``terngrad``."""

import pytest
import torch

from lightning_compress.codecs import TernGrad
from lightning_compress.codecs.quantize.ternary import RUN
from lightning_compress.core.layout import Layout
from tests.triton.test_messages import CPU

MANY = [3, 0, 700, 1, 63, 64, 1400, 9, 4000]


def numbers(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3


def compare(codec, lengths, device, by):
    layout = Layout.of([(f"weight{number}", (length,)) for number, length in enumerate(lengths)])
    by("auto")
    slow = codec.plan(layout, CPU)
    by("triton")
    fast = codec.plan(layout, device)
    sent = torch.zeros(2, slow.message_size, dtype=torch.uint8)
    got = torch.full((2, (slow.message_size + 15) // 16 * 16), 7, dtype=torch.uint8, device=device)
    for rank, message in enumerate(sent):
        gradient, residual = numbers(layout.numel, rank), numbers(layout.numel, rank + 2)
        gradient[100:200] = 0.25  # equal ones have no deviation
        expected, actual = gradient + residual, torch.empty(layout.numel, device=device)
        slow.encode(expected, message, 5 + rank)
        fast.encode_sum(gradient.to(device), residual.to(device), actual, got[rank, : fast.message_size], 5 + rank)
        assert got[rank, : fast.message_size].cpu().equal(message)
        assert actual.cpu().equal(expected)
    expected, actual = numbers(layout.numel, 9), numbers(layout.numel, 9).to(device)
    slow.decode(sent, expected, 0.5, True)
    fast.decode(got[:, : fast.message_size], actual, 0.5, True)
    assert actual.cpu().equal(expected)


@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_segments_of_all_lengths(packing, device, by):
    compare(TernGrad(2.0, packing), MANY, device, by)


@pytest.mark.thorough
def test_digits_in_several_runs(device, by):
    compare(TernGrad(packing="base3"), [RUN - 40_000, 43_000], device, by)


def test_equal_elements_are_not_clipped(device, by):
    by("triton")
    plan = TernGrad(0.5).plan(Layout.of([("weight", (100,))]), device)
    vector, message = torch.full((100,), 3.0, device=device), torch.zeros(plan.message_size, dtype=torch.uint8)
    plan.encode(vector, message.to(device), 1)
    assert not vector.any()


def test_results_of_many_programs_are_added_up_in_one_order(device, by, monkeypatch):
    if device.type == "cpu":  # a few at a time, as else takes millions of elements
        import triton.language as tl

        from lightning_compress.codecs.quantize import terngrad_scales_triton

        monkeypatch.setattr(terngrad_scales_triton, "_PARTS", tl.constexpr(2))
    compare(TernGrad(), [40, 4 * 8192 if device.type == "cpu" else 5_000_000], device, by)
