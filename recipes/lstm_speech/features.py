"""What the network hears: wavs as log-mel frames, a few of them side by side, with parts masked in training."""

from __future__ import annotations

import math
import wave
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..loading import draw

__all__ = ["Features", "Masks", "log_mel", "mel_filters", "read_wav", "spec_augment", "stack"]


def read_wav(path: Path, rate: int) -> Tensor:
    """Read a wav; the channels of stereo are averaged.

    Args:
        path: a 16-bit PCM file.
        rate: samples per second that it must have.

    Returns:
        float32 [samples] in [-1, 1].

    Raises:
        ValueError: the file is missing, truncated, empty or not such a wav, or its sample rate differs.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, found, frames = file.getparams()[:4]
            raw = file.readframes(frames)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; give the path of a wav, or correct the manifest that names it"
        ) from None
    except (wave.Error, EOFError, OSError) as error:
        reason = str(error) or "it ends inside its header"
        raise ValueError(f"{path}: not a PCM wav ({reason}); convert it: sox in.xyz -b 16 out.wav") from None
    if width != 2:
        raise ValueError(f"{path}: {8 * width} bits per sample, expected 16; convert it: sox in.wav -b 16 out.wav")
    if found != rate:
        raise ValueError(
            f"{path}: {found:,} samples per second, expected {rate:,}; convert it: sox in.wav -r {rate} out.wav, or "
            "train on a set of that rate"
        )
    if not frames:
        raise ValueError(f"{path}: no sound at all; record it again, or leave it out")
    if len(raw) < frames * channels * width:
        raise ValueError(
            f"{path}: truncated, {len(raw):,} bytes of sound where its header says {frames * channels * width:,}; "
            "copy it again, or leave it out"
        )
    samples = torch.frombuffer(bytearray(raw), dtype=torch.int16).view(frames, channels)
    return samples.float().mean(1) / 32768


WINDOW, HOP = 0.025, 0.010
"""Seconds of a frame, and from one to the next."""
FLOOR = 1e-6
"""Power added before the logarithm, so that silence is finite."""
LOWEST = 20.0
"""Hertz at which the first filter starts."""


class Features(NamedTuple):
    """How sound becomes numbers; a checkpoint keeps it, so that prediction hears as training did."""

    rate: int = 8000
    """Samples per second."""
    mels: int = 40
    """Filters, from 20 Hz to half of the rate."""
    frames: int = 3
    """Frames of 10 ms that are put side by side."""

    @property
    def size(self) -> int:
        """Numbers per step of the network."""
        return self.mels * self.frames

    def __call__(self, sound: Tensor) -> Tensor:
        """Sound float32 [samples] -> float32 [steps, size]; mean 0 and deviation 1 per filter over the utterance."""
        return stack(normalised(log_mel(sound, self.rate, self.mels)), self.frames)

    def steps(self, samples: int) -> int:
        """Steps of the network for a sound of so many samples."""
        return -(-(samples // round(HOP * self.rate) + 1) // self.frames)

    def check(self) -> None:
        """Refuse what makes no features.

        Raises:
            ValueError: a value is out of its range.
        """
        if not 4000 <= self.rate <= 192_000:
            raise ValueError(f"data.rate={self.rate}: must be from 4,000 to 192,000 samples per second; try 8000")
        if self.mels < 1 or self.frames < 1:
            raise ValueError(f"data.mels={self.mels}, data.frames={self.frames}: both at least 1; try 40 and 3")
        if int((mel_filters(self.rate, self.mels).sum(1) == 0).sum()):
            raise ValueError(
                f"data.mels={self.mels}: too many for data.rate={self.rate}, some would be narrower than a bin of the "
                f"spectrum ({self.rate / fourier_size(self.rate):.0f} Hz) and always 0; try 40"
            )


def fourier_size(rate: int) -> int:
    """Points of the transform: the next power of two that holds a window of 25 ms."""
    return 1 << (round(WINDOW * rate) - 1).bit_length()


@lru_cache
def mel_filters(rate: int, mels: int) -> Tensor:
    """Triangles of equal width on the mel scale of HTK, ``2595 log10(1 + f / 700)``, from 20 Hz to half of the rate.

    Args:
        rate: samples per second.
        mels: how many.

    Returns:
        float32 [mels, bins] with peaks of at most 1.
    """
    bins = torch.arange(fourier_size(rate) // 2 + 1, dtype=torch.float64) * rate / fourier_size(rate)
    low, high = (2595 * math.log10(1 + frequency / 700) for frequency in (LOWEST, rate / 2))
    edges = 700 * (10 ** (torch.linspace(low, high, mels + 2, dtype=torch.float64) / 2595) - 1)
    left, centre, right = (edges[start : start + mels, None] for start in range(3))
    return torch.minimum((bins - left) / (centre - left), (right - bins) / (right - centre)).clamp(min=0).float()


def log_mel(sound: Tensor, rate: int, mels: int = 40) -> Tensor:
    """Logarithm of the power in each filter, in Hann windows of 25 ms every 10 ms.

    Args:
        sound: float32 [samples] in [-1, 1], any length; ends are filled up with zeros.
        rate: samples per second.
        mels: filters.

    Returns:
        float32 [frames, mels], ``samples // hop + 1`` frames.
    """
    window, hop, points = round(WINDOW * rate), round(HOP * rate), fourier_size(rate)
    spectrum = torch.stft(
        sound,
        points,
        hop,
        window,
        torch.hann_window(window, device=sound.device),
        center=True,
        pad_mode="constant",
        return_complex=True,
    )
    power = spectrum.real.square() + spectrum.imag.square()
    return torch.log(mel_filters(rate, mels).to(sound.device) @ power + FLOOR).T.contiguous()


def normalised(frames: Tensor) -> Tensor:
    """[frames, mels] with mean 0 and deviation 1 per filter, over this utterance."""
    deviation, mean = torch.std_mean(frames, 0, correction=0)
    return (frames - mean) / (deviation + 1e-5)


def stack(frames: Tensor, count: int) -> Tensor:
    """Put ``count`` neighbours side by side: [T, mels] -> [ceil(T / count), count * mels], zeros at the end."""
    rows = -(-len(frames) // count)
    out = frames.new_zeros(rows * count, frames.shape[1])
    out[: len(frames)] = frames
    return out.view(rows, -1)


class Masks(NamedTuple):
    """How much SpecAugment hides."""

    times: int = 2
    """Stretches of time that are hidden."""
    steps: int = 5
    """Most steps of one."""
    bands: int = 2
    """Bands of filters that are hidden."""
    filters: int = 8
    """Most filters of one."""
    share: float = 0.2
    """Most of an utterance's steps that one stretch hides."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Masks:
        """Make masks from a mapping, such as a config's.

        Raises:
            ValueError: a name is unknown, or a value is out of its range.
        """
        if unknown := set(settings) - set(cls._fields):
            raise ValueError(f"data.augment.{min(unknown)}: choose from {', '.join(cls._fields)}, or augment=null")
        masks = cls(**settings)
        if min(masks[:4]) < 0 or not 0 <= masks.share <= 1:
            raise ValueError(f"data.augment={dict(settings)}: share must be from 0 to 1, the others at least 0")
        return masks


