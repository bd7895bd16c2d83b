"""Strings of digits, spoken by the espeak-ng synthesiser: real waves, nothing to download."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..loading import made_once, release
from . import speaking
from .data import PARTS, SpeechData, Utterance
from .text import ALPHABET, WORDS, Alphabet

__all__ = ["Spoken"]

ACCENTS = ("en-us", "en", "en-gb-scotland", "en-029", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc")
VARIANTS = {
    "train": ("m1", "m2", "m3", "m5", "m6", "m7", "f1", "f2", "f4", "Andy", "Alex", "steph", "steph2", "adam", "linda"),
    "val": ("m8", "f5"),
    "test": ("m4", "f3", "Annie", "edward"),
}
"""Voices of each part: those of the tests are not heard in training."""
SPEEDS, PITCHES = (110, 240), (20, 80)
"""Words per minute, and espeak's scale of 0 to 99: from and to."""
VERSION = 1
"""Of how a corpus follows from its settings; part of its file's name."""


class Spoken(SpeechData):
    """Strings of 3 to 5 digits in 8 accents of English, by 15 synthetic voices; 4 others speak the test part.

    The corpus follows from ``rate``, the sizes and ``corpus_seed`` alone; it is spoken once, in seconds, into
    ``cache``.

    Args:
        cache: folder of the corpora.
        train_size: strings of the training part.
        val_size: strings of the validation part; 0: none.
        test_size: strings of the test part.
        corpus_seed: of what is said, and how.
        **kwargs: see :class:`SpeechData`.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        *,
        cache: str = "~/.cache/lightning_compress",
        train_size: int = 1600,
        val_size: int = 100,
        test_size: int = 300,
        corpus_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if min(train_size, test_size) < 1 or val_size < 0:
            raise ValueError(
                f"data.train_size={train_size}, data.val_size={val_size}, data.test_size={test_size}: strings, at "
                "least 1 for training and testing, 0 for validation"
            )
        self.cache = Path(cache).expanduser()
        self.sizes = dict(zip(PARTS, (train_size, val_size, test_size), strict=True))
        self.corpus_seed = corpus_seed

    @property
    def alphabet(self) -> Alphabet:
        """Letters of the ten words, and the space."""
        return ALPHABET

    def load(self) -> dict[str, list[Utterance]]:
        """See ``SpeechData.load``."""
        sentences = {part: self._sentences(part) for part in PARTS}
        texts = {part: [each["text"] for each in sentences[part]] for part in PARTS}
        sounds = iter(self._sounds([each for part in PARTS for each in sentences[part]]))
        return {part: [Utterance(next(sounds), text) for text in texts[part]] for part in PARTS}

    def _sentences(self, part: str) -> list[dict[str, Any]]:
        """What is said in a part, and how; all voices take turns."""
        rng = np.random.default_rng((self.corpus_seed, PARTS.index(part)))
        voices = [f"{accent}+{variant}" for accent, variant in product(ACCENTS, VARIANTS[part])]
        order = rng.permutation(len(voices))
        return [
            {
                "voice": voices[order[number % len(voices)]],
                "text": " ".join(WORDS[digit] for digit in rng.integers(0, 10, rng.integers(3, 6))),
                "speed": int(rng.integers(*SPEEDS)),
                "pitch": int(rng.integers(*PITCHES)),
            }
            for number in range(self.sizes[part])
        ]

    def _sounds(self, sentences: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Read the corpus; the first process that wants it makes it."""
        job = json.dumps(
            {
                "version": VERSION,
                "voices": release("espeakng-loader"),
                "rate": self.features.rate,
                "sentences": sentences,
            }
        )
        path = self.cache / f"spoken-{hashlib.sha256(job.encode()).hexdigest()[:16]}.npz"
        made_once(path, lambda draft: _make(job, draft))
        try:
            with path.open("rb") as file, np.load(file) as corpus:
                samples, ends = torch.from_numpy(corpus["samples"]), corpus["ends"].tolist()
            return [samples[start:end] for start, end in zip([0, *ends], [*ends, ends[-1]], strict=True)][: len(ends)]
        except Exception as error:  # whatever a damaged archive makes NumPy and zlib say
            raise ValueError(f"{path}: damaged ({error}); delete it, and it is made anew") from None


def _make(job: str, path: Path) -> None:
    """Speak a corpus into ``path``."""
    with tempfile.TemporaryDirectory() as scratch:
        order = Path(scratch) / "job.json"
        order.write_text(job, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, speaking.__file__, str(order), str(path)], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            reason = (done.stdout.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ValueError(
                f"data=spoken: the synthesiser cannot be used ({reason}); pip install --force-reinstall "
                "espeakng-loader, or take data=fsdd with recordings in data.root"
            )
