"""QSGD: stochastic rounding to a few levels per bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.base import Codec, FusedPlan, KernelPlan, Plan, Summands, aligned
from lightning_compress.codecs.cast import BF16
from lightning_compress.codecs.packing.buckets import Buckets, Norm, bucket_shape
from lightning_compress.codecs.packing.planes import code_bytes
from lightning_compress.codecs.quantize.levels import BITS, LARGEST, Quantiser, check_correlated, more_bits
from lightning_compress.core.buffers import scratch
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import Stream, word_state
from lightning_compress.core.registry import lookup

Coding = Literal["packed", "elias"]


@dataclass(frozen=True)
class QSGD(Codec):
    """Send ``norm * sign(v) * q / s`` with a random integer q whose mean is ``s |v| / norm``.

    ``s = 2^(bits-1) - 1``, norm is the bucket's, and q is one of the two neighbours of ``s |v| / norm``: so the message
    is right on average, and an element on a level is sent as it is. ``bits + 32 / bucket`` bits per element (4 bits in
    buckets of 512: 4.0625). With the L2 norm and buckets of n elements the expected squared error is at most
    ``min(n / s^2, sqrt(n) / s)`` times the squared norm, and at most ``s (s + sqrt(n))`` elements are expected not
    to be 0; the max norm has a smaller error on dense gradients and no such count. What rounding did stays in the
    vector, where error feedback, off by default, would find it. No state.

    Packed, a message is every bucket's norm as float32, zeros up to a multiple of 16 bytes, then the integers as two's
    complements, in planes of 4, 2 and 1 bits of all of them (8 bits are one plane), the first one lowest. A
    bucket whose norm is below 2^-100 sends 0 and stays.

    Args:
        bits: 2 (q is 0 or 1) to 8 (0 to 127). From 4 on it counts as harmless beside Adam:
            the paper's runs lose accuracy at 2 bits only, and those of this package nothing at 4.
        bucket: elements that share a norm; a multiple of 8, at least 64 (half a bit each, closest), and as large as one
            likes (a vector that is shorter is one bucket).
        norm: "max", the largest magnitude, or "l2".
        coding: "packed", or "elias", which pays where few elements are not 0: 2 bits, and the L2 norm; see
            ``contrib.codecs.qsgd_elias``, which makes the messages.
        correlated: ranks round by random bits that they share; see ``Rotated``.

    Raises:
        ValueError: a setting is none of these.

    Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    NIPS 2017, arXiv 1610.02132.
    """

    name: ClassVar[str] = "qsgd"
    keeps_zeros: ClassVar[bool] = True
    bits: int = 4
    bucket: int = 512
    norm: Norm = "max"
    coding: Coding = "packed"
    correlated: bool = False

    def __post_init__(self) -> None:
        check_correlated("QSGD", self.correlated)
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"QSGD(bits={self.bits!r}): bits must be an integer from 2 to 8; try 4")
        if not isinstance(self.bucket, int) or self.bucket < 64 or self.bucket % 8:
            raise ValueError(f"QSGD(bucket={self.bucket!r}): bucket must be a multiple of 8, at least 64; try 512")
        if self.norm not in get_args(Norm):
            raise ValueError(f"QSGD(norm={self.norm!r}): norm must be one of 'max', 'l2'")
        if self.coding not in get_args(Coding):
            raise ValueError(f"QSGD(coding={self.coding!r}): coding must be one of 'packed', 'elias'")
        self._coder()

    @property
    def block(self) -> int:  # type: ignore[override]
        """Shards are cut between buckets."""
        return self.bucket

    @property
    def safe_with_adam(self) -> bool:
        """From 4 bits on."""
        return self.bits >= 4

    def refined(self, ranks: int) -> Codec:
        """See ``Codec.refined``: half of log2 of the ranks more bits; ``bf16`` where that is more than 8.

        With the L2 norm, as many as the paper's bound of the variance asks for: elements below the first level, as most
        are then, have a variance that falls by 2 a bit, not by 4.
        """
        bits = self.bits + more_bits(ranks)
        if self.norm == "l2":
            enough = self._variance(self.bits) / ranks
            bits = next((each for each in range(self.bits, BITS + 1) if self._variance(each) <= enough), BITS + 1)
        return replace(self, bits=bits) if bits <= BITS else BF16()

    def _coder(self) -> Codec | None:
        """What makes messages of another coding."""
        if self.coding == "packed":
            return None
        coder: Codec = lookup(f"{self.name}_{self.coding}", Codec)(self.bits, self.bucket, self.norm)
        return coder

    def _variance(self, bits: int) -> float:
        """The paper's bound for a bucket with the L2 norm, relative to its square."""
        levels: int = 2 ** (bits - 1) - 1
        return min(self.bucket / levels**2, math.sqrt(self.bucket) / levels)

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        if coder := self._coder():
            return coder.plan(layout, device)
        fused = kernels.backend(__name__, device, "triton")
        if fused and self.bucket <= fused.LONGEST:
            width, count = bucket_shape(layout.numel, self.bucket)
            body = aligned(4 * count)
            coder = fused.coder(width, self.norm == "l2", self.bits, body)
            return KernelPlan(layout, body + code_bytes(layout.numel, self.bits), coder)
        return _QSGDPlan(layout, device, self)


