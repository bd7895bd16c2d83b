"""Messages of top-k that are arrays: places as int32, and values as floats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.base import Plan
from lightning_compress.codecs.buffers import check
from lightning_compress.codecs.choice import Choice
from lightning_compress.layout import Layout

LARGEST = torch.finfo(torch.float16).max


class Floats(Plan):
    """Places as int32 and values as float32 or float16 for the choice's slots, an even number of these for float16.

    Args:
        layout: what the vector is made of.
        choice: which elements are sent.
        dtype: of values.
    """

    def __init__(self, layout: Layout, choice: Choice, dtype: torch.dtype) -> None:
        super().__init__(layout)
        self._choice, self._dtype = choice, dtype
        self._slots = choice.most + (choice.most % 2 if dtype == torch.float16 else 0)
        self.message_size = (4 + dtype.itemsize) * self._slots

    def _sections(self, message: Tensor) -> tuple[Tensor, Tensor]:
        if not self._slots:  # a row of no bytes may begin anywhere
            return message.new_empty(0, dtype=torch.int32), message.new_empty(0, dtype=self._dtype)
        middle = 4 * self._slots
        return message[..., :middle].view(torch.int32), message[..., middle:].view(self._dtype)


class FloatsPlan(Floats):
    """The same by tensor operations, and by the kernels of a CPU."""

    def __init__(self, layout: Layout, device: torch.device, choice: Choice, dtype: torch.dtype) -> None:
        super().__init__(layout, choice, dtype)
        segments = [range(segment.offset, segment.end) for segment in layout.segments if segment.numel]
        self.in_pieces = device.type == "cpu" and [part for part, _ in choice.parts] == segments
        rounded = self._slots if dtype == torch.float16 else 0
        self._floats = torch.zeros(rounded, device=device)
        self._places = torch.zeros(rounded, dtype=torch.int32, device=device)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See the base class."""
        check(vector, message, self.layout.numel, self.message_size)
        indices, values = self._sections(message)
        if self._dtype == torch.float32:
            self._choice.make(vector, key, indices, values)
        else:
            self._choice.make(vector, key, self._places, self._floats)
            indices.copy_(self._places)
            values.copy_(self._floats.clamp_(-LARGEST, LARGEST))
            values = self._floats.copy_(values)
        vector.index_add_(0, indices, values, alpha=-1)  # exactly 0.0, and harmless where a slot is empty

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See the base class."""
        check(out, messages, self.layout.numel, self.message_size)
        outs = [out[part.start : part.stop] for part, _ in self._choice.parts]
        if not accumulate and self._in_order(messages, outs, weight):
            return
        sections = [self._sections(message) for message in messages]
        indices = [self._inside(indices) for indices, _ in sections]
        if not accumulate:
            out.zero_()
        for index, (_, values) in zip(indices, sections, strict=True):
            out.index_add_(0, index, values.float(), alpha=weight)

    def decode_pieces(self, messages: Tensor, outs: Sequence[Tensor], weight: float) -> None:
        """See the base class."""
        if not self._in_order(messages, outs, weight):
            whole = torch.empty(self.layout.numel)
            self.decode(messages, whole, weight, accumulate=False)
            torch._foreach_copy_(list(outs), list(whole.split([each.numel() for each in outs])))

    def _in_order(self, messages: Tensor, outs: Sequence[Tensor], weight: float) -> bool:
        """The sum of messages in one pass over the elements, if they are as ``encode`` writes them."""
        fast = kernels.of(messages.device)
        if fast is None or not len(messages):
            return False
        sections = [self._sections(message) for message in messages]
        indices = self._inside(torch.stack([places for places, _ in sections])).numpy()  # before anything is written
        values = torch.stack([numbers.float() for _, numbers in sections]).numpy()
        cursors, start = np.empty(len(messages), np.int64), 0
        for out, (part, k) in zip(outs, self._choice.parts, strict=True):
            slots, scale = (start, start + k), np.float32(weight)
            if not fast.lists.add(indices, values, slots, part.start, scale, out.numpy(), cursors):
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
