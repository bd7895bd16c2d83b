"""QSGD's codes in fewer bits: Huffman codes of pairs of codes, by tables that every rank has."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import SourcePlan, aligned
from lightning_compress.codecs.packing.bits import block_shape, damaged
from lightning_compress.codecs.quantize.levels import LARGEST
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import word_state
from lightning_compress.core.source import NOTHING, Pieces, Source, place_of

LEAST_BITS = 4
"""Least bits of a level: the highest four are coded, the others are sent as they are."""
LONGEST = 8192
"""Largest number of elements of a bucket: all of it is coded by one table."""
STREAMS = 4
"""Streams of a message, which are decoded at the same time."""
LIMIT = 12
"""Longest code, in bits: a table of ``2^LIMIT`` entries decodes one."""
PAD = 8
"""Zeros behind the streams, because they are read 8 bytes at a time."""
ROW = 64
"""Elements of a bucket are filled up with zeros to a multiple of this."""
_USUAL = 0.81
"""Coded bytes in those of 4-bit codes, as gradients of several models have them."""

SHARES = (0.04, 0.09, 0.16, 0.23, 0.31, 0.42)
"""Mean magnitude of a bucket's levels, over the largest level, for which each table is made."""
_LOWEST = (
    (2000, 378, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 378),
    (2000, 905, 170, 23, 2, 1, 1, 1, 1, 1, 1, 1, 2, 23, 170, 905),
    (2000, 1325, 585, 222, 75, 23, 7, 1, 1, 1, 7, 23, 75, 222, 585, 1325),
    (2000, 1778, 1250, 695, 305, 106, 29, 5, 1, 5, 29, 106, 305, 695, 1250, 1778),
    (2000, 1880, 1561, 1145, 742, 425, 215, 62, 1, 62, 215, 425, 742, 1145, 1561, 1880),
    (2000, 1958, 1837, 1653, 1425, 1177, 932, 389, 1, 389, 932, 1177, 1425, 1653, 1837, 1958),
)
_HIGHER = (
    (2000, 114, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 13, 708),
    (2000, 642, 121, 17, 2, 1, 1, 1, 1, 1, 1, 1, 6, 47, 290, 1275),
    (2000, 1143, 514, 204, 74, 25, 8, 2, 1, 4, 14, 43, 124, 328, 781, 1594),
    (2000, 1711, 1188, 669, 306, 114, 34, 7, 2, 17, 64, 192, 465, 915, 1463, 1898),
    (2000, 1843, 1523, 1129, 750, 447, 239, 95, 26, 168, 331, 587, 933, 1329, 1699, 1946),
    (2000, 1945, 1823, 1646, 1433, 1201, 971, 588, 185, 861, 1085, 1318, 1543, 1740, 1892, 1982),
)
"""How often each 4-bit code occurs, 0 to 7 and then -8 to -1, in levels of 4 bits and in the highest 4 bits of more.

Levels are those of a density ``exp(-|x / scale|^power)``, rounded at random, with power 1.3 up to a share of 0.16 and 2
above. Integers, because every rank must build the same tables.
"""


class Tables:
    """Codes of all pairs of 4-bit codes, by several tables. The last one has the pairs themselves, 8 bits each.

    Args:
        bits: of a level.

    Attributes:
        encode: uint32 ``[tables, 256]``, the code, its first bit lowest, times 256, plus its length.
        decode: uint16 ``[tables, 2^LIMIT]``, the pair whose code the index begins with, times 16, plus its length.
        bounds: float32; the number of them that a bucket's mean magnitude exceeds is the table to try.
    """

    def __init__(self, bits: int) -> None:
        counts = _LOWEST if bits == LEAST_BITS else _HIGHER
        lengths = [code_lengths([one * other for one in row for other in row], LIMIT) for row in counts]
        both = [_codes(each) for each in (*lengths, [8] * 256)]
        self.encode = np.stack([encode for encode, _ in both])
        self.decode = np.stack([decode for _, decode in both])
        top = 2 ** (bits - 1) - 1
        self.bounds = np.array([top * (a * b) ** 0.5 for a, b in pairwise(SHARES)], np.float32)


tables = cache(Tables)


