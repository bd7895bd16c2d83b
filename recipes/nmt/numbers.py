"""Numbers and dates in English and German words: a real pair of languages that needs no download."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from babel.dates import format_date
from lightning.pytorch.utilities import rank_zero_info
from num2words import num2words

from ..loading import made_once, release
from .data import PARTS, Pair, TranslationData

__all__ = ["Numbers", "drawn"]

LANGUAGES = ("en", "de")


def _cardinal(number: int) -> Pair:
    return Pair(*(str(num2words(number, lang=each)) for each in LANGUAGES))


def _ordinal(number: int) -> Pair:
    return Pair(*(str(num2words(number, lang=each, to="ordinal")) for each in LANGUAGES))


def _year(number: int) -> Pair:
    return Pair(*(str(num2words(number, lang=each, to="year")) for each in LANGUAGES))


def _date(number: int) -> Pair:
    day = datetime.date.fromordinal(number)
    return Pair(*(format_date(day, "full", locale=each) for each in LANGUAGES))


KINDS: tuple[tuple[Callable[[int], Pair], int, int], ...] = (
    (_cardinal, 0, 1_000_000),
    (_ordinal, 1, 10_000),
    (_year, 1000, 2100),
    (_date, datetime.date(1900, 1, 1).toordinal(), datetime.date(2100, 1, 1).toordinal()),
)
"""What is written, and the range of numbers that it is written of."""
MOST = 100_000
"""Pairs that the kinds can give without repeating themselves too often."""
VERSION = 2
"""Of how pairs follow from their count and the draw; part of their file's name."""


def drawn(count: int, seed: int) -> list[Pair]:
    """Pairs of all kinds, no sentence of either language twice, the same for the same seed.

    Args:
        count: how many, at most ``MOST``.
        seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    pairs: dict[str, Pair] = {}
    targets: set[str] = set()  # "ten eighty-two" and "one thousand and eighty-two" have one translation
    while len(pairs) < count:
        make, low, high = KINDS[rng.choice(len(KINDS), p=(0.4, 0.15, 0.05, 0.4))]
        # Few digits as often as many
        number = int(10 ** rng.uniform(0, 6)) if make is _cardinal else int(rng.integers(low, high))
        pair = make(number)
        if pair.source not in pairs and pair.target not in targets:
            pairs[pair.source] = pair
            targets.add(pair.target)
    return list(pairs.values())


class Numbers(TranslationData):
    """Cardinals to a million, ordinals, years and dates; no sentence of either language is in two parts.

    Args:
        train_size: training pairs, at least 1.
        val_size: validation pairs, at least 0.
        test_size: test pairs, at least 1.
        draw: seed of what is drawn; training's own seed has no part in it, so every run is measured on the same.
        **kwargs: see :class:`~recipes.nmt.data.TranslationData`.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self, *, train_size: int = 8000, val_size: int = 500, test_size: int = 500, draw: int = 0, **kwargs: Any
    ) -> None:
        if train_size is None:
            raise ValueError(f"data.train_size=null: numbers are drawn, so say how many; at most {MOST:,}")
        super().__init__(train_size=train_size, **kwargs)
        total = train_size + val_size + test_size
        if val_size < 0 or test_size < 1 or total > MOST:
            raise ValueError(
                f"data.train_size={train_size}, data.val_size={val_size}, data.test_size={test_size}: val must be at "
                f"least 0, test at least 1, {MOST:,} together at most"
            )
        self.sizes = train_size, val_size, test_size
        self.draw = draw

    def load(self) -> dict[str, list[Pair]]:
        """See ``TranslationData.load``; test and validation stay the same when the training part grows."""
        libraries = "-".join(map(release, ("num2words", "babel")))
        path = self.cache / "nmt" / f"numbers{VERSION}-{libraries}-{sum(self.sizes)}-{self.draw}.tsv"

        def write(draft: Path) -> None:
            rank_zero_info(f"writing {sum(self.sizes):,} numbers and dates in English and German into {path}")
            with draft.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, delimiter="\t", lineterminator="\n").writerows(drawn(sum(self.sizes), self.draw))

        text = made_once(path, write).read_text("utf-8")
        pairs = [Pair(*row) for row in csv.reader(io.StringIO(text), delimiter="\t")]
        train, val, test = self.sizes
        cuts = {"test": (0, test), "val": (test, test + val), "train": (test + val, test + val + train)}
        return {part: pairs[slice(*cuts[part])] for part in PARTS}
