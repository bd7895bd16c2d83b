"""Sparsification in the frequency domain: bounds, errors on known data, messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_compress.codecs import FFT, TopK
from lightning_compress.codecs.spectral.bins import Places
from lightning_compress.codecs.spectral.spectrum import Spectral
from lightning_compress.contrib.codecs.dct import DCT
from tests.codecs.helpers import CPU, KINDS, layout, make, trip
from tests.helpers.table import table
from tests.reference import codecs as reference

both = table("cls", [FFT, DCT])
EXACT = {"bits": 32, "mantissa": 23}


def kind_of(codec: Spectral) -> str:
    return type(codec).__name__.lower()


def relative(after: torch.Tensor, before: torch.Tensor) -> float:
    return float(after.double().norm() / before.double().norm())


@both
@table("kind", KINDS)
@table("numel", [1, 7, 64, 1000, 70_001])
def test_theta_0_with_32_bits_is_the_identity(cls: type[Spectral], kind: str, numel: int) -> None:
    vector = make(kind, numel)
    decoded, _, _ = trip(cls(theta=0.0, **EXACT), vector)
    floor = numel**0.5 * 2.0**-144  # what is left of denormals
    assert (decoded.double() - vector).norm() <= 1e-6 * vector.double().norm() + floor


@both
@table("theta", [0.0, 0.5, 0.85, 0.95])
@table("kind", ["normal", "heavy", "one-hot", "constant", "ties"])
def test_energy_bound(cls: type[Spectral], theta: float, kind: str) -> None:
    vector = make(kind, 8 * 256)
    codec = cls(theta=theta, block=256, **EXACT)
    _, residual, _ = trip(codec, vector)
    bins = codec.transform(256).bins
    bound = theta * (bins / (bins - 1) if cls is FFT else 1)
    for before, after in zip(vector.double().split(256), residual.double().split(256), strict=True):
        assert after.square().sum() <= bound * before.square().sum() + 1e-9 * before.square().sum()


@pytest.mark.parametrize(
    ("data", "fft", "spatial"),
    [
        ("sinusoids", 0.034, 0.69),
        ("ar", 0.33, 0.67),
        ("gaussian", 0.75, 0.67),
        ("laplace", 0.76, 0.54),
        ("t3", 0.75, 0.48),
    ],
)
def test_errors_on_known_data(data: str, fft: float, spatial: float) -> None:
    numel, random = 16384, np.random.default_rng(3)
    white = random.standard_normal(numel)
    if data == "sinusoids":
        steps, values = np.arange(numel), 0.05 * white
        for frequency, phase in zip(random.uniform(1, 400, 20), random.uniform(0, 6.28, 20), strict=True):
            values = values + np.sin(2 * math.pi * round(frequency) * steps / numel + phase)
    elif data == "ar":
        values = white.copy()
        for i in range(1, numel):
            values[i] += 0.9 * values[i - 1]
    else:
        draws = {"gaussian": white, "laplace": random.laplace(size=numel), "t3": random.standard_t(3, numel)}
        values = draws[data]
    vector = torch.from_numpy(values.astype(np.float32))
    ours = relative(trip(FFT(theta=0.85, block=16384), vector)[1], vector)
    theirs = relative(trip(TopK(density=0.15, scope="group"), vector)[1], vector)
    assert theirs == pytest.approx(spatial, rel=0.1)
    if data == "sinusoids":  # depends on the noise that was added
        assert ours < 0.1 * theirs
    else:
        assert ours == pytest.approx(fft, rel=0.1)
    assert (ours < theirs) == (fft < spatial)


@pytest.mark.parametrize(
    "codec",
    [FFT(block=64), FFT(), FFT(0.97, 256, 8), FFT(0.0, 128, 16), DCT(block=64), DCT(0.97, 128, 5, 2), DCT(0.5, 64, 32)],
    ids=repr,
)
@table("numel", [1, 9, 64, 700, 5000])
def test_equals_the_reference(codec: Spectral, numel: int) -> None:
    vector = make("normal", numel)
    decoded, _, message = trip(codec, vector)
    parsed = reference.parse_spectral(message, numel, codec.theta, codec.block, codec.bits, kind_of(codec))
    np.testing.assert_allclose(decoded, parsed, rtol=0, atol=3e-6)
    exact = trip(type(codec)(codec.theta, codec.block, **EXACT), vector)[0]
    unrounded = reference.spectral(vector.numpy(), codec.theta, codec.block, kind_of(codec))
    np.testing.assert_allclose(exact, unrounded, rtol=0, atol=3e-6)


@both
def test_rounding_costs_little(cls: type[Spectral]) -> None:
    vector = make("normal", 70_000)
    rounded, exact = trip(cls(), vector)[0], trip(cls(**EXACT), vector)[0]
    assert relative(rounded - exact, exact) < 0.01


@both
def test_spectra_are_summed_before_one_inverse(cls: type[Spectral], monkeypatch: pytest.MonkeyPatch) -> None:
    codec = cls(block=64)
    plan = codec.plan(layout(64), CPU)
    messages = torch.zeros(5, plan.message_size, dtype=torch.uint8)
    vectors = [make("normal", 64, seed) for seed in range(5)]
    for vector, message in zip(vectors, messages, strict=True):
        plan.encode(vector, message, 0)
    transform, calls = type(codec.transform(64)), []
    inverse = transform.inverse
    monkeypatch.setattr(transform, "inverse", lambda *arguments: (calls.append(1), inverse(*arguments)))
    out = torch.zeros(64)
    plan.decode(messages, out, 1.0, False)
    assert len(calls) == 1
    sent = sum(make("normal", 64, seed) - vector for seed, vector in enumerate(vectors))
    torch.testing.assert_close(out, sent, rtol=0, atol=1e-5)


@both
def test_cosines_and_waves_arrive_whole(cls: type[Spectral]) -> None:
    steps = torch.arange(1024, dtype=torch.float64)
    vector = torch.cos(2 * math.pi * 8 * (steps + 0.5) / 256).float()
    _, residual, _ = trip(cls(theta=0.99, block=256, bits=16), vector)
    assert relative(residual, vector) < 1e-3


def test_the_largest_floats_saturate() -> None:
    vector = torch.full((200,), torch.finfo(torch.float32).max)
    for codec in (FFT(), DCT()):
        decoded, residual, _ = trip(codec, vector)
        assert torch.isfinite(decoded).all()
        assert torch.isfinite(residual).all()


@pytest.mark.parametrize(("bins", "keep"), [(33, 5), (64, 1), (2049, 308), (2049, 40), (5, 5), (128, 127)])
def test_places(bins: int, keep: int) -> None:
    places = Places(bins, keep)
    energy = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (6, bins)).astype(np.float32))
    energy[0] = 0
    chosen = places.largest(energy)
    expected = [sorted(sorted(range(bins), key=lambda k: -row[k])[:keep]) for row in energy.tolist()]
    assert (chosen.view(6, keep) - torch.arange(6).view(-1, 1) * bins).tolist() == expected
    packed = torch.full((6 * places.size,), 0xAB, dtype=torch.uint8)
    places.write(chosen, packed)
    assert torch.equal(places.read(packed, 6), chosen)
    assert places.size == (0 if keep == bins else min(2 * keep, math.ceil(bins / 8)))


@both
@table("theta", [0.5, 0.99])
def test_damaged_places_are_refused(cls: type[Spectral], theta: float) -> None:
    plan = cls(theta=theta, block=64).plan(layout(640), CPU)
    with pytest.raises(ValueError, match="damaged"):
        plan.decode(torch.full((1, plan.message_size), 255, dtype=torch.uint8), torch.zeros(640), 1.0, False)


@table(
    "settings, message",
    [
        ({"theta": 1.0}, r"theta must be in \[0, 1\)"),
        ({"theta": -0.1}, r"theta must be in \[0, 1\)"),
        ({"theta": "high"}, r"theta must be in \[0, 1\)"),
        ({"block": 100}, "block must be a power of two, 64 to"),
        ({"block": 1 << 17}, "block must be a power of two, 64 to"),
        ({"bits": 24}, "bits must be 2 to 16, or 32"),
        ({"mantissa": 10}, "mantissa must be 'auto', or 0 to 9"),
    ],
)
@both
def test_bad_settings(cls: type[Spectral], settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=cls.__name__ + r"\(.*" + message):
        cls(**settings)  # type: ignore[arg-type]
