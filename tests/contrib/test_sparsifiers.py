"""Threshold, adaptive and wangni: the papers' rules, and what follows from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.codecs import Codec
from lightning_compress.contrib.codecs.adaptive import Adaptive
from lightning_compress.contrib.codecs.threshold import Threshold
from lightning_compress.contrib.codecs.wangni import Wangni
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.core.workspace import CHUNK
from tests.codecs.helpers import CPU, KINDS, layout, make, trip
from tests.reference import sparse as reference
from tests.turns import by_turns

modest = settings(deadline=None, derandomize=True, max_examples=60)
short = st.builds(make, st.sampled_from(KINDS), st.integers(1, 6000), st.integers(0, 99))


def whole(codec: Codec, vector: torch.Tensor, key: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One trip of a vector that is one parameter."""
    plan = codec.plan(Layout.of([("w", (len(vector),))]), CPU)
    residual, message = vector.clone(), torch.empty(plan.message_size, dtype=torch.uint8)
    plan.encode(residual, message, key)
    decoded = torch.empty_like(vector)
    plan.decode(message[None, : plan.used], decoded, 1.0, False)
    return decoded, residual, message[: plan.used]


def ranges(numel: int) -> list[tuple[int, int]]:
    return [(segment.offset, segment.end) for segment in layout(numel).segments if segment.numel]


@pytest.mark.parametrize("coding", ["rice", "words"])
@modest
@given(vector=short, key=st.integers(0, 2**64 - 1), capacity=st.sampled_from([0.01, 0.3, 1.0]))
def test_threshold_equals_the_reference(coding: str, vector: torch.Tensor, key: int, capacity: float) -> None:
    codec = Threshold(0.8, 0.3, coding, capacity)  # type: ignore[arg-type]
    decoded, residual, message = trip(codec, vector, key)
    sent, stays = reference.threshold(vector.numpy(), 0.8, 0.3, math.ceil(capacity * len(vector)), key)
    np.testing.assert_array_equal(decoded.numpy(), sent)
    np.testing.assert_array_equal(residual.numpy(), stays)
    assert set(decoded.unique().tolist()) <= {0.0, float(np.float32(0.8)), -float(np.float32(0.3))}
    places, raw = np.flatnonzero(sent).tolist(), bytes(message.tolist())
    if coding == "words":
        words = np.frombuffer(raw, np.uint32).tolist()
        assert words == [len(places), *(i << 1 | int(sent[i] < 0) for i in places)]
    else:
        read, used = reference.read_positions(raw, len(vector), "rice")
        signs = reference._bits(raw[used:])[: len(places)]
        assert read == places
        assert [bit == "1" for bit in signs] == [bool(sent[i] < 0) for i in places]


def test_threshold_sends_one_step_a_time() -> None:
    codec, vector = Threshold(0.25, 0.5, capacity=1.0), torch.tensor([1.0, -1.2, 0.2, -0.5])
    sent = []
    for key in range(5):
        decoded, vector, _ = whole(codec, vector, key)
        sent.append(decoded.tolist())
    assert sent[0] == [0.25, -0.5, 0.0, -0.5]
    assert sent[1] == [*sent[0][:3], 0.0]
    assert sent[4] == [0.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(vector, torch.tensor([0.0, -0.2, 0.2, 0.0]))


def test_threshold_starves_no_element() -> None:
    codec, total = Threshold(0.1, 0.1, capacity=0.02), torch.zeros(CHUNK + 1000)
    for key in range(0, len(total), len(total) // 100):
        decoded, _, message = whole(codec, torch.ones(len(total)), key)
        total += decoded
    assert (total > 0).all()
    assert 8 * len(message) <= (1 + 8.2) * 0.02 * len(total) + 200


@pytest.mark.parametrize(
    ("proportion", "indices"),
    [
        (1, "int16"),
        (7.5, "rice"),
        (64, "int16"),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((1, "rice"), (7.5, "int16"), (64, "rice"))),
    ],
)
@modest
@given(vector=short)
def test_adaptive_equals_the_reference(indices: str, proportion: float, vector: torch.Tensor) -> None:
    decoded, residual, message = trip(Adaptive(proportion, indices), vector)  # type: ignore[arg-type]
    parts = reference.adaptive_places(vector.numpy(), proportion, ranges(len(vector)))
    sent, stays = reference.two_means(vector.numpy(), parts)
    np.testing.assert_array_equal(decoded.numpy(), sent)
    np.testing.assert_array_equal(residual.numpy(), stays)
    ends = [end for _, end in ranges(len(vector))]
    parsed, used = reference.parse_entries(message, len(vector), ends, indices, "means")
    np.testing.assert_array_equal(parsed, sent)
    assert used == len(message)


def laplace(numel: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).laplace(size=numel).astype(np.float32))


