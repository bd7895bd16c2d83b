"""What exchanges of sums have in common: who may use them, what to expect, and sections as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense, RandomK
from lightning_compress.exchanges.base import gather, scatter
from lightning_compress.exchanges.message import Section


def check_selective(name: str, codec: Codec) -> None:
    """Refuse a method that sends most elements.

    Raises:
        ValueError: it does.
    """
    if not codec.sparse and not isinstance(codec, Dense | RandomK):
        raise ValueError(
            f"exchange={name!r} sends sums as they are, which pays where few elements are sent; "
            f"{codec} sends all of them: use exchange='auto' or 'two_shot'"
        )


def check_fed_back(name: str, codec: Codec) -> None:
    """Refuse a method without error feedback, for exchanges that drop elements on the way.

    Raises:
        ValueError: it has none.
    """
    if not codec.contractive and not isinstance(codec, Dense):
        raise ValueError(
            f"exchange={name!r} drops the smaller sums, which only error feedback brings back, and {codec} goes "
            "without: use exchange='auto', or a compressor such as 'topk'"
        )


def keeps_all(codec: Codec) -> bool:
    """Whether everything is meant to arrive."""
    return isinstance(codec, Dense) or getattr(codec, "density", None) == 1


def expected_count(sections: Sequence[Section], ranks: int, start: int = 0, stop: int | None = None) -> float:
    """Elements that one of so many ranks selects at least, if they select independently, or all alike.

    Args:
        sections: side by side.
        ranks: how many select.
        start: first element to count.
        stop: one past the last; None: all that there are.
    """
    count, end = 0.0, 0
    for section in sections:
        first, end = end, end + section.layout.numel
        inside = max(0, min(end, end if stop is None else stop) - max(first, start))
        choices = ranks if section.codec.sum_dtype is None else 1  # what may be summed is of the same elements
        count += inside * (1 - (1 - section.codec.sent_share) ** choices)
    return count


class Compact:
    """The sections of a vector as one tensor: a view where they are neighbours, else a copy."""

    def __init__(self, sections: Sequence[Section], device: torch.device) -> None:
        self._spans = [each.span for each in sections if each.layout.numel]
        self.numel = sum(span.stop - span.start for span in self._spans)
        starts = [span.start for span in self._spans[1:]]
        beside = starts == [span.stop for span in self._spans[:-1]]
        self._copy = None if beside else torch.zeros(self.numel, device=device)

    def take(self, vector: Tensor) -> Tensor:
        """What stands there, float32 ``[numel]``."""
        if self._copy is None:
            return vector[self._spans[0].start : self._spans[-1].stop] if self._spans else vector[:0]
        gather(vector, self._spans, self._copy)
        return self._copy

    def put(self, taken: Tensor, vector: Tensor) -> None:
        """Make it stand there again, after what ``take`` gave was changed."""
        if self._copy is not None:
            scatter(taken, self._spans, vector)