def code_lengths(weights: Sequence[int], limit: int) -> list[int]:
    """Return the lengths of the best prefix code whose codes have at most ``limit`` bits.

    Larmore, Hirschberg, "A Fast Algorithm for Optimal Length-Limited Huffman Codes", Journal of the ACM 1990
    (package-merge).
    """
    leaves: list[tuple[int, tuple[int, ...]]] = sorted((weight, (symbol,)) for symbol, weight in enumerate(weights))
    merged = leaves
    for _ in range(limit - 1):
        pairs = zip(merged[::2], merged[1::2], strict=False)
        packages = [(one[0] + other[0], one[1] + other[1]) for one, other in pairs]
        merged = list(heapq.merge(leaves, packages, key=lambda each: each[0]))
    lengths = [0] * len(weights)
    for _, symbols in merged[: 2 * len(weights) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


def _codes(lengths: Sequence[int]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """Return the canonical code of these lengths; see ``Tables``."""
    encode, decode = np.zeros(len(lengths), np.uint32), np.zeros(1 << LIMIT, np.uint16)
    code = length = 0
    for symbol in sorted(range(len(lengths)), key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - length
        length = lengths[symbol]
        turned = int(f"{code:0{length}b}"[::-1], 2)
        encode[symbol] = turned << 8 | length
        decode[turned :: 1 << length] = symbol << 4 | length
        code += 1
    return encode, decode


class EntropyPlan(SourcePlan):
    """The plan of ``QSGD(coding="entropy")``, on a CPU with numba.

    A message holds, of all buckets:

    | bytes | what |
    |---|---|
    | 4 each | the norm, float32 |
    | 1 each, zeros up to a multiple of 16 | the table |
    | 16 | bytes of the four streams, int32 |
    | ``bits - 4`` bits an element | the lowest bits of the levels, in planes of 4, 2 and 1 bits of each bucket |
    | any number | the streams, each of a quarter of the buckets: the highest four bits of two levels in one code |
    | 8 | zeros |

    A bucket is filled up with zeros to a multiple of 64 elements. If its codes would take more than four bits an
    element, they are sent as they are.

    Args:
        layout: of the vector.
        device: "cpu", or "meta", of which only the sizes are read.
        bits: of a level, 4 to 8.
        bucket: elements that share a norm, at most ``LONGEST``.

    Raises:
        ValueError: nothing compiles kernels for this device.
    """

    variable = True
    in_pieces = True

    def __init__(self, layout: Layout, device: torch.device, bits: int, bucket: int) -> None:
        super().__init__(layout)
        self._fast = kernels.backend(__name__, device, "numba")
        if not self._fast and device.type != "meta":
            raise ValueError(
                f"QSGD(coding='entropy') runs on CPUs with numba (pip install lightning_compress[cpu]), not on "
                f"{device.type} by {kernels.compiler(device) or 'tensor operations'}; use coding='packed'"
            )
        self._width, self._buckets = block_shape(layout.numel, bucket)
        self._padded = -(-self._width // ROW) * ROW
        last = layout.numel - (self._buckets - 1) * self._width
        coded = (self._buckets - 1) * self._padded + -(-last // ROW) * ROW  # elements
        self._bits, self._top = bits, 2 ** (bits - 1) - 1
        self._tables = tables(bits)
        self._lengths = aligned(5 * self._buckets)
        self._low = self._lengths + 4 * STREAMS
        self._body = self._low + coded * (bits - LEAST_BITS) // 8
        self.message_size = self._body + coded // 2 + STREAMS + PAD if layout.numel else 0
        self._expected = self._body + int(_USUAL * coded / 2) + PAD if layout.numel else 0

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""
        if not self._buckets:
            self._used = 0
            return
        assert self._fast
        given, norms = message.numpy(), 4 * self._buckets
        (key, offset), left = self._shared or (key, 0), NOTHING if rest is None else rest.numpy()
        lengths = given[self._lengths : self._low].view(np.int32)
        given[norms + self._buckets : self._lengths] = 0
        source.feed(
            self._fast.encode, self._width, self._padded, self._top, LARGEST, np.uint64(word_state(key, 0)),
            np.int16(offset), self._bits - LEAST_BITS, self._tables.encode, self._tables.bounds,
            given[:norms].view(np.float32), given[norms : self._lengths], given[self._low : self._body], lengths,
            given[self._body :], left,
        )  # fmt: skip
        self._used = self._body + int(lengths.sum()) + PAD

    def decode(self, messages: Tensor, out: Tensor | Pieces, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        if not self._buckets:
            return
        assert self._fast
        if messages.shape[1] < self._body + PAD:
            raise damaged(f"{self._buckets} buckets need at least {self._body + PAD} bytes")
        norms = messages[:, : 4 * self._buckets].clone(memory_format=torch.contiguous_format).view(-1)
        steps = (norms.view(torch.float32) / self._top).clamp_(max=LARGEST / self._top * (1 - 2**-22)).mul_(weight)
        lengths = messages[:, self._lengths : self._low].clone(memory_format=torch.contiguous_format).view(torch.int32)
        places = 4 * self._buckets, self._low, self._body
        numbers = self._width, self._padded, self._bits - LEAST_BITS, self._tables.decode
        given = steps.view(len(messages), self._buckets).numpy(), lengths.numpy()
        if not self._fast.decode(messages.numpy(), *places, *given, *numbers, place_of(out), accumulate):
            raise damaged("its streams do not end where it says, or it names a table that does not exist")
