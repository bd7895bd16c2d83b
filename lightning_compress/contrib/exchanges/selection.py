"""Who may use exchanges that drop elements, what they leave alone, and sections as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense
from lightning_compress.exchanges.exchange import gather, scatter
from lightning_compress.exchanges.message import Section


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
