"""Small sets of sound files."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import numpy as np


def write_wav(path: Path, samples: np.ndarray, rate: int = 8000) -> None:
    """Samples of 16 bits, [frames] or [frames, channels]."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1 if samples.ndim == 1 else samples.shape[1], 2, rate, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())


def tone(frequency: float, seconds: float, rate: int = 8000) -> np.ndarray:
    """A sine at half of full scale."""
    return 16384 * np.sin(2 * math.pi * frequency * np.arange(round(seconds * rate)) / rate)


def write_fsdd(folder: Path, speakers: tuple[str, ...] = ("ada", "bob"), takes: int = 10) -> Path:
    """Every digit by every speaker: a tone whose first sample tells digit, speaker and take."""
    (folder / "recordings").mkdir(parents=True)
    for number, speaker in enumerate(speakers):
        for digit in range(10):
            for take in range(takes):
                samples = tone(300 + 100 * digit, 0.2)
                samples[0] = 1000 * number + 100 * digit + take
                write_wav(folder / "recordings" / f"{digit}_{speaker}_{take}.wav", samples)
    return folder


def write_wavdir(folder: Path, texts: tuple[str, ...] = ("one two", "two", "one", "two one")) -> Path:
    """The same utterances for training, validation and testing."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(texts)):
        write_wav(folder / f"{number}.wav", tone(300 + 100 * number, 0.5))
    for part in ("train", "val", "test"):
        lines = [f"{number}.wav\t{text}\n" for number, text in enumerate(texts)]
        (folder / f"{part}.tsv").write_text("".join(lines))
    return folder
