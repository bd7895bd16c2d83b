"""Checks for exchanges that drop elements, and sections as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense
from lightning_compress.exchanges.exchange import gather, scatter
from lightning_compress.exchanges.message import Section


def check_fed_back(name: str, codec: Codec) -> None:
    """Raise ValueError if a codec has no error feedback, which exchanges that drop elements need."""
    if not codec.contractive and not isinstance(codec, Dense):
        raise ValueError(
            f"exchange={name!r} drops the smaller sums, which only error feedback sends later, and {codec} has none: "
            "use exchange='auto', or a compressor such as 'topk'"
        )


def keeps_all(codec: Codec) -> bool:
    """Return whether the codec sends all elements."""
    return isinstance(codec, Dense) or getattr(codec, "density", None) == 1


class Compact:
    """The sections of a vector as one tensor: a view if they are adjacent, else a copy."""

    def __init__(self, sections: Sequence[Section], device: torch.device) -> None:
        self._spans = [each.span for each in sections if each.layout.numel]
        self.numel = sum(span.stop - span.start for span in self._spans)
        starts = [span.start for span in self._spans[1:]]
        adjacent = starts == [span.stop for span in self._spans[:-1]]
        self._copy = None if adjacent else torch.zeros(self.numel, dtype=torch.float32, device=device)

    def take(self, vector: Tensor) -> Tensor:
        """Return the sections of the vector, float32 ``[numel]``."""
        if self._copy is None:
            return vector[self._spans[0].start : self._spans[-1].stop] if self._spans else vector[:0]
        gather(vector, self._spans, self._copy)
        return self._copy

    def put(self, taken: Tensor, vector: Tensor) -> None:
        """Write back the changed tensor that ``take`` returned."""
        if self._copy is not None:
            scatter(taken, self._spans, vector)