class _QSGDPlan(FusedPlan):
    def __init__(self, layout: Layout, device: torch.device, codec: QSGD) -> None:
        super().__init__(layout)
        self._buckets = Buckets(layout.numel, codec.bucket, codec.norm, device)
        self._header = 4 * self._buckets.count
        self._body = aligned(self._header)
        self._quantiser = Quantiser(codec.bits, 0.0, layout.numel, self._buckets.most, device)
        self.message_size = self._body + self._quantiser.size
        self._norms = torch.empty(self._buckets.count, dtype=torch.float32, device=device)
        fast = kernels.backend(__name__, device, "numba") if codec.norm == "max" else None
        self._ways: list[tuple[slice, slice, _Slow | _Fast]] = []
        for buckets, elements in self._buckets.pieces:
            width = (elements.stop - elements.start) // (buckets.stop - buckets.start)
            way: _Slow | _Fast = _Slow(self._buckets, self._quantiser)
            if fast and width % fast.WIDTH == 0:
                way = _Fast(fast, self._quantiser)
            self._ways.append((buckets, elements, way))

    def encode(self, vector: Tensor, message: Tensor, key: int, keep: bool = True, summands: Summands = None) -> None:
        self.take(vector, message, summands)
        stream = self.stream(key)
        for buckets, elements, way in self._ways:
            rows = vector[elements].view(buckets.stop - buckets.start, -1)
            way.encode(rows, message[self._body :], elements, self._norms[buckets], stream, keep)
        message[: self._header] = self._norms.view(torch.uint8)
        message[self._header : self._body] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        norms = messages[:, : self._header].clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
        steps = self._quantiser.steps(norms).mul_(weight).view(len(messages), len(self._norms))
        for buckets, elements, way in self._ways:
            rows = out[elements].view(buckets.stop - buckets.start, -1)
            way.decode(messages[:, self._body :], elements, steps[:, buckets], rows, accumulate)


class _Slow:
    """A piece of buckets of one width by tensor operations."""

    def __init__(self, buckets: Buckets, quantiser: Quantiser) -> None:
        self._buckets, self._quantiser = buckets, quantiser

    def encode(self, rows: Tensor, body: Tensor, elements: slice, norms: Tensor, stream: Stream, keep: bool) -> None:
        """Write codes and norms; take what they stand for out of the rows, or leave those as they are."""
        own, factors = self._quantiser.fit(self._buckets.norms(rows))
        norms.copy_(own)
        levels = self._quantiser.encode(rows, factors.unsqueeze(1), elements, stream, body)
        if keep:
            rows.sub_(levels.mul_(self._quantiser.steps(own).unsqueeze(1)))  # rounded twice, whatever the processor

    def decode(self, bodies: Tensor, elements: slice, steps: Tensor, rows: Tensor, accumulate: bool) -> None:
        """Write, or add, the sum of what codes stand for."""
        if not accumulate:
            rows.zero_()
        for body, step in zip(bodies, steps.unsqueeze(2), strict=True):
            rows.add_(self._quantiser.decode(body, elements, rows.shape).mul_(step))


class _Fast:
    """The same by a kernel, which touches each number in memory once; codes of four bits it packs by itself."""

    def __init__(self, kernel: ModuleType, quantiser: Quantiser) -> None:
        self._kernel, self._quantiser = kernel, quantiser
        self._nibbles = quantiser.sign == 8

    def encode(self, rows: Tensor, body: Tensor, elements: slice, norms: Tensor, stream: Stream, keep: bool) -> None:
        """See ``_Slow``."""
        codes = self._room(body[None], elements)[0]
        random = np.uint64(word_state(stream.key, elements.start)), np.int16(stream.offset)
        given = rows.view(-1).numpy(), rows.shape[1], self._quantiser.top, LARGEST, *random
        self._kernel.encode(*given, codes.numpy(), self._nibbles, norms.numpy(), keep)
        if not self._nibbles:
            self._quantiser.planes.write(codes, elements, body)

    def decode(self, bodies: Tensor, elements: slice, steps: Tensor, rows: Tensor, accumulate: bool) -> None:
        """See ``_Slow``."""
        codes = self._room(bodies, elements)
        if not self._nibbles:
            for own, body in zip(codes, bodies, strict=True):
                self._quantiser.planes.read(own, elements, body)
        sent = codes.numpy(), self._nibbles, np.int32(self._quantiser.sign), steps.numpy()
        self._kernel.decode(*sent, rows.shape[1], rows.view(-1).numpy(), accumulate)

    def _room(self, bodies: Tensor, elements: slice) -> Tensor:
        """Where the kernel finds the codes of a piece, or puts them; a row for each message."""
        if self._nibbles:
            return bodies[:, elements.start // 2 : elements.stop // 2]
        numel = elements.stop - elements.start
        return scratch("qsgd codes", len(bodies) * numel, torch.uint8, bodies.device).view(len(bodies), numel)
