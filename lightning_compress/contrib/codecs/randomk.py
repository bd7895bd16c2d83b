"""Random-k sparsification: all ranks draw the same elements, so messages hold only values and may be summed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan, check_density
from lightning_compress.codecs.quantize.levels import LARGEST
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import PER_WORD, PLACE_BITS, RandomBits, draw_places, mix


@dataclass(frozen=True)
class RandomK(Codec):
    """Send ``k = max(1, ceil(density * numel))`` random elements of each parameter, other ones in each step.

    All ranks draw the same elements, from a key that they share. A parameter is cut into k stretches of nearly equal
    length, and one element is drawn from each. Then all k positions are shifted by one common random number, modulo
    ``numel``. So the k elements differ, and each element is drawn with probability ``k / numel`` exactly.

    A message holds the values as float32 and no positions: ``32 * density`` bits per element. Messages may be summed.
    What is not sent stays in the vector. Without ``rescale``, the method is biased and needs error feedback; its
    expected squared error is ``1 - k / numel`` of the squared norm. With ``rescale``, it is unbiased and needs no error
    feedback; its expected squared error is ``numel / k - 1`` times the squared norm. No state.

    Args:
        density: share of the elements that is sent, in (0, 1]. 1 sends everything and changes nothing. Near 0, one
            element of each parameter (or of the part of it that is in the vector) is sent.
        rescale: send ``numel / k`` times the drawn elements. The vector keeps the difference. Not with ``two_shot``,
            which encodes twice.

    Raises:
        ValueError: ``density`` or ``rescale`` is invalid, or (from ``plan``) a parameter has 2^31 elements or more.

    Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599 (with error feedback).
    Wangni, Wang, Liu, Zhang, "Gradient Sparsification for Communication-Efficient Distributed Optimization", NeurIPS
    2018, arXiv 1710.09854 (rescaled; that paper's probabilities follow the gradient, these do not).
    """

    name: ClassVar[str] = "randomk"
    sum_dtype: ClassVar[torch.dtype | None] = torch.float32
    keeps_zeros: ClassVar[bool] = True
    density: float = 0.01
    rescale: bool = False

    def __post_init__(self) -> None:
        check_density("RandomK", self.density, "0.01 sends 1 %")
        if not isinstance(self.rescale, bool):
            raise ValueError(f"RandomK(rescale={self.rescale!r}): rescale must be true or false")

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        """True unless ``rescale`` is set."""
        return not self.rescale

    @property
    def reencodable(self) -> bool:  # type: ignore[override]
        """True unless ``rescale`` is set: a second encoding would rescale again."""
        return not self.rescale

    @property
    def safe_with_adam(self) -> bool:
        """True if most of the gradient is sent at once."""
        return self.density > 0.5

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return self.density

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; up to ``summands`` messages may be summed as float32."""
        return _RandomKPlan(layout, device, self, LARGEST / summands)


class _RandomKPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, codec: RandomK, limit: float) -> None:
        super().__init__(layout)
        self._limit = limit
        self._parts: list[tuple[slice, int, int]] = []  # slots in the message; offset and length in the vector
        starts, lengths, count = [], [], 0
        for segment in layout.segments:
            if segment.numel >= 2**PLACE_BITS:
                raise ValueError(
                    f"RandomK: {segment.name} has {segment.numel} elements, but 2^{PLACE_BITS} - 1 is the most; "
                    "give it to another compressor by rules, such as 'rotated'"
                )
            if segment.numel:
                k = max(1, math.ceil(codec.density * segment.numel))
                edges = torch.arange(k + 1, dtype=torch.int64).mul_(segment.numel).div_(k, rounding_mode="floor")
                starts.append(edges[:-1])
                lengths.append(edges.diff())
                self._parts.append((slice(count, count + k), segment.offset, segment.numel))
                count += k
        nothing = torch.zeros(0, dtype=torch.int64)
        self._starts = torch.cat([nothing, *starts]).to(device)
        self._lengths = torch.cat([nothing, *lengths]).to(device)
        self._places = torch.empty_like(self._starts)
        self._rescale = codec.rescale
        self._random = RandomBits(PER_WORD * count, device)
        self.message_size = 4 * count
        self.share(0)

    def share(self, key: int) -> None:
        """Draw the positions of this step; see ``Plan.share``. Until the first call, the key is 0."""
        places = draw_places(self._random, key, self._starts, self._lengths, self._places)
        for number, (slots, offset, numel) in enumerate(self._parts):
            places[slots].add_(mix(key, number) % numel).remainder_(numel).add_(offset)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        values = message.view(torch.float32)
        torch.index_select(vector, 0, self._places, out=values)
        if not self._rescale:
            vector.index_fill_(0, self._places, 0.0)
            return
        for slots, _, numel in self._parts:
            values[slots].mul_(numel / (slots.stop - slots.start))
        values.clamp_(-self._limit, self._limit)
        vector.index_add_(0, self._places, values, alpha=-1)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        if not accumulate:
            out.zero_()
        for message in messages:
            out.index_add_(0, self._places, message.view(torch.float32), alpha=weight)