@pytest.mark.parametrize(("kind", "proportion"), by_turns(["normal", "laplace", "heavy"], (16, 32, 64, 128), 2))
def test_adaptive_keeps_about_the_proportion(kind: str, proportion: float) -> None:
    for key in range(4):
        vector = laplace(1 << 20, key) if kind == "laplace" else make(kind, 1 << 20, key)
        decoded, residual, _ = whole(Adaptive(proportion), vector, key)
        kept = decoded != 0
        assert float(kept.double().mean()) == pytest.approx(1 / proportion, rel=0.2)
        assert len(decoded.unique()) == 3
        for sign in (1, -1):  # the thresholds part the elements, and the rest of what is sent adds up to nothing
            ones, others = vector[kept & (vector * sign > 0)] * sign, vector[~kept] * sign
            assert ones.min() >= others.max()
            left = residual[kept & (vector * sign > 0)].double().sum()
            assert abs(left) <= 1e-6 * float(ones.double().sum())


def test_adaptive_drops_what_a_misleading_sample_lets_through() -> None:
    numel = 1 << 18
    plan = Adaptive(64).plan(Layout.of([("w", (numel,))]), CPU)
    vector = torch.where(torch.arange(numel) % 3 == 0, 2.0, 1.0)  # a third of all are equal and largest
    decoded, residual, _ = whole(Adaptive(64), vector, 0)
    kept = decoded != 0
    assert int(kept.sum()) == 4 * numel // 64
    assert int(kept.nonzero().max()) < 4 * numel // 64 * 3
    assert torch.equal(residual[~kept], vector[~kept])
    assert plan.message_size >= plan.used


@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@modest
@given(vector=short, key=st.integers(0, 2**64 - 1))
def test_wangni_equals_the_reference(density: float, vector: torch.Tensor, key: int) -> None:
    numel = len(vector)
    decoded, _, message = trip(Wangni(density), vector, key)
    chances, level = reference.wangni_chances(vector.numpy(), density)
    random = np.array(reference.wangni_random(key, numel))
    kept = decoded.numpy() != 0
    clear = np.abs(random - chances) > 1e-5
    fits = numel * density + 4 * math.sqrt(numel * density)
    if kept.sum() + 1 < fits or density == 1.0:
        np.testing.assert_array_equal(kept[clear], (random < chances)[clear])
    exact = kept & (chances == 1)
    values = np.where(exact, vector.numpy(), np.copysign(np.float32(level), vector.numpy()))
    np.testing.assert_allclose(decoded.numpy()[kept], values[kept], rtol=1e-6)
    raw, out = bytes(message.tolist()), np.zeros(numel, np.float32)
    places, used = reference.read_positions(raw, numel, "rice")
    out[places] = np.frombuffer(raw[used : used + 4 * len(places)], np.float32)
    used += 4 * len(places)
    rest, size = reference.parse_entries(message[used:], numel, [numel], "rice", "1bit")
    np.testing.assert_array_equal(out + rest, decoded.numpy())
    assert used + size == len(raw)


