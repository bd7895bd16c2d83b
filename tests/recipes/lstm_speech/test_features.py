"""What the network hears, against the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.loading import draw
from recipes.lstm_speech.features import Features, Masks, log_mel, mel_filters, spec_augment, stack
from tests.helpers.sounds import tone


def slow_log_mel(sound: np.ndarray, rate: int, mels: int) -> np.ndarray:
    """Frame by frame, with a Fourier transform by its sum."""
    window, hop = round(0.025 * rate), round(0.010 * rate)
    points = 2 ** math.ceil(math.log2(window))
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    padded = np.pad(sound, points // 2)
    basis = np.exp(-2j * np.pi * np.outer(np.arange(points // 2 + 1), np.arange(points)) / points)
    to_mel, edges = lambda f: 2595 * math.log10(1 + f / 700), []
    for place in np.linspace(to_mel(20), to_mel(rate / 2), mels + 2):
        edges.append(700 * (10 ** (place / 2595) - 1))
    rows = []
    for start in range(0, len(sound) + 1, hop):
        framed, left = np.zeros(points), (points - window) // 2
        framed[left : left + window] = padded[start + left : start + left + window] * hann
        power = np.abs(basis @ framed) ** 2
        row = []
        for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False):
            total = 0.0
            for number, value in enumerate(power):
                frequency = number * rate / points
                total += max(0.0, min((frequency - low) / (middle - low), (high - frequency) / (high - middle))) * value
            row.append(math.log(total + 1e-6))
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize(
    ("rate", "mels", "samples"), [(8000, 40, 1000), (16000, 24, 1601), (11025, 30, 7), (8000, 40, 0)]
)
def test_log_mel_by_its_definition(rate: int, mels: int, samples: int) -> None:
    sound = np.random.default_rng(0).uniform(-1, 1, samples)
    wanted = slow_log_mel(sound, rate, mels)
    got = log_mel(torch.tensor(sound, dtype=torch.float32), rate, mels)
    assert len(got) == samples // round(0.010 * rate) + 1
    np.testing.assert_allclose(got.numpy(), wanted, atol=2e-4)


@pytest.mark.parametrize("frequency", [200, 1000, 3000])
def test_a_tone_is_loudest_in_its_filter(frequency: float) -> None:
    frames = log_mel(torch.tensor(tone(frequency, 0.3) / 32768, dtype=torch.float32), 8000)
    mel = 2595 * math.log10(1 + frequency / 700)
    low, high = (2595 * math.log10(1 + each / 700) for each in (20, 4000))
    assert abs(frames[10].argmax().item() + 1 - (mel - low) / (high - low) * 41) <= 1


def test_mean_deviation_and_steps() -> None:
    features = Features(8000, 40, 3)
    sound = torch.randn(4321, generator=torch.Generator().manual_seed(0))
    out = features(sound)
    assert out.shape == (features.steps(4321), 120) == (19, 120)
    frames = out.view(-1, 40)[: 4321 // 80 + 1]
    torch.testing.assert_close(frames.mean(0), torch.zeros(40), atol=1e-5, rtol=0)
    torch.testing.assert_close(frames.std(0, correction=0), torch.ones(40), atol=1e-3, rtol=0)
    assert features(torch.zeros(500)).isfinite().all()  # silence
    torch.testing.assert_close(features(sound), features(sound / 8), atol=0.05, rtol=0)  # loudness hardly matters
    assert stack(torch.ones(4, 2), 3).tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("wrong", [Features(1000), Features(mels=0), Features(frames=0), Features(8000, 128)])
def test_impossible_features_are_refused(wrong: Features) -> None:
    with pytest.raises(ValueError, match=r"data\.(rate|mels)=.*try"):
        wrong.check()


def test_filters_cover_the_spectrum() -> None:
    filters = mel_filters(8000, 40)
    assert filters.shape == (40, 129)
    assert (filters.sum(1) > 0).all()
    assert (filters.sum(0)[2:-7] > 0.99).all()  # neighbours overlap by half


MASKS = Masks(times=2, steps=5, bands=1, filters=8, share=0.2)


def test_masks_depend_on_the_example_alone() -> None:
    batch, lengths = torch.randn(6, 50, 120), torch.tensor([50, 40, 30, 20, 10, 4])
    rows = torch.tensor([3, 1, 4, 15, 9, 2])
    together = spec_augment(batch, lengths, draw(rows, 2, 7), 40, MASKS)
    part = torch.tensor([4, 0])
    alone = spec_augment(batch[part, :50], lengths[part], draw(rows[part], 2, 7), 40, MASKS)
    assert torch.equal(together[part], alone)
    assert not torch.equal(together, spec_augment(batch, lengths, draw(rows, 3, 7), 40, MASKS))
    assert torch.equal(spec_augment(batch, lengths, draw(rows, 2, 7), 40, Masks(0, 5, 0, 8)), batch)


def test_masks_are_as_wide_as_they_may_be() -> None:
    count = 2000
    lengths = torch.full((count,), 20)
    out = spec_augment(torch.ones(count, 20, 120), lengths, draw(torch.arange(count), 0, 0), 40, Masks(1, 5, 1, 8, 0.2))
    hidden = out.view(count, 20, 3, 40) == 0
    bands = hidden.all(2).all(1)  # [count, 40]
    steps = hidden.all(3).all(2)  # [count, 20]
    assert torch.equal(hidden, (steps[:, :, None] | bands[:, None])[:, :, None].expand_as(hidden))
    for spans, most in ((steps.sum(1), 4), (bands.sum(1), 8)):  # a share of 0.2 of 20 steps; 8 filters
        assert torch.bincount(spans, minlength=most + 1).div(count).sub(1 / (most + 1)).abs().max() < 0.03
    assert (steps.float().mean(0) > 0.02).all()  # any place
    assert (bands.float().mean(0) > 0.01).all()


class WithoutDoubles(TorchDispatchMode):
    """A device that has no float64, as MPS."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        assert getattr(out, "dtype", None) != torch.float64, function
        return out


def test_masks_need_no_float64() -> None:
    with WithoutDoubles():
        spec_augment(torch.ones(4, 20, 120), torch.full((4,), 20), draw(torch.arange(4), 0, 0), 40, MASKS)


@pytest.mark.parametrize("wrong", [{"time": 1}, {"share": 1.5}, {"bands": -1}])
def test_wrong_masks_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"data\.augment"):
        Masks.of(wrong)
