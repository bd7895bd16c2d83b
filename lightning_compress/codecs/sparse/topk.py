"""Top-k sparsification: sends the elements of largest magnitude, with their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan, check_density
from lightning_compress.codecs.packing.entries import Entries, EntriesPlan, Found
from lightning_compress.codecs.packing.positions import positions_of
from lightning_compress.codecs.packing.values import FloatValues, FourMeans, OneMagnitude, Values
from lightning_compress.codecs.sparse.selection import Choice, FloatsPlan, Slots, rank_of, stride_of
from lightning_compress.core.layout import Layout


def _part(kernel: ModuleType, part: range, k: int, sampled: bool) -> Any:
    """Return a part in the GPU kernel's form, with the same sample as on a CPU."""
    numel = len(part)
    stride = stride_of(numel, k) if sampled and k < numel else 0
    few, more = (rank_of(numel // stride + extra, numel, k) if stride else 0 for extra in (0, 1))
    return kernel.Part(part.start, numel, k, stride if few or more else 0, few, more)


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
    """Send the ``k = max(1, ceil(density * numel))`` elements of largest magnitude. The others stay in the vector.

    A message is K int32 positions in the vector, ascending within a parameter, then K float32 values, where K is the
    sum of all ``k``. That is ``64 * density`` bits per element. Values are exact, and a sent element becomes 0 in the
    vector. The method is biased and needs error feedback.

    Other codings of positions and values take fewer bits. If values are rounded, the errors stay in the vector. Bits
    per sent element at density 0.01:

    | indices | bits |
    |---|---|
    | int32 | 32 |
    | int16, in blocks of 65536 | 16 |
    | bitmap | 100, which is 1 / density |
    | rice, Golomb-Rice codes of gaps | 8.1 (4.8 at density 0.1) |

    | values | bits |
    |---|---|
    | fp32 | 32 |
    | fp16, at most 65504 | 16 |
    | 2bit, two means of each sign | 2, and 128 per parameter |
    | 1bit, the mean magnitude | 1, and 32 per parameter |

    The means are those of a parameter's sent elements (of all sent elements, with scope "group"), computed in float64.
    With these codings a message is the positions and then the values, without padding; the format is documented in
    ``codecs/packing/positions.py`` and ``codecs/packing/values.py``. With "rice", the length varies up to
    ``message_size``. Only int32 with fp32 or fp16 is encoded and decoded on an accelerator; the other codings run on
    the host, which waits for it.

    Args:
        density: share of the elements that is sent, in (0, 1]. 1 sends everything and changes nothing. Near 0, one
            element is sent.
        scope: "parameter" sends the share of each parameter (or of the part of it that is in the vector). That is safe
            if gradients differ in scale. "group" sends the share of the whole vector.
        selection: how the k largest elements are found. Both ways send the same message; of equal elements the first
            are taken. "sampled" takes a threshold from a strided sample, such that slightly more than k elements should
            reach it, and selects among these. If fewer reach it, it is lowered. "exact" selects among all elements: on
            a CPU it is several times slower and needs 12 bytes of memory per element, but its time never depends on the
            gradients.
        values: "fp32", "fp16", "2bit" or "1bit".
        indices: "int32", "int16", "bitmap", "rice", or "auto" for the one with the fewest bytes for the layout.

    Raises:
        ValueError: a setting is out of range, or (from ``plan``) the vector has 2^31 elements or more.

    Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017 (thresholds from a sample; local
    and global scope; values of 1 and 2 bits, whose details are ours). Lin, Han, Mao, Wang, Dally, "Deep Gradient
    Compression", ICLR 2018 (a second selection among what passed the threshold).
    """

    name: ClassVar[str] = "topk"
    contractive: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    density: float = 0.01
    scope: Scope = "parameter"
    selection: Selection = "sampled"
    values: ValueCoding = "fp32"
    indices: IndexCoding = "int32"

    def __post_init__(self) -> None:
        check_density("TopK", self.density, "0.01 sends 1 %")
        for field, allowed in ALLOWED.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"TopK({field}={value!r}): {field} must be one of {', '.join(map(repr, allowed))}")

    @property
    def rounds(self) -> bool:
        """See ``Codec.rounds``."""
        return self.values != "fp32"

    @property
    def safe_with_adam(self) -> bool:
        """True if much of the gradient is sent at once, with at most small errors."""
        return self.density > 0.1 and self.values in ("fp32", "fp16")

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return self.density

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        choice = Choice(self.density, self.scope == "parameter", self.selection == "sampled", layout, device)
        if self.indices == "int32" and self.values in ("fp32", "fp16"):
            slots = Slots(choice.most, torch.float32 if self.values == "fp32" else torch.float16)
            if fused := kernels.backend(__name__, device, "triton"):
                parts = [_part(fused, part, k, choice.sampled) for part, k in choice.parts]
                return KernelPlan(layout, slots.size, fused.TopK(parts, slots, device))
            return FloatsPlan(layout, device, choice, slots)
        positions = positions_of(self.indices, layout.numel, choice.most)
        count = len(choice.ends)
        values: Values = FloatValues(count, np.float32 if self.values == "fp32" else np.float16)
        if self.values in ("1bit", "2bit"):
            values = OneMagnitude(count) if self.values == "1bit" else FourMeans(count)
        entries = Entries(positions, values, choice.ends)
        return _EntriesPlan(layout, entries, choice, entries.size if positions.variable else None)


class _EntriesPlan(EntriesPlan):
    """Sends the chosen elements, except zeros."""

    def __init__(self, layout: Layout, entries: Entries, choice: Choice, usual: int | None) -> None:
        super().__init__(layout, [entries], usual)
        self._choice = choice

    def _find(self, vector: Tensor, key: int) -> Sequence[Found]:
        indices = torch.empty(self._choice.most, dtype=torch.int32, device=vector.device)
        values = torch.empty(self._choice.most, dtype=torch.float32, device=vector.device)
        self._choice.make(vector, key, indices, values)
        numbers = values.cpu().numpy()
        places = np.flatnonzero(numbers)
        return [(indices.cpu().numpy()[places].astype(np.int64), numbers[places])]
