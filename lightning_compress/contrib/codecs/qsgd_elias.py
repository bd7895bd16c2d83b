"""QSGD with the paper's coding: Elias codes of the positions and levels of all nonzero elements."""

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
"""Largest bucket: the length of its codes in bits fits into 16 bits."""
LANES = 1 << 21
"""Elements of the buckets that are read together. More elements need fewer calls, but more memory."""
DEVIATIONS = 4
"""A message has room for this many standard deviations above the expected bits in the worst case."""
HEADER = 6
"""Bytes for each bucket: its norm (float32) and the length of its codes in bits (uint16)."""


@dataclass(frozen=True)
class QSGDElias(QSGD):
    """Send the same numbers as ``QSGD``, bit for bit, with Elias codes for those that are not 0.

    Messages vary in length. They hold every bucket's norm as float32, the length of its codes in bits as uint16, then
    the codes of all buckets, the first bit highest. As in the paper, a nonzero integer q takes Elias' omega code of its
    distance to the previous one (for the first one, its position in the bucket, from 1 on), a sign bit (1 for negative
    numbers), and the omega code of ``|q|``. The paper bounds the expected bits of a bucket with the L2 norm by ``(3 +
    (1.5 + o(1)) log2(2 (s^2 + n) / (s (s + sqrt(n))))) s (s + sqrt(n))``, and for ``s = sqrt(n)`` by ``2.8 n``. On
    N(0, 1), it takes 0.39 bits per element with 2 bits and n = 512 (the bound says 0.52), and 2.7 with 6 bits and n =
    1024, plus 48 for each bucket's norm and length. With the L2 norm, a message has room for the expected bits in the
    worst case plus four standard deviations; with the max norm, for the largest message. Buckets that do not fit send 0
    and stay in the vector, as those do that ``QSGD`` does not send: without error feedback, they count as zero. Codes
    are written and read on the host; an accelerator waits for it.

    Args:
        bits: see ``QSGD``. The coding pays off with 2 bits and the L2 norm.
        bucket: elements that share a norm, 64 to 4096; the codes of a bucket are read one after the other.
        norm: "max" or "l2".
        correlated: see ``QSGD``.

    Raises:
        ValueError: a setting is out of range.

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
        """See ``Codec.plan``; messages are not summed, so ``summands`` has no effect."""
        return EliasPlan(layout, device, self.bits, self.bucket, self.norm)


def expected_bits(numel: int, levels: int) -> float:
    """Return an upper bound on the expected bits of a bucket's codes, without norm and length, for the L2 norm.

    On average, at most ``min(n, s sqrt(n))`` elements are not 0. Their gaps add up to at most n, and their levels to at
    most ``s sqrt(n)`` on average. The length of a code is bounded by a concave function of its number.
    """
    corners = 2.0 ** np.array([0, 1, 2, 4, 16, 32])
    lengths = [1, 3, 6, 11, 28, 44]
    total = levels * math.sqrt(numel)
    nonzero = np.linspace(0, min(numel, total), 257)[1:]
    each = 1 + sum(np.interp(each / nonzero, corners, lengths) for each in (numel, total))
    return float((nonzero * each).max())


class EliasPlan(Plan):
    """The plan of ``QSGDElias``, which describes the messages.

    Args:
        layout: of the vector.
        device: of the vector; the codes are written on the host.
        bits: of the levels in packed form, 2 to 8.
        bucket: elements that share a norm.
        norm: "max" or "l2".
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
                written = int(np.searchsorted(np.cumsum(sizes), int(counts[:fitting].sum()), side="right"))
                codes, sizes = codes[:written], sizes[:written]
            end = elias.append(self._words, end, codes, sizes)
            self._norms[buckets] = norms
            rows.sub_(levels.mul_(self._quantiser.steps(norms).unsqueeze(1)))
        self._used = self._body + -(-end // 8)
        header = np.concatenate([self._norms.cpu().numpy().view(np.uint8), self._lengths.view(np.uint8)])
        message[: self._body] = torch.from_numpy(header)
        message[self._body : self._used] = torch.from_numpy(elias.to_bytes(self._words, end))

    def _code(self, levels: npt.NDArray[np.int16]) -> tuple[elias.Words, Ints, Ints]:
        """Return the codes of the levels ``[buckets, width]``, their lengths, and the bits of each bucket."""
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
        with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes inf, as in torch
            for norms, starts, words in parsed:
                self._add(self._quantiser.steps(torch.from_numpy(norms)).mul_(weight).numpy(), starts, words, out)

    def _add(self, steps: npt.NDArray[np.float32], starts: Ints, words: elias.Words, out: Tensor) -> None:
        """Add the numbers of one message, times each bucket's step."""
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
        """Return the norms, the bits at which each bucket's codes begin (and the last ones end), and the stream."""
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
        """Yield positions and levels of buckets with ``numel`` elements in total, the next code of all at a time."""
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
    """Return codes with signs of the levels ``0 .. levels, -levels .. -1``, as NumPy indexes them, and lengths."""
    numbers = np.concatenate([np.arange(levels + 1), np.arange(-levels, 0)])
    codes, lengths = elias.omega(np.maximum(np.abs(numbers), 1))
    return codes | (numbers < 0).astype(np.uint64) << lengths.astype(np.uint64), lengths + 1
