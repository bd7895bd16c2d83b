"""The Free Spoken Digit Dataset (Jackson et al.): single digits by six speakers, joined into strings."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .data import PARTS, SpeechData, Utterance
from .features import read_wav
from .text import ALPHABET, WORDS, Alphabet, cuts

__all__ = ["FSDD"]

FOLDERS = ("free-spoken-digit-dataset/recordings", "recordings")
"""Where the wavs lie below ``data.root``, if not in it."""
NAME = re.compile(r"([0-9])_([^_]+)_([0-9]+)\.wav")
TEST_TAKES = range(5)
VAL_TAKES = range(5, 8)


class Recording(NamedTuple):
    """A file, and what its name says."""

    path: Path
    digit: int
    speaker: str
    take: int


class FSDD(SpeechData):
    """Strings of 3 to 5 digits, each from recordings of one speaker and one part.

    The official split: takes 0 to 4 of each speaker and digit are the test part; 5 to 7 are for validation, the others
    for training. ``leave_out`` takes a speaker out of all three, who then is the test part with all takes; training has
    takes 0 to 4 of the others as well. Which recordings are joined follows from ``corpus_seed`` alone.

    Args:
        root: holds ``free-spoken-digit-dataset/``, or ``recordings/``, or the wavs: 8 kHz, 16 bits, named
            ``digit_speaker_take.wav``.
        leave_out: a speaker's name; None: the official split.
        train_size: strings of the training part; 630 are each of its recordings once.
        val_size: strings of the validation part; 0: none.
        test_size: strings of the test part; 75 are each of its recordings once.
        corpus_seed: of the strings.
        **kwargs: see :class:`SpeechData`.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        *,
        root: str = "data",
        leave_out: str | None = None,
        train_size: int = 1800,
        val_size: int = 90,
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
        self.root = Path(root)
        self.leave_out = leave_out
        self.sizes = dict(zip(PARTS, (train_size, val_size, test_size), strict=True))
        self.corpus_seed = corpus_seed

    @property
    def alphabet(self) -> Alphabet:
        """Letters of the ten words, and the space."""
        return ALPHABET

    def load(self) -> dict[str, list[Utterance]]:
        """See ``SpeechData.load``."""
        recordings = self._recordings()
        speakers = sorted({each.speaker for each in recordings})
        if self.leave_out is not None and (self.leave_out not in speakers or len(speakers) < 2):
            raise ValueError(
                f"data.leave_out={self.leave_out!r}: choose one of {', '.join(speakers)}, or null for the official "
                "split"
            )
        shares: dict[str, list[Recording]] = {part: [] for part in PARTS}
        for each in recordings:
            shares[self._part(each)].append(each)
        return {part: self._strings(part, share) for part, share in shares.items()}

    def _recordings(self) -> list[Recording]:
        folder = next((self.root / each for each in FOLDERS if (self.root / each).is_dir()), self.root)
        fix = (
            f"set data.root to the folder that holds {FOLDERS[0]} (a clone of https://github.com/Jakobovski/"
            "free-spoken-digit-dataset), or take data=spoken, which needs no files"
        )
        paths = sorted(folder.glob("*.wav"))
        if not paths:
            raise ValueError(f"data.root={str(self.root)!r}: no wav in {folder}; {fix}")
        recordings = []
        for path in paths:
            if not (match := NAME.fullmatch(path.name)):
                raise ValueError(f"{path}: expected a name such as 7_jackson_32.wav, digit_speaker_take; {fix}")
            recordings.append(Recording(path, int(match[1]), match[2], int(match[3])))
        return recordings

    def _part(self, recording: Recording) -> str:
        if (self.leave_out is None and recording.take in TEST_TAKES) or recording.speaker == self.leave_out:
            return "test"
        return "val" if recording.take in VAL_TAKES and self.sizes["val"] else "train"

    def _strings(self, part: str, share: list[Recording]) -> list[Utterance]:
        """Read the recordings of a part, and join them; speakers take turns."""
        if not self.sizes[part]:
            return []
        if not share:
            raise ValueError(f"data.root={str(self.root)!r}: no recording for the {part} part; are all takes there?")
        voices: dict[str, list[Recording]] = defaultdict(list)
        for recording in share:
            voices[recording.speaker].append(recording)
        sounds = {each.path: _int16(each.path, self.features.rate) for each in share}
        rng = np.random.default_rng((self.corpus_seed, PARTS.index(part)))
        turns = [
            [(voice, places) for places in islice(cuts(len(voice), rng), -(-self.sizes[part] // len(voices)))]
            for voice in voices.values()
        ]
        strings = [string for turn in zip(*turns, strict=True) for string in turn][: self.sizes[part]]
        return [
            Utterance(
                torch.cat([sounds[voice[place].path] for place in places]),
                " ".join(WORDS[voice[place].digit] for place in places),
            )
            for voice, places in strings
        ]


def _int16(path: Path, rate: int) -> torch.Tensor:
    return (read_wav(path, rate) * 32768).short()
