"""Values in 8 bits each, for states that need not be exact, such as an average of errors.

A parameter's n values are n int8 codes, followed by one byte per block of 64 codes: the exponent of the block's largest
magnitude. A value is its code times a power of two, which is 1/64 to 1/128 of that magnitude. So decoding and encoding
again gives the same bytes, a float32 copy can stand for the codes, and any bytes decode to finite values.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core.told import Bits
from lightning_compress.core.workspace import chunk_size, pieces

BLOCK = 64
"""Values that share a scale."""
_LEAST, _MOST, _SHIFT = 6, 253, 23
"""Least and largest exponent of a block that is not zero, and the position of a float32's exponent."""


def coded_bytes(numel: int) -> int:
    """Return the bytes of ``numel`` values."""
    return numel + -(-numel // BLOCK)


def coded_numel(size: int) -> int:
    """Return the number of values in ``size`` bytes; the inverse of ``coded_bytes``."""
    return size - -(-size // (BLOCK + 1))


class Segments(NamedTuple):
    """Where the values of a group's parameters are: in memory, in the group's vector, and as codes.

    Attributes:
        sources: of each parameter, its first element in some memory.
        sizes: its number of elements. In the vector, parameters follow each other.
        coded: its first code in a tensor of codes; -1 if it has none.
        treated: ``KEEP``, ``RESET`` or ``AVERAGE`` for each: what ``blend`` does with its codes.
    """

    sources: tuple[int, ...]
    sizes: tuple[int, ...]
    coded: tuple[int, ...]
    treated: tuple[int, ...]

    @property
    def rows(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield source, start in the vector, size, first code, and treatment of each parameter."""
        starts = accumulate(self.sizes, initial=0)
        return zip(self.sources, starts, self.sizes, self.coded, self.treated)  # noqa: B905


KEEP, RESET, AVERAGE = 0, 1, 2
"""Copy the old codes, and do not use them; overwrite them as if they had been zeros; average them with new values."""


@lru_cache(maxsize=4096)
def table(segments: Segments, most: int | None, device: torch.device) -> Tensor:
    """Return the segments as kernels read them: int64 ``[rows, 6]``, parameters cut to at most ``most`` elements.

    A row is source, start in the vector, number of elements, first code, first exponent, and treatment, which is
    ``KEEP`` where there is no code. The caller does not change it.

    Args:
        segments: of a group.
        most: a multiple of ``BLOCK``; None: do not cut.
        device: where the kernels run.
    """
    rows = []
    for source, start, size, code, treated in segments.rows:
        for at in range(0, size, most or max(1, size)):
            codes = (code + at, code + size + at // BLOCK, treated) if code >= 0 else (-1, -1, KEEP)
            rows.append((source + at, start + at, min(size - at, most or size), *codes))
    return torch.tensor(rows, dtype=torch.int64).view(-1, 6).to(device)


def encode(values: Tensor, coded: Tensor) -> None:
    """Encode finite float32 ``values [n]`` as uint8 ``[coded_bytes(n)]``, each rounded to the nearest."""
    blend(Segments((0,), (len(values),), (0,), (RESET,)), coded, 0.0, values, 1.0, coded)


def decode(coded: Tensor) -> Tensor:
    """Return the values, float32 ``[n]``, of uint8 ``[coded_bytes(n)]``."""
    numel = coded_numel(len(coded))
    codes, scales = _parts(coded)
    parts = [_read(codes, scales, piece) for piece in pieces(numel, chunk_size(coded.device))]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32, device=coded.device)


def add(segments: Segments, coded: Tensor, vector: Tensor) -> None:
    """Add to float32 ``vector [numel]`` the values of the segments that are to be averaged; ``sources`` are ignored."""
    for _, start, size, code, treated in segments.rows:
        if code >= 0 and treated == AVERAGE:
            vector[start : start + size].add_(decode(coded[code : code + coded_bytes(size)]))


def blend(
    segments: Segments, old: Tensor, kept: float, values: Tensor, share: float, new: Tensor, bits: Bits | None = None
) -> None:
    """Compute ``new = kept * old + share * values`` for each coded segment, rounded to the nearest.

    Args:
        segments: of the group; ``sources`` are ignored.
        old: uint8, the codes of all segments.
        kept: in [0, 1].
        values: float32 ``[numel]``, finite.
        share: in [0, 1].
        new: uint8, as long as ``old``, and may be ``old``. Where ``treated`` is ``KEEP``, it gets the old codes, and
            where it is ``RESET``, ``share * values``.
        bits: where they say that a segment is unused, its values count as zeros; only for kernels for GPUs.
    """
    if fast := kernels.backend(__name__, values.device):
        fast.blend(segments, old, kept, values, share, new, *([bits] if bits else []))
        return
    assert bits is None
    for _, start, size, code, treated in segments.rows:
        part = slice(code, code + coded_bytes(size))
        if code >= 0 and treated == KEEP:
            new[part] = old[part]
        elif code >= 0:
            _blend(old[part], kept * (treated == AVERAGE), values[start : start + size], share, new[part])


def _blend(old: Tensor, kept: float, values: Tensor, share: float, new: Tensor) -> None:
    (codes, scales), (new_codes, new_scales) = _parts(old), _parts(new)
    for piece in pieces(len(values), chunk_size(values.device)):
        part = _read(codes, scales, piece).mul_(kept).add_(values[piece] * share)
        blocks = torch.nn.functional.pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
        exponents = blocks.abs().amax(1).view(torch.int32) >> _SHIFT
        exponents.masked_fill_(~_valid(exponents), 0)
        rounded = blocks.mul_(_power(260 - exponents, exponents > 0).unsqueeze(1)).round_().clamp_(-127, 127)
        new_codes[piece] = rounded.view(-1)[: len(part)].to(torch.int8)
        new_scales[piece.start // BLOCK : -(-piece.stop // BLOCK)] = exponents.to(torch.uint8)


def _parts(coded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, int8 ``[n]``, and the exponents, uint8 ``[blocks]``."""
    numel = coded_numel(len(coded))
    return coded[:numel].view(torch.int8), coded[numel:]


def _read(codes: Tensor, scales: Tensor, piece: slice) -> Tensor:
    exponents = scales[piece.start // BLOCK : -(-piece.stop // BLOCK)].to(torch.int32)
    steps = _power(exponents - _LEAST, _valid(exponents))
    return codes[piece].float().mul_(steps.repeat_interleave(BLOCK)[: piece.stop - piece.start])


def _valid(exponents: Tensor) -> Tensor:
    return (exponents > _LEAST) & (exponents <= _MOST)


def _power(exponents: Tensor, valid: Tensor) -> Tensor:
    """Return the powers of two with these float32 exponents; 0 where they are not valid."""
    return (torch.where(valid, exponents, 0) << _SHIFT).view(torch.float32)
