"""Kernels for a CPU send and leave the same bits as tensor operations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lightning_compress import kernels
from lightning_compress.codecs import FFT
from lightning_compress.codecs.spectral.bins import Places
from lightning_compress.codecs.spectral.spectrum import _FusedPlan, _SpectralPlan
from lightning_compress.contrib.codecs.dct import DCT
from lightning_compress.core.source import Source
from tests.codecs.helpers import CPU, layout, make
from tests.helpers.table import table

numba = pytest.importorskip("lightning_compress.codecs.spectral.spectrum_numba", exc_type=ImportError)

CODECS = [
    *(cls(**each) for cls in (FFT, DCT) for each in ({"block": 64}, {"theta": 0.97, "block": 256, "bits": 8})),
    FFT(),
    FFT(theta=0.5, block=64, bits=32),
    FFT(theta=0.0, block=128, bits=16),
    DCT(theta=0.3, block=64, bits=5, mantissa=2),
]


def plans(codec, numel):
    with kernels.using("torch"):
        slow = codec.plan(layout(numel), CPU)
    fast = codec.plan(layout(numel), CPU)
    assert isinstance(slow, _SpectralPlan)
    assert isinstance(fast, _FusedPlan)
    return slow, fast


def same(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(codec, vector):
    """Both encode alike, and decode what two ranks sent alike."""
    both, encoded, decoded = plans(codec, len(vector)), [], []
    for plan in both:
        rest, message = vector.clone(), torch.full((plan.message_size,), 7, dtype=torch.uint8)
        plan.encode(rest, message, 0)
        other, second = vector.flip(0) * 0.5, torch.empty_like(message)
        plan.encode(other, second, 0)
        encoded.append((message, rest, second))
    assert all(map(same, *encoded))
    messages = torch.stack([encoded[0][0], encoded[0][2]])
    for plan in both:
        out, sums = torch.full_like(vector, torch.nan), torch.ones_like(vector)
        plan.decode(messages, out, 0.5, False)
        plan.decode(messages, sums, -2.0, True)
        decoded.append((out, sums))
    assert all(map(same, *decoded))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@table("kind", ["normal", "heavy", "one-hot", "constant", "ties", "zeros", "sparse"])
@table("numel", [1, 9, 700, 10_001])
def test_the_same_bits(codec, kind, numel):
    check(codec, make(kind, numel))


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-30, -1e-42, 3e38]) | st.floats(
    -(2.0**120), 2.0**120, width=32
)


@given(
    st.sampled_from(CODECS),
    st.integers(1, 300).flatmap(lambda numel: arrays.arrays(np.float32, numel, elements=NUMBERS)),
)
@settings(max_examples=60, deadline=None)
def test_the_same_bits_of_any_numbers(codec, numbers):
    check(codec, torch.from_numpy(numbers.copy()))


@given(st.data(), st.integers(2, 300), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_same_coefficients_are_chosen(data, bins, few):
    """Many are equal, zero or infinite; the first tried threshold may be anything."""
    keep = data.draw(st.integers(1, bins - 1))
    some = st.sampled_from([0.0, 1.0, 1.0 + 2.0**-23, 2.0, np.inf]) if few else st.floats(0, width=32)
    energy = data.draw(arrays.arrays(np.float32, (1, bins), elements=some))
    guess = data.draw(st.integers(1, (1 << 15) - 1))
    bits = np.full(-(-bins // 64) * 64, -1, np.int32)
    bits[:bins] = energy.view(np.int32)
    words, places = np.empty(len(bits) // 64, np.uint64), np.empty(len(bits) + 8, np.uint32)
    coarse = (bits >> 16).astype(np.int16)
    numba.choose(bits, coarse, bins, keep, guess, words)
    assert numba.expand(words.view(np.uint32), places) == keep
    assert places[:keep].tolist() == Places(bins, keep).largest(torch.from_numpy(energy)).tolist()


@table("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told_and_harms_nothing(bad):
    _, plan = plans(FFT(block=64), 300)
    vector = make("normal", 300)
    vector[70] = bad
    message, told = torch.zeros(plan.message_size, dtype=torch.uint8), []

    class Told(Source):
        def feed(self, kernel, *arguments):
            super().feed(lambda *all_of_them: told.append(kernel(*all_of_them)), *arguments)

    plan.encode_from(Told(vector), vector.clone(), message, 0)
    assert told[0] >= 0x7F800000
    plan.decode(message[None], torch.zeros(300), 1.0, False)


def test_an_addend_is_added_and_nothing_need_be_kept():
    _, plan = plans(FFT(block=64), 1000)
    one, other = make("normal", 1000, 1), make("normal", 1000, 2)
    total, rest = one + other, torch.empty(1000)
    first, second, third = (torch.empty(plan.message_size, dtype=torch.uint8) for _ in range(3))
    plan.encode(total, first, 0)
    plan.encode_from(Source(one, other), rest, second, 0)
    plan.encode_from(Source(one, other), None, third, 0)
    assert same(first, second)
    assert same(first, third)
    assert same(total, rest)


def test_threads_change_nothing():
    plan, vector, before = FFT(block=256).plan(layout(70_001), CPU), make("heavy", 70_001), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            rest, message = vector.clone(), torch.empty(plan.message_size, dtype=torch.uint8)
            plan.encode(rest, message, 0)
            results.append((message, rest))
    finally:
        torch.set_num_threads(before)
    assert all(same(one, other) for result in results for one, other in zip(result, results[0], strict=True))
