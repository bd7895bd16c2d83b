"""Top-k sparsification: the elements of largest magnitude, with their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan
from lightning_compress.codecs.packing.entries import Entries, EntriesPlan, Found
from lightning_compress.codecs.packing.positions import positions_of
from lightning_compress.codecs.packing.values import FloatValues, FourMeans, OneMagnitude, Values
from lightning_compress.codecs.sparse.selection import Choice, rank_of, stride_of
from lightning_compress.core.layout import Layout

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Slots:
    """Places as int32 and values as float32 or float16 in a message, an even number of these for float16.

    Args:
        most: how many are filled.
        dtype: of values.
    """

    most: int
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """How many there are."""
        return self.most + (self.most % 2 if self.dtype == torch.float16 else 0)

    @property
    def size(self) -> int:
        """Bytes of a message."""
        return (4 + self.dtype.itemsize) * self.count

    def of(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Places and values of a message, or of each row of messages."""
        if not self.count:  # a row of no bytes may begin anywhere
            return message.new_empty(0, dtype=torch.int32), message.new_empty(0, dtype=self.dtype)
        middle = 4 * self.count
        return message[..., :middle].view(torch.int32), message[..., middle:].view(self.dtype)


class FloatsPlan(Plan):
    """``Slots`` of the elements that are sent, by tensor operations, and by the kernels of a CPU.

    Args:
        layout: what the vector is made of.
        device: where it is.
        choice: which elements are sent.
        slots: of a message.
    """

    def __init__(self, layout: Layout, device: torch.device, choice: Choice, slots: Slots) -> None:
        super().__init__(layout)
        self._choice, self._slots, self.message_size = choice, slots, slots.size
        segments = [range(segment.offset, segment.end) for segment in layout.segments if segment.numel]
        self._fast = kernels.backend(__name__, device, "numba")
        self.in_pieces = device.type == "cpu" and [part for part, _ in choice.parts] == segments
        rounded = slots.count if slots.dtype == torch.float16 else 0
        self._floats = torch.zeros(rounded, device=device)
        self._places = torch.zeros(rounded, dtype=torch.int32, device=device)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan``."""
        self.check(vector, message)
        indices, values = self._slots.of(message)
        if self._slots.dtype == torch.float32:
            self._choice.make(vector, key, indices, values)
        else:
            self._choice.make(vector, key, self._places, self._floats)
            indices.copy_(self._places)
            values.copy_(self._floats.clamp_(-LARGEST, LARGEST))
            values = self._floats.copy_(values)
        vector.index_add_(0, indices, values, alpha=-1)  # exactly 0.0, and harmless where a slot is empty

    def decode(self, messages: Tensor, out: Tensor | list[Tensor], weight: float, accumulate: bool) -> None:
        """See ``Plan``."""
        whole = out if isinstance(out, Tensor) else None
        self.check(whole, messages)
        outs = [out[part.start : part.stop] for part, _ in self._choice.parts] if isinstance(out, Tensor) else out
        if not accumulate and self._in_order(messages, outs, weight):
            return
        out = torch.empty(self.layout.numel) if whole is None else whole
        sections = [self._slots.of(message) for message in messages]
        indices = [self._inside(indices) for indices, _ in sections]
        if not accumulate:
            out.zero_()
        for index, (_, values) in zip(indices, sections, strict=True):
            out.index_add_(0, index, values.float(), alpha=weight)
        if whole is None:
            torch._foreach_copy_(outs, list(out.split([each.numel() for each in outs])))

    def _in_order(self, messages: Tensor, outs: Sequence[Tensor], weight: float) -> bool:
        """The sum of messages in one pass over the elements, if they are as ``encode`` writes them."""
        fast = self._fast
        if fast is None or not len(messages):
            return False
        sections = [self._slots.of(message) for message in messages]
        indices = self._inside(torch.stack([places for places, _ in sections])).numpy()  # before anything is written
        values = torch.stack([numbers.float() for _, numbers in sections]).numpy()
        cursors, start = np.empty(len(messages), np.int64), 0
        for out, (part, k) in zip(outs, self._choice.parts, strict=True):
            slots, scale = (start, start + k), np.float32(weight)
            if not fast.add(indices, values, slots, part.start, scale, out.numpy(), cursors):
                return False
            start += k
        return True

    def _inside(self, indices: Tensor) -> Tensor:
        """Refuse places outside the vector; a device is not waited for, so there they are moved inside."""
        last = self.layout.numel - 1
        if indices.device.type != "cpu":
            return indices.clamp(0, last)
        if indices.numel() and (indices.min() < 0 or indices.max() > last):
            raise ValueError(f"TopK: the message has indices outside [0, {last}]; it is damaged, or of another layout")
        return indices


def _part(kernel: ModuleType, part: range, k: int, sampled: bool) -> Any:
    """What the kernel takes; the sample is the one that a CPU looks at."""
    numel = len(part)
    stride = stride_of(numel, k) if sampled and k < numel else 0
    few, more = (rank_of(numel // stride + each, numel, k) if stride else 0 for each in (0, 1))
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
        if isinstance(self.density, bool) or not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise ValueError(f"TopK(density={self.density!r}): density must be in (0, 1]; 0.01 sends 1 %")
        for field, allowed in ALLOWED.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"TopK({field}={value!r}): {field} must be one of {', '.join(map(repr, allowed))}")

    @property
    def rounds(self) -> bool:
        """See ``Codec``."""
        return self.values != "fp32"

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
            slots = Slots(choice.most, torch.float32 if self.values == "fp32" else torch.float16)
            if fused := kernels.backend(__name__, device, "triton"):
                looked = [_part(fused, part, k, choice.sampled) for part, k in choice.parts]
                return KernelPlan(layout, slots.size, fused.TopK(looked, slots, device))
            return FloatsPlan(layout, device, choice, slots)
        positions = positions_of(self.indices, layout.numel, choice.most)
        parts = len(choice.ends)
        values: Values = FloatValues(parts, np.float32 if self.values == "fp32" else np.float16)
        if self.values in ("1bit", "2bit"):
            values = OneMagnitude(parts) if self.values == "1bit" else FourMeans(parts)
        entries = Entries(positions, values, choice.ends)
        return _EntriesPlan(layout, entries, choice, entries.size if positions.variable else None)


class _EntriesPlan(EntriesPlan):
    """Sends the elements that a choice makes, without zeros."""

    def __init__(self, layout: Layout, entries: Entries, choice: Choice, usual: int | None) -> None:
        super().__init__(layout, [entries], usual)
        self._choice = choice

    def _find(self, vector: Tensor, key: int) -> Sequence[Found]:
        indices = torch.empty(self._choice.most, dtype=torch.int32, device=vector.device)
        values = torch.empty(self._choice.most, device=vector.device)
        self._choice.make(vector, key, indices, values)
        numbers = values.cpu().numpy()
        places = np.flatnonzero(numbers)
        return [(indices.cpu().numpy()[places].astype(np.int64), numbers[places])]