@pytest.mark.parametrize(("kind", "density"), by_turns(["normal", "laplace", "heavy", "lopsided"], (0.5, 0.1, 0.01), 1))
def test_wangni_is_right_on_average_and_no_worse_than_random_choice(kind: str, density: float) -> None:
    numel, draws = 40_000, 200
    vector = laplace(numel, 0) if kind == "laplace" else make(kind, numel)
    chances, _ = reference.wangni_chances(vector.numpy(), density)
    assert chances.sum() == pytest.approx(density * np.count_nonzero(vector), rel=0.01) or kind == "lopsided"
    total, squares, kept = torch.zeros(numel, dtype=torch.float64), 0.0, 0.0
    for key in range(draws):
        decoded = whole(Wangni(density), vector, key)[0].double()
        total += decoded
        squares += float((decoded - vector).square().sum()) / draws
        kept += float((decoded != 0).sum()) / draws
    norm = vector.double().square()
    wanted = float((norm * torch.from_numpy(np.where(chances > 0, 1 / np.maximum(chances, 1e-300), 1) - 1)).sum())
    assert squares == pytest.approx(wanted, rel=0.05, abs=1e-12 * float(norm.sum()))
    assert squares <= (1 / density - 1) * float(norm.sum())
    assert kept == pytest.approx(chances.sum(), rel=0.03)
    assert float((total / draws - vector).square().sum()) == pytest.approx(wanted / draws, rel=0.3, abs=1e-9)
    deviations = (total / draws - vector) / torch.from_numpy(np.sqrt(vector.numpy() ** 2 / chances / draws) + 1e-30)
    assert deviations.mean().abs() <= 5 / math.sqrt(numel)  # no element is favoured by the random bits


def test_wangni_keeps_elements_far_rarer_than_16_bits_can_say() -> None:
    vector = torch.full((1 << 20,), 1e-3)
    vector[::2] = 10.0
    chance = 1e-3 * 0.01 / 5.0005  # 2e-6, a seventh of 2^-16
    small = sum(int((whole(Wangni(0.01), vector, key)[0][1::2] != 0).sum()) for key in range(40))
    expected = 40 * len(vector) / 2 * chance
    assert abs(small - expected) <= 5 * math.sqrt(expected)


def test_wangni_bits() -> None:
    for density, bits in ((0.1, 5.8), (0.01, 9.2)):
        vector = make("normal", 1 << 20)
        assert 8 * len(whole(Wangni(density), vector)[2]) <= 1.03 * bits * density * len(vector)


@pytest.mark.parametrize(
    "codec", [Threshold(1.0, 1.0), Threshold(1.0, 1.0, "words"), Adaptive(), Adaptive(32, "int16"), Wangni()], ids=repr
)
def test_positions_beyond_what_float32_can_count(codec: Codec) -> None:
    numel = (1 << 24) + 1000
    vector = torch.zeros(numel)
    vector[-3], vector[-4], vector[1 << 24] = 5.0, -3.0, 2.0
    decoded, residual, _ = whole(codec, vector)
    assert decoded.nonzero().flatten().tolist() == [1 << 24, numel - 4, numel - 3]
    assert torch.equal(decoded.sign(), vector.sign())
    torch.testing.assert_close(decoded + residual, vector)


def test_vectors_beyond_31_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="another compressor by rules"):
        Threshold().plan(Layout((Segment("w", (2**31,), 0, 0, 2**31),)), CPU)


@pytest.mark.parametrize(
    ("make_codec", "words"),
    [
        (lambda: Threshold(0.0), "tau_plus must be a number above 0"),
        (lambda: Threshold(0.1, -0.1), "tau_minus must be a number above 0"),
        (lambda: Threshold(math.inf), "tau_plus must be"),
        (lambda: Threshold(math.nan), "tau_plus must be"),
        (lambda: Threshold(capacity=0), "capacity must be in"),
        (lambda: Threshold(coding="elias"), "coding must be one of 'rice', 'words'"),
        (lambda: Adaptive(0.5), "proportion must be 1 or more"),
        (lambda: Adaptive(math.inf), "proportion must be 1 or more"),
        (lambda: Adaptive(indices="int32"), "indices must be one of 'rice', 'int16'"),
        (lambda: Wangni(0), "density must be in"),
        (lambda: Wangni("10 %"), "density must be in"),
    ],
)
def test_bad_settings(make_codec: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_codec()  # type: ignore[operator]


def test_what_goes_with_adam() -> None:
    assert not Threshold().safe_with_adam
    assert not Adaptive(2).safe_with_adam
    assert not Wangni(0.4).safe_with_adam
    assert Wangni(0.5).safe_with_adam
    assert not Wangni().contractive
