"""QSGD: stochastic rounding to a few levels per bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_compress.codecs.base import Codec, Plan, aligned
from lightning_compress.codecs.bits import packed_size
from lightning_compress.codecs.buffers import check, pieces, scratch
from lightning_compress.codecs.quantise import Quantiser
from lightning_compress.layout import Layout

Norm = Literal["max", "l2"]
RUN = 1 << 18
"""Elements that are encoded at a time: what they need fits a CPU's caches."""


@dataclass(frozen=True)
class QSGD(Codec):
    """Send ``norm * sign(v) * q / s`` with a random integer q whose mean is ``s |v| / norm``.

    ``s = 2^(bits-1) - 1``, norm is the bucket's, and q is one of the two neighbours of ``s |v| / norm``: so the message
    is right on average, and an element on a level is sent as it is. ``bits + 32 / bucket`` bits per element (4 bits in
    buckets of 512: 4.0625). With the L2 norm and buckets of n elements the expected squared error is at most
    ``min(n / s^2, sqrt(n) / s)`` times the squared norm, and at most ``s (s + sqrt(n))`` elements are expected not
    to be 0; the max norm has a smaller error on dense gradients and no such count. What rounding did stays in the
    vector, where error feedback, off by default, would find it. No state.

    A message is every bucket's norm as float32, zeros up to a multiple of 16 bytes, then the integers as two's
    complements, in planes of 4, 2 and 1 bits of all of them (8 bits are one plane), the first one lowest. A
    bucket whose norm is below 2^-100 sends 0 and stays.

    Args:
        bits: 2 (q is 0 or 1) to 8 (0 to 127). From 4 on it counts as harmless beside Adam: the
            paper's runs lose accuracy at 2 bits only. No run of ours stands behind it yet.
        bucket: elements that share a norm; a multiple of 8, at least 64 (half a bit each, closest), and as large as one
            likes (a vector that is shorter is one bucket).
        norm: "max", the largest magnitude, or "l2".

    Raises:
        ValueError: a setting is none of these.

    Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    NIPS 2017, arXiv 1610.02132.
    """

    bits: int = 4
    bucket: int = 512
    norm: Norm = "max"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"QSGD(bits={self.bits!r}): bits must be an integer from 2 to 8; try 4")
        if not isinstance(self.bucket, int) or self.bucket < 64 or self.bucket % 8:
            raise ValueError(f"QSGD(bucket={self.bucket!r}): bucket must be a multiple of 8, at least 64; try 512")
        if self.norm not in get_args(Norm):
            raise ValueError(f"QSGD(norm={self.norm!r}): norm must be one of 'max', 'l2'")

    @property
    def block(self) -> int:  # type: ignore[override]
        """Shards are cut between buckets."""
        return self.bucket

    @property
    def safe_with_adam(self) -> bool:
        """From 4 bits on."""
        return self.bits >= 4

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return _QSGDPlan(layout, device, self)


class _QSGDPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, codec: QSGD) -> None:
        super().__init__(layout)
        numel = layout.numel
        bucket = min(codec.bucket, 8 * packed_size(max(1, numel)))
        whole, rest = divmod(numel, bucket)
        self._header = 4 * (whole + bool(rest))
        self._body = aligned(self._header)
        rows = max(1, min(RUN // bucket, whole))
        self._quantiser = Quantiser(codec.bits, 0.0, numel, rows * bucket, device)
        self.message_size = self._body + self._quantiser.size
        self._norms = torch.empty(whole + bool(rest), dtype=torch.float32, device=device)
        self._wide = scratch("qsgd wide", rows * bucket, torch.float64, device) if codec.norm == "l2" else None
        self._pieces = [(part, slice(part.start * bucket, part.stop * bucket)) for part in pieces(whole, rows)]
        if rest:
            self._pieces.append((slice(whole, whole + 1), slice(whole * bucket, numel)))

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        check(vector, message, self.layout.numel, self.message_size)
        for buckets, elements in self._pieces:
            rows = vector[elements].view(buckets.stop - buckets.start, -1)
            norms, factors = self._quantiser.fit(self._measure(rows))
            self._norms[buckets] = norms
            levels = self._quantiser.encode(rows, factors.unsqueeze(1), elements, key, message[self._body :])
            rows.addcmul_(levels, self._quantiser.steps(norms).unsqueeze(1), value=-1)
        message[: self._header] = self._norms.view(torch.uint8)
        message[self._header : self._body] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        check(out, messages, self.layout.numel, self.message_size)
        norms = messages[:, : self._header].clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
        steps = self._quantiser.steps(norms).mul_(weight).view(len(messages), len(self._norms), 1)
        for buckets, elements in self._pieces:
            rows = out[elements].view(buckets.stop - buckets.start, -1)
            if not accumulate:
                rows.zero_()
            for message, step in zip(messages, steps[:, buckets], strict=True):
                rows.addcmul_(self._quantiser.decode(message[self._body :], elements, rows.shape), step)

    def _measure(self, rows: Tensor) -> Tensor:
        """The norm of each bucket, in float64 so that every device finds the same."""
        if self._wide is None:
            return torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_()).double()
        return self._wide[: rows.numel()].view(rows.shape).copy_(rows).square_().sum(dim=1).sqrt_()
