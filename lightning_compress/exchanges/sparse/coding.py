"""Write vectors with many zeros losslessly, as a list, a bitmap or all values, whichever takes the fewest bytes.

    | count, int32 | padding to 16 bytes | indices, int32 [count], or bitmap, or neither | values, float32 |

The form follows from the count: the smallest of ``8 count``, ``numel / 8 + 4 count`` and ``4 numel`` bytes. A bitmap is
shorter than a list if more than one in 32 values is not zero. Without bitmaps, a list would be best up to one half
(SparCML, Renggli et al., SC 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress import kernels

HEADER = 16
"""Bytes before the indices: the count and padding."""


def used_bytes(count: float, numel: int, exact: bool = False) -> float:
    """Return the bytes of a message of ``count`` of ``numel`` values.

    With ``exact``, all values are written only if ``count`` is ``numel``: see ``write_entries``.
    """
    few = min(8 * count, bitmap_bytes(numel) + 4 * count)
    return HEADER + (few if exact and count < numel else min(few, 4 * numel))


def most_bytes(numel: int) -> int:
    """Return the maximum bytes of a message of ``numel`` values."""
    return HEADER + 4 * numel


def write(values: Tensor, message: Tensor) -> int:
    """Write the values that are not 0, and return the bytes of the message.

    Args:
        values: float32 ``[numel]``, contiguous.
        message: uint8, at least ``[16 + 4 numel]``.
    """
    numel = len(values)
    if fast := kernels.backend(__name__, values.device):
        bitmap = np.empty(bitmap_bytes(numel) // 4, np.uint32)
        count = int(fast.mark(values.numpy(), bitmap))
        used = int(used_bytes(count, numel))
        if _kind(count, numel) == "bitmap":
            message[:4].view(torch.int32)[0] = count
            body = message[HEADER:used].numpy()
            body[: bitmap.nbytes] = bitmap.view(np.uint8)
            fast.pack(bitmap, values.numpy(), body[bitmap.nbytes :].view(np.float32))
            return used
    indices = indices_of(values)
    if _kind(len(indices), numel) == "dense":
        return write_dense(len(indices), values, message)
    return write_entries(indices, values[indices], numel, message)


def write_entries(indices: Tensor, values: Tensor, numel: int, message: Tensor, exact: bool = False) -> int:
    """Write values at given indices, and return the bytes of the message.

    Args:
        indices: int64 ``[count]``, strictly ascending.
        values: float32 ``[count]``.
        numel: the length of the whole vector.
        message: uint8, at least ``[16 + 4 numel]``; with ``exact``, ``bitmap_bytes(numel)`` more.
        exact: the reader gets exactly these entries: zeros among them are kept, and no others are added.
    """
    count, kind = len(indices), _kind(len(indices), numel, exact)
    if kind == "dense":
        return write_dense(count, values.new_zeros(numel).index_copy_(0, indices, values), message)
    message[:4].view(torch.int32)[0] = count
    used = int(used_bytes(count, numel, exact))
    body = message[HEADER:used]
    if kind == "list":
        body[: 4 * count].view(torch.int32).copy_(indices)
    else:
        bitmap = bitmap_bytes(numel)
        bits = torch.zeros(8 * bitmap, dtype=torch.bool, device=values.device)
        bits[indices] = True
        packed = np.packbits(bits.cpu().numpy(), bitorder="little")
        body[:bitmap].copy_(torch.from_numpy(packed))
    body[len(body) - 4 * count :].view(torch.float32).copy_(values)
    return used


def read(message: Tensor, out: Tensor) -> int:
    """Read all values, zeros too, and return the bytes of the message.

    Args:
        message: uint8, at least as long as ``write`` returned.
        out: float32 ``[numel]``, contiguous.

    Raises:
        ValueError: the message is damaged.
    """
    numel, count = len(out), int(message[:4].view(torch.int32)[0])
    fast = kernels.backend(__name__, message.device)
    if fast and 0 <= count <= numel and _kind(count, numel) == "bitmap":
        bitmap, values = _bitmap(message, count, numel, exact=False)
        fast.spread(bitmap, values.numpy(), out.numpy())
        return int(used_bytes(count, numel))
    indices, values = read_entries(message, numel)
    if indices is None:
        out.copy_(values)
    else:
        out.zero_()
        out[indices] = values
    return int(used_bytes(count, numel))


def read_entries(message: Tensor, numel: int, exact: bool = False) -> tuple[Tensor | None, Tensor]:
    """Return indices, int64 ``[count]``, and the values there.

    Indices are None if the message has all ``numel`` values.

    Raises:
        ValueError: the message is damaged.
    """
    count = int(message[:4].view(torch.int32)[0])
    if not 0 <= count <= numel or used_bytes(count, numel, exact) > len(message):
        raise ValueError(f"a message is damaged: it claims {count} of {numel} values")
    body, kind = message[HEADER : int(used_bytes(count, numel, exact))], _kind(count, numel, exact)
    if kind == "dense":
        return None, body.view(torch.float32)
    if kind == "list":
        indices = body[: 4 * count].view(torch.int32).long()
    elif fast := kernels.backend(__name__, message.device):
        bitmap, values = _bitmap(message, count, numel, exact)
        indices = torch.empty(count, dtype=torch.int64)
        fast.indices(bitmap, indices.numpy())
        return indices, values
    else:
        bits = np.unpackbits(body[: bitmap_bytes(numel)].cpu().numpy(), bitorder="little")
        indices = torch.from_numpy(np.flatnonzero(bits)).to(message.device)
    if len(indices) != count or (count and not 0 <= int(indices.min()) <= int(indices.max()) < numel):
        raise ValueError(f"a message is damaged: its indices do not fit {numel} values")
    return indices, body[len(body) - 4 * count :].view(torch.float32)


def _bitmap(message: Tensor, count: int, numel: int, exact: bool) -> tuple[npt.NDArray[np.uint32], Tensor]:
    """Return the bitmap's words and the values of a message on the CPU.

    Raises:
        ValueError: the bitmap does not have ``count`` bits, or the message is truncated.
    """
    used, middle = int(used_bytes(count, numel, exact)), HEADER + bitmap_bytes(numel)
    bitmap = message[HEADER:middle].numpy().view(np.uint32)
    fast = kernels.backend(__name__, message.device)
    if used > len(message) or fast is None or fast.count(bitmap, numel) != count:
        raise ValueError(f"a message is damaged: its indices do not fit {numel} values")
    return bitmap, message[middle:used].view(torch.float32)


def check_ascending(indices: Tensor | None, numel: int) -> None:
    """Raise ValueError unless indices ascend strictly; None stands for all indices."""
    if indices is not None and bool((indices.diff() <= 0).any()):
        raise ValueError(f"a message is damaged: its indices into {numel} values do not ascend")


def indices_of(values: Tensor) -> Tensor:
    """Return the ascending indices of the values that are not 0, int64."""
    if fast := kernels.backend(__name__, values.device):
        bitmap = np.empty(bitmap_bytes(len(values)) // 4, np.uint32)
        indices = torch.empty(int(fast.mark(values.numpy(), bitmap)), dtype=torch.int64)
        fast.indices(bitmap, indices.numpy())
        return indices
    if values.device.type == "cpu":  # several times as fast as torch's
        return torch.from_numpy(np.flatnonzero(values.numpy()))
    return values.nonzero().flatten()


def _kind(count: int, numel: int, exact: bool = False) -> Literal["list", "bitmap", "dense"]:
    """Return the form that takes the fewest bytes; of equal ones, dense before list before bitmap."""
    used = used_bytes(count, numel, exact) - HEADER
    if used == 4 * numel and not (exact and count < numel):
        return "dense"
    return "list" if used == 8 * count else "bitmap"


def write_dense(count: int, values: Tensor, message: Tensor) -> int:
    """Write all values, of which ``count`` are entries, and return the bytes of the message."""
    message[:4].view(torch.int32)[0] = count
    used = HEADER + 4 * len(values)
    message[HEADER:used].view(torch.float32).copy_(values)
    return used


def bitmap_bytes(numel: int) -> int:
    """Return the bytes of one bit per value, in whole 32-bit words."""
    return -(-numel // 32) * 4


@dataclass(frozen=True)
class SparseVector:
    """A sparse vector of ``numel`` elements.

    Args:
        numel: the length of the vector.
        indices: int64 ``[count]``, strictly ascending; None: all indices.
        values: float32 ``[count]``.
    """

    numel: int
    indices: Tensor | None
    values: Tensor

    @classmethod
    def of(cls, vector: Tensor) -> SparseVector:
        """Return the elements of a vector that are not 0."""
        indices = indices_of(vector)
        return cls(len(vector), None, vector) if len(indices) == len(vector) else cls.at(indices, vector)

    @classmethod
    def at(cls, indices: Tensor | None, vector: Tensor) -> SparseVector:
        """Return the elements of a vector at these indices."""
        return cls(len(vector), indices, vector if indices is None else vector[indices])

    @classmethod
    def read(cls, message: Tensor, numel: int) -> SparseVector:
        """Return the sparse vector that ``write`` wrote.

        Raises:
            ValueError: the message is damaged.
        """
        indices, values = read_entries(message, numel, exact=True)
        check_ascending(indices, numel)
        return cls(numel, indices, values)

    def write(self, message: Tensor) -> int:
        """Write all elements, and return the bytes of the message."""
        if self.indices is None:
            return write_dense(self.numel, self.values, message)
        return write_entries(self.indices, self.values, self.numel, message, exact=True)

    def cuts(self, bounds: Sequence[int]) -> list[int]:
        """Return, for each of ``bounds``, how many elements have a smaller index."""
        if self.indices is None:
            return list(bounds)
        places = torch.tensor(bounds, dtype=torch.int64, device=self.indices.device)
        return [int(cut) for cut in torch.searchsorted(self.indices, places)]

    def part(self, start: int, stop: int, first: int, last: int) -> SparseVector:
        """Return the elements ``[first, last)``, which are those with indices in ``[start, stop)``."""
        indices = None if self.indices is None else self.indices[first:last] - start
        if indices is not None and len(indices) == stop - start:
            indices = None
        return SparseVector(stop - start, indices, self.values[first:last])

    @property
    def listed(self) -> Tensor:
        """Indices of the elements, int64 ``[count]``, also where there are all."""
        if self.indices is None:
            return torch.arange(self.numel, dtype=torch.int64, device=self.values.device)
        return self.indices

    @property
    def used_bytes(self) -> int:
        """Bytes of the message that ``write`` writes."""
        return int(used_bytes(len(self.values), self.numel, exact=True))

    def add_to(self, out: Tensor) -> None:
        """Add the elements to ``out``, float32 ``[numel]``."""
        if self.indices is None:
            out.add_(self.values)
        else:
            out.index_add_(0, self.indices, self.values)