def spec_augment(batch: Tensor, lengths: Tensor, bits: Tensor, mels: int, masks: Masks) -> Tensor:
    """Hide stretches of time and bands of filters: SpecAugment (Park et al. 2019, arXiv:1904.08779) without warping.

    What is hidden becomes 0, the mean over the utterance. A band is hidden in all frames that stand side by side.

    Args:
        batch: float32 [N, T, frames * mels].
        lengths: int64 [N], steps of each utterance.
        bits: int64 [N] in [0, 2^32) that decide, as from :func:`recipes.loading.draw`.
        mels: filters per frame.
        masks: how many, and how wide.

    Returns:
        A new tensor like ``batch``.
    """
    count, steps, size = batch.shape
    numbers = torch.arange(2 * (masks.times + masks.bands), device=batch.device)
    uniform = (draw(bits[:, None] + numbers, 0, 0) >> 8).float() / 2**24  # [N, 2 masks]: a width and a place for each
    widths, places = uniform[:, 0::2], uniform[:, 1::2]
    longest = (masks.share * lengths).clamp(max=masks.steps)[:, None]
    hidden = _spans(widths[:, : masks.times], places[:, : masks.times], longest, lengths[:, None], steps)
    filters = torch.full_like(longest, masks.filters).clamp(max=mels)
    bands = _spans(
        widths[:, masks.times :], places[:, masks.times :], filters, torch.full_like(lengths, mels)[:, None], mels
    )
    hide = hidden[:, :, None, None] | bands[:, None, None, :]
    return batch.view(count, steps, size // mels, mels).masked_fill(hide, 0.0).view(count, steps, size)


def _spans(widths: Tensor, places: Tensor, longest: Tensor, total: Tensor, size: int) -> Tensor:
    """Which of ``size`` numbers lie in one of some spans: [N, spans] in [0, 1), [N, 1], [N, 1] -> bool [N, size]."""
    length = (widths * (longest.floor() + 1)).floor()  # 0 to longest, each as likely
    start = (places * (total - length + 1)).floor()
    number = torch.arange(size, device=widths.device)
    return ((number >= start[..., None]) & (number < (start + length)[..., None])).any(1)
