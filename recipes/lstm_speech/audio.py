"""Sound files: 16-bit PCM wavs in, float32 waves out."""

from __future__ import annotations

import wave
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["read_wav"]


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
