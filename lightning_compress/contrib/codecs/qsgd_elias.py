"""QSGD's own coding: the places and levels of what is not 0, in Elias codes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Plan
from lightning_compress.codecs.packing.bits import Bytes, damaged
from lightning_compress.codecs.quantize.levels import Buckets, Norm, Quantiser, fit
from lightning_compress.codecs.quantize.qsgd import QSGD, Coding
from lightning_compress.contrib.codecs import elias
from lightning_compress.core.layout import Layout
from lightning_compress.core.workspace import pieces, scratch

Ints = npt.NDArray[np.int64]
LONGEST = 4096
"""Elements of a bucket whose codes have a length of 16 bits."""
LANES = 1 << 21
"""Elements of the buckets that are read in lock-step: the more, the fewer calls, but scratch must hold them."""
DEVIATIONS = 4
"""Standard deviations above what is expected in the worst case that a message has room for."""
HEADER = 6
"""Bytes of a bucket's norm (float32) and of the length of its codes in bits (uint16)."""


@dataclass(frozen=True)
class QSGDElias(QSGD):
    """The numbers of ``QSGD``, bit for bit, of which those that are not 0 are sent in Elias codes.

    A message varies in length: every bucket's norm as float32, and the length of its codes in bits as
    uint16, then the codes of all buckets, the first bit highest. For an integer that is not 0 they are, as in the
    paper, Elias' omega code of the distance to the one before (to the bucket's beginning, the first place being 1), a
    sign (1 below 0), and the omega code of ``|q|``. The paper bounds the expected bits of a bucket with the L2 norm by
    ``(3 + (1.5 + o(1)) log2(2 (s^2 + n) / (s (s + sqrt(n))))) s (s + sqrt(n))``, and for ``s = sqrt(n)`` by ``2.8 n``;
    on N(0, 1) it takes 0.39 per element for 2 bits and n = 512 (0.52 by that bound), and 2.7 for 6 bits and n = 1024,
    besides 48 per bucket for norm and length. A message has room for what is expected in the worst case and four
    standard deviations, with the max norm for all that there can be; buckets that find none send 0 and stay. Codes
    are made and read on the host, also for vectors on an accelerator.


    Args:
        bits: see ``QSGD``; 2, with the L2 norm, is where it pays.
        bucket: elements that share a norm, 64 to 4096, since its codes are read one after the other.
        norm: "max" or "l2".
        correlated: see ``QSGD``.

    Raises:
        ValueError: a setting is none of these.

    Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    NIPS 2017, arXiv 1610.02132.
    """

    name: ClassVar[str] = "qsgd_elias"
    coding: Coding = field(default="packed", init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket > LONGEST:
            raise ValueError(
                f"QSGD(bucket={self.bucket!r}, coding='elias'): a bucket must have at most {LONGEST} elements, "
                "since its codes are read one after the other; try 512"
            )

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return EliasPlan(layout, device, self.bits, self.bucket, self.norm)


def expected_bits(numel: int, levels: int) -> float:
    """At least the expected bits of a bucket's codes, without norm and length, for the L2 norm.

    Of N elements that are not 0, ``min(n, s sqrt(n))`` on average at most, the gaps add up to n at most, and the levels
    to ``s sqrt(n)`` on average at most; and the length of a code is at most a concave function of its number.
    """
    corners = 2.0 ** np.array([0, 1, 2, 4, 16, 32])
    lengths = [1, 3, 6, 11, 28, 44]
    total = levels * math.sqrt(numel)
    nonzero = np.linspace(0, min(numel, total), 257)[1:]
    each = 1 + sum(np.interp(each / nonzero, corners, lengths) for each in (numel, total))
    return float((nonzero * each).max())


class EliasPlan(Plan):
    """Messages of ``QSGDElias``; see there.

    Args:
        layout: what the vector is made of.
        device: where it is; the codes are made on the host.
        bits: of the levels' packed form, 2 to 8.
        bucket: elements that share a norm.
        norm: which norm.
    """

    variable = True

    def __init__(self, layout: Layout, device: torch.device, bits: int, bucket: int, norm: Norm) -> None:
        super().__init__(layout)
        self._buckets = Buckets(layout.numel, bucket, norm, device)
        self._quantiser = Quantiser(bits, 0.0, layout.numel, self._buckets.most, device)
        self._packed = scratch("qsgd packed", self._quantiser.size, torch.uint8, device)
        self._norms = torch.empty(self._buckets.count, dtype=torch.float32, device=device)
        self._lengths = np.zeros(self._buckets.count, np.uint16)
        self._levels = 2 ** (bits - 1) - 1
        self._body = HEADER * self._buckets.count
        width = self._buckets.width
        room: float = layout.numel * (2 + int(elias.omega(np.array([self._levels]))[1][0]))
        self._expected = self.message_size = self._body + -(-int(room) // 8)
        if norm == "l2":
            each, nonzero = expected_bits(width, self._levels), min(width, self._levels * math.sqrt(width))
            self._expected = min(self._expected, self._body + int(each * self._buckets.count / 8))
            room = min(room, each * (self._buckets.count + DEVIATIONS * math.sqrt(self._buckets.count / nonzero)))
            self.message_size = self._body + -(-math.ceil(room) // 8)
        self._bits = math.ceil(room)
        sizes = np.arange(width + 1)
        self._gaps = elias.omega(np.maximum(sizes, 1))
        self._signed = _signed_codes(self._levels)
        self._words = np.zeros(-(-self._bits // 64) + 2 if layout.numel else 0, np.uint64)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan.encode``."""
        self.check(vector, message)
        stream = self.stream(key)
        self._words[:] = 0
        end, full = 0, False
        for buckets, elements in self._buckets.pieces:
            rows = vector[elements].view(buckets.stop - buckets.start, -1)
            norms, factors = fit(self._buckets.norms(rows), self._quantiser.top)
            levels = self._quantiser.encode(rows, factors.unsqueeze(1), elements, stream, self._packed)
            codes, sizes, counts = self._code(levels.to("cpu", torch.int16).numpy())
            self._lengths[buckets] = counts
            fitting = 0 if full else int(np.searchsorted(np.cumsum(counts), self._bits - end, side="right"))
            if fitting < len(counts):
                full = True
                norms[fitting:] = 0
                self._lengths[buckets][fitting:] = 0
                kept = int(np.searchsorted(np.cumsum(sizes), int(counts[:fitting].sum()), side="right"))
                codes, sizes = codes[:kept], sizes[:kept]
            end = elias.append(self._words, end, codes, sizes)
            self._norms[buckets] = norms
            rows.sub_(levels.mul_(self._quantiser.steps(norms).unsqueeze(1)))
        self._used = self._body + -(-end // 8)
        header = np.concatenate([self._norms.cpu().numpy().view(np.uint8), self._lengths.view(np.uint8)])
        message[: self._body] = torch.from_numpy(header)
        message[self._body : self._used] = torch.from_numpy(elias.to_bytes(self._words, end))

    def _code(self, levels: npt.NDArray[np.int16]) -> tuple[elias.Words, Ints, Ints]:
        """Codes and their lengths of the levels ``[buckets, width]``, and the bits of each bucket."""
        codes, lengths = self._signed
        places = np.flatnonzero(levels)
        values, buckets = levels.reshape(-1)[places], places // levels.shape[1]
        gaps = np.diff(places, prepend=-1)
        first = np.flatnonzero(np.diff(buckets, prepend=-1))
        gaps[first] = places[first] - buckets[first] * levels.shape[1] + 1
        sizes = lengths[values]
        both = self._gaps[0][gaps] << sizes.astype(np.uint64) | codes[values]
        sizes += self._gaps[1][gaps]
        return both, sizes, np.bincount(buckets, sizes, len(levels)).astype(np.int64)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        parsed = [self._parse(message.cpu().numpy()) for message in messages]
        if not accumulate:
            out.zero_()
        with np.errstate(over="ignore", invalid="ignore"):  # sums beyond float32 become inf, as torch's do
            for norms, starts, words in parsed:
                self._add(self._quantiser.steps(torch.from_numpy(norms)).mul_(weight).numpy(), starts, words, out)

    def _add(self, steps: npt.NDArray[np.float32], starts: Ints, words: elias.Words, out: Tensor) -> None:
        """Add one message's numbers, times each bucket's step."""
        width = self._buckets.width
        for part in pieces(self._buckets.count, max(1, LANES // width)):
            target = out[part.start * width : part.stop * width]
            for places, values in self._read(words, starts[part.start : part.stop + 1], len(target)):
                values *= steps[part][places // width]
                if target.device.type == "cpu":
                    target.numpy()[places] += values
                else:
                    target.index_add_(0, *(torch.from_numpy(each).to(target.device) for each in (places, values)))

    def _parse(self, data: Bytes) -> tuple[npt.NDArray[np.float32], Ints, elias.Words]:
        """Norms, where each bucket's codes begin (and the last ones' end), and the stream."""
        if len(data) < self._body:
            raise damaged(f"{self._buckets.count} buckets need {self._body} bytes of norms and lengths")
        middle = 4 * self._buckets.count
        norms, lengths = data[:middle].copy().view(np.float32), data[middle : self._body].view(np.uint16)
        if not (np.isfinite(norms).all() and (norms >= 0).all()):
            raise damaged("a norm is negative or not finite")
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if starts[-1] > 8 * (len(data) - self._body):
            raise damaged(f"its codes have {starts[-1]} bits, in {len(data) - self._body} bytes")
        return norms, starts, elias.to_words(data[self._body : self._body + -(-int(starts[-1]) // 8)])

    def _read(self, words: elias.Words, starts: Ints, numel: int) -> Iterator[tuple[Ints, npt.NDArray[np.float32]]]:
        """Places and levels of buckets that have ``numel`` elements together; code after code of all buckets."""
        width, ends = self._buckets.width, starts[1:]
        lanes = np.flatnonzero(ends > starts[:-1])
        at, ends, places = starts[lanes], ends[lanes], lanes * width - 1
        stops = np.minimum((lanes + 1) * width, numel)
        while len(at):
            bits = elias.window(words, at)
            gaps, first = elias.read(bits)
            bits <<= first.astype(np.uint64)
            levels, second = elias.read(bits << np.uint64(1))
            at, places = at + (first + 1 + second), places + gaps
            if (places >= stops).any() or (levels > self._levels).any() or (at > ends).any():
                raise damaged("a bucket's codes lead out of the bucket, its levels, or its bits")
            values = levels.astype(np.float32)
            np.negative(values, where=bits >> np.uint64(63) != 0, out=values)
            yield places, values
            going = at < ends
            if not going.all():
                at, ends, places, stops = at[going], ends[going], places[going], stops[going]


def _signed_codes(levels: int) -> tuple[elias.Words, Ints]:
    """Signs and codes of the levels ``0 .. levels, -levels .. -1``, as NumPy indexes them, and their lengths."""
    numbers = np.concatenate([np.arange(levels + 1), np.arange(-levels, 0)])
    codes, lengths = elias.omega(np.maximum(np.abs(numbers), 1))
    return codes | (numbers < 0).astype(np.uint64) << lengths.astype(np.uint64), lengths + 1
