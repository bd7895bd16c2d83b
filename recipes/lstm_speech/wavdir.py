"""One's own recordings: a folder of wavs, and a manifest of path and transcript for each part."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from .data import PARTS, SpeechData, Utterance
from .features import read_wav
from .text import Alphabet

__all__ = ["WavDir", "read_manifest"]


def read_manifest(path: Path) -> list[tuple[Path, str]]:
    """Read lines of a wav's path and its transcript, with a tab between them.

    Args:
        path: UTF-8; wavs are named relative to its folder.

    Returns:
        Paths and transcripts, runs of blanks in these joined.

    Raises:
        ValueError: the file is missing or empty, or a line is.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").removesuffix("\n")
    except OSError as error:
        fix = "set data.root, data.train, data.val, data.test"
        raise ValueError(f"{path}: the manifest cannot be read ({error.strerror}); {fix}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the manifest is no UTF-8 ({error.reason}, byte {error.start}); convert it") from None
    rows = []
    for number, line in enumerate(text.split("\n") if text else [], 1):  # splitlines cuts at U+2028, too
        name, tab, said = line.partition("\t")
        said = " ".join(said.split())
        if not (name and tab and said):
            problem = "an empty line" if not line.strip() else f"{line!r}"
            raise ValueError(f"{path}:{number}: {problem}, expected path<TAB>transcript; correct or delete the line")
        if number == 1 and (name, said) == ("path", "transcript"):
            raise ValueError(f"{path}:1: a heading, and every line must be a wav and its transcript; delete the line")
        rows.append((path.parent / name, said))
    if not rows:
        raise ValueError(f"{path}: no lines, expected path<TAB>transcript")
    return rows


class WavDir(SpeechData):
    """Wavs of one sample rate, 16-bit PCM, all read into memory before training starts.

    The characters of the training part are what can be written; a text of another part with others is refused.

    Args:
        root: folder that the manifests lie in.
        train: name of the training manifest.
        val: of that for validation; None: no validation.
        test: of that for testing.
        train_size: use only the first so many training utterances; None: all.
        **kwargs: see :class:`SpeechData`.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        *,
        root: str = "data",
        train: str = "train.tsv",
        val: str | None = "val.tsv",
        test: str = "test.tsv",
        train_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if train_size is not None and train_size < 1:
            raise ValueError(f"data.train_size={train_size}: must be at least 1, or null for all utterances")
        self.root = Path(root)
        self.names = dict(zip(PARTS, (train, val, test), strict=True))
        self.train_size = train_size

    @cached_property
    def manifests(self) -> dict[str, list[tuple[Path, str]]]:
        """Paths and transcripts of the parts."""
        rows = {part: read_manifest(self.root / name) if name else [] for part, name in self.names.items()}
        rows["train"] = rows["train"][: self.train_size]
        return rows

    @property
    def alphabet(self) -> Alphabet:
        """See ``SpeechData.alphabet``."""
        return Alphabet.of(text for _, text in self.manifests["train"])

    def load(self) -> dict[str, list[Utterance]]:
        """See ``SpeechData.load``."""
        return {
            part: [Utterance((read_wav(path, self.features.rate) * 32768).short(), text) for path, text in rows]
            for part, rows in self.manifests.items()
        }
