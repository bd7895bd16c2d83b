"""Top-k sparsification: the elements of largest magnitude, with their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.base import Codec, Plan
from lightning_compress.codecs.choice import Choice
from lightning_compress.codecs.entries import Entries, EntriesPlan, Found, VariableEntriesPlan
from lightning_compress.codecs.positions import positions_of
from lightning_compress.codecs.topk_floats import FloatsPlan
from lightning_compress.codecs.topk_fused import FusedFloats
from lightning_compress.codecs.values import FloatValues, FourMeans, OneMagnitude, Values
from lightning_compress.layout import Layout

Scope = Literal["parameter", "group"]
Selection = Literal["exact", "sampled"]
ValueCoding = Literal["fp32", "fp16", "2bit", "1bit"]
IndexCoding = Literal["int32", "int16", "bitmap", "rice", "auto"]
ALLOWED: dict[str, tuple[str, ...]] = {
    "scope": get_args(Scope),
    "selection": get_args(Selection),
    "values": get_args(ValueCoding),
    "indices": get_args(IndexCoding),
}


@dataclass(frozen=True)
class TopK(Codec):
    """Send the ``k = max(1, ceil(density * numel))`` elements of largest magnitude; the others stay in the vector.

    A message is ``K`` int32 places in the vector, ascending within a parameter, then ``K`` float32 values, for the sum
    ``K`` of all ``k``: ``64 * density`` bits per element. Values are exact, and what is sent is 0 in the vector. The
    method is biased and needs error feedback.

    Other codings of places and values take less; what rounding values did stays in the vector. Bits of each element
    that is sent, of one in 100:

    | indices | bits | | values | bits |
    |---|---|---|---|---|
    | int32 | 32 | | fp32 | 32 |
    | int16, in blocks of 65536 | 16 | | fp16, at most 65504 | 16 |
    | bitmap | 1 / density: 100 | | 2bit, two means of each sign | 2, and 128 per parameter |
    | rice, Golomb-Rice codes of gaps | 8.1; 4.8 of one in 10 | | 1bit, the mean magnitude | 1, and 32 per parameter |

    The means are those of what is kept of each parameter (of the vector, with scope "group"), in float64. With any of
    these a message is the places and then the values, without padding between; ``positions`` and ``values`` say how.
    With "rice" it varies in length, and never needs more than its room. All but int32 with fp32 or fp16 write and read
    messages on the host, also for vectors on an accelerator, which waits for them.

    Args:
        density: share that is sent, in (0, 1]: 1 sends everything and changes nothing; near 0 sends one element.
        scope: "parameter" takes the share of each parameter (or of the part of it that is in the vector), which is
            safe where gradients differ in scale; "group" takes it of the whole vector.
        selection: how the k largest, the first ones among equals, are found; either way sends the same message.
            "sampled" takes a threshold from a strided sample, which somewhat more than k should reach, selects among
            what did, and lowers it where fewer did. "exact" selects among all: several times as slow on a CPU, and 12
            bytes per element of memory, but no slower for misleading gradients.
        values: "fp32", "fp16", "2bit" or "1bit".
        indices: "int32", "int16", "bitmap", "rice", or "auto": whichever takes the fewest bytes for the layout.

    Raises:
        ValueError: a setting is none of these, or (from ``plan``) the vector has 2^31 elements or more.

    Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017 (thresholds from a sample; local
    and global scope; values of 1 and 2 bits, whose details are ours). Lin, Han, Mao, Wang, Dally, "Deep Gradient
    Compression", ICLR 2018 (a second selection among what passed the threshold).
    """

    contractive: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    density: float = 0.01
    scope: Scope = "parameter"
    selection: Selection = "sampled"
    values: ValueCoding = "fp32"
    indices: IndexCoding = "int32"

    def __post_init__(self) -> None:
        if not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise ValueError(f"TopK(density={self.density!r}): density must be in (0, 1]; 0.01 sends 1 %")
        for field, allowed in ALLOWED.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"TopK({field}={value!r}): {field} must be one of {', '.join(map(repr, allowed))}")

    @property
    def safe_with_adam(self) -> bool:
        """Only where most of the gradient is sent at once, and closely."""
        return self.density > 0.1 and self.values in ("fp32", "fp16")

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return self.density

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        choice = Choice(self.density, self.scope == "parameter", self.selection == "sampled", layout, device)
        if self.indices == "int32" and self.values in ("fp32", "fp16"):
            dtype, fused = torch.float32 if self.values == "fp32" else torch.float16, kernels.fused(device)
            if fused:
                return FusedFloats(fused, layout, device, choice, dtype)
            return FloatsPlan(layout, device, choice, dtype)
        positions = positions_of(self.indices, layout.numel, choice.most)
        parts = len(choice.ends)
        values: Values = FloatValues(parts, np.float32 if self.values == "fp32" else np.float16)
        if self.values in ("1bit", "2bit"):
            values = OneMagnitude(parts) if self.values == "1bit" else FourMeans(parts)
        entries = Entries(positions, values, choice.ends)
        if positions.variable:
            return _VariablePlan(layout, entries, choice)
        return _CodedPlan(layout, entries, choice)


class _Finder(EntriesPlan):
    """Finds the elements that a choice makes, without zeros."""

    _choice: Choice

    def _find(self, vector: Tensor, key: int) -> Sequence[Found]:
        indices = torch.empty(self._choice.most, dtype=torch.int32, device=vector.device)
        values = torch.empty(self._choice.most, device=vector.device)
        self._choice.make(vector, key, indices, values)
        numbers = values.cpu().numpy()
        places = np.flatnonzero(numbers)
        return [(indices.cpu().numpy()[places].astype(np.int64), numbers[places])]


class _CodedPlan(_Finder):
    def __init__(self, layout: Layout, entries: Entries, choice: Choice) -> None:
        super().__init__(layout, [entries])
        self._choice = choice


class _VariablePlan(VariableEntriesPlan, _Finder):
    def __init__(self, layout: Layout, entries: Entries, choice: Choice) -> None:
        super().__init__(layout, [entries], entries.size)
        self._choice = choice
