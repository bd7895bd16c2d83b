"""``QSGD(coding="entropy")``: the numbers of packed messages, in fewer bits."""

import pytest
import torch

from lightning_compress import kernels
from lightning_compress.codecs import QSGD
from lightning_compress.codecs.quantize.entropy import LIMIT, Tables, code_lengths
from tests.codecs.helpers import CPU, layout

pytest.importorskip("numba")


def sent(coding, bits, bucket, vector):
    """What is left, what is added to ones and what is decoded from two messages, and the bytes of one."""
    plan = QSGD(bits, bucket, coding=coding).plan(layout(len(vector)), CPU)
    message, left = torch.full((plan.message_size,), 77, dtype=torch.uint8), vector.clone()
    plan.encode(left, message, 9)
    added, decoded = torch.ones(len(vector)), torch.empty(len(vector))
    messages = message[: plan.used].repeat(2, 1)
    plan.decode(messages, added, 0.5, True)
    plan.decode(messages, decoded, 0.5, False)
    return torch.stack([left, added, decoded]), plan.used


@pytest.mark.parametrize("bits", range(4, 9))
@pytest.mark.parametrize(("numel", "bucket"), [(1, 512), (100, 64), (5001, 512), (20_000, 72), (40_001, 8192)])
def test_numbers_are_those_of_packed_messages(bits, numel, bucket):
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(bits))
    for vector in (normal, normal * (normal > 1), normal.sign(), normal.frac()):
        coded, used = sent("entropy", bits, bucket, vector)
        packed, size = sent("packed", bits, bucket, vector)
        assert torch.equal(coded, packed)
        zeros = -min(bucket, numel) % 64 + 64 * (numel < bucket)
        assert used <= size + -(-numel // bucket) * (1 + zeros * bits / 8) + 8 * bits + 48


def test_normal_gradients_take_a_fifth_fewer_bits():
    normal = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    for bits, most in ((4, 3.32), (5, 4.41)):
        assert 8 * sent("entropy", bits, 512, normal)[1] / len(normal) <= most


@pytest.mark.parametrize("bits", [4, 5])
def test_any_bits_are_codes(bits):
    for encode, decode in zip(Tables(bits).encode, Tables(bits).decode, strict=True):
        lengths = encode & 255
        assert (2.0 ** -lengths.astype(float)).sum() == 1
        assert lengths.max() <= LIMIT
        assert ((decode & 15) == lengths[decode >> 4]).all()


def test_the_best_code_of_limited_length():
    assert sorted(code_lengths([1, 1, 2, 3, 5, 8], 9)) == [1, 2, 3, 4, 5, 5]
    assert sorted(code_lengths([1, 1, 2, 3, 5, 8], 3)) == [2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("wrong", [{"bits": 3}, {"norm": "l2"}, {"bucket": 8200}], ids=str)
def test_other_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"coding='entropy'.*coding='packed'"):
        QSGD(**{"coding": "entropy"} | wrong)


def test_without_numba_it_is_refused():
    codec = QSGD(coding="entropy")
    with kernels.using("torch"), pytest.raises(ValueError, match="use coding='packed'"):
        codec.plan(layout(64), CPU)
    assert not codec.runs_on(torch.device("cuda"))
