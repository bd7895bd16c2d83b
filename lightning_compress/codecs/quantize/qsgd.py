"""QSGD: stochastic rounding to a few levels per bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.cast import BF16
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan, aligned
from lightning_compress.codecs.packing.bits import block_shape
from lightning_compress.codecs.packing.planes import code_bytes
from lightning_compress.codecs.quantize import entropy
from lightning_compress.codecs.quantize.entropy import LEAST_BITS, LONGEST, EntropyPlan
from lightning_compress.codecs.quantize.levels import BITS, Buckets, LevelPlan, Norm, Piece, check_correlated, more_bits
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import lookup

Coding = Literal["packed", "entropy", "elias"]


@dataclass(frozen=True)
class QSGD(Codec):
    """Send ``norm * sign(v) * q / s`` with a random integer q whose mean is ``s |v| / norm``.

    ``s = 2^(bits-1) - 1``, and norm is the norm of the element's bucket. q is ``s |v| / norm`` rounded down or up at
    random, so the message is unbiased. An element that equals a level is sent exactly. ``bits + 32 / bucket`` bits per
    element: 4.0625 for 4 bits and buckets of 512.

    With the L2 norm and buckets of n elements, the expected squared error is at most ``min(n / s^2, sqrt(n) / s)``
    times the squared norm, and at most ``s (s + sqrt(n))`` elements are expected to be nonzero. On dense gradients the
    max norm has a smaller error, but there is no such bound of the nonzero elements. Rounding errors stay in the
    vector, for error feedback, which is off by default. No state.

    A packed message is every bucket's norm as float32, zeros up to a multiple of 16 bytes, then every q with its sign
    as two's complement. These are stored in planes of 4, 2 and 1 bits of all elements (8 bits are one plane), the first
    element lowest. A bucket whose ``norm / s`` is below 2^-111 (4e-34) sends 0 and stays in the vector;
    without error feedback, it counts as zero.

    With ``coding="entropy"``, a bucket's codes are Huffman codes of pairs, by one of six tables that every rank has.
    Messages vary in length. In buckets of a multiple of 64, they take at most a byte a bucket and 110 bytes more than
    packed ones. Gradients of several models take 3.0 to 3.4 bits an element at 4 bits, and 4.0 to 4.4 at 5
    (``lightning-compress docs cost``). It needs a CPU with numba: elsewhere ``plan`` raises ValueError.

    Args:
        bits: 2 (q is 0 or 1) to 8 (q is 0 to 127). From 4 bits on it counts as safe with Adam: the paper's runs lose
            accuracy only at 2 bits, and our runs lose none at 4.
        bucket: elements that share a norm: a multiple of 8, at least 64, without upper limit. A vector that is shorter
            is one bucket. Smaller buckets have a smaller error; 64 costs half a bit per element for the norms.
        norm: "max", the largest magnitude, or "l2".
        coding: "packed"; "entropy", which sends the same numbers in about a fifth fewer bits (see below); or "elias",
            which is smaller if few elements are nonzero (2 bits and the L2 norm), see ``contrib.codecs.qsgd_elias``.
        correlated: ranks round by random bits that they share; see ``Rotated``.

    Raises:
        ValueError: a setting is out of range.

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
            raise ValueError(f"QSGD(coding={self.coding!r}): coding must be one of 'packed', 'entropy', 'elias'")
        self._check_entropy()
        self._coder()

    def _check_entropy(self) -> None:
        if self.coding != "entropy":
            return
        if self.bits < LEAST_BITS or self.norm != "max" or self.bucket > LONGEST:
            raise ValueError(
                f"QSGD(bits={self.bits}, bucket={self.bucket}, norm={self.norm!r}, coding='entropy'): bits must be "
                f"{LEAST_BITS} or more, the bucket at most {LONGEST}, and the norm 'max'; or use coding='packed'"
            )

    @property
    def block(self) -> int:  # type: ignore[override]
        """Shards are cut at multiples of the bucket."""
        return self.bucket

    def runs_on(self, device: torch.device) -> bool:
        """See ``Codec.runs_on``: ``coding="entropy"`` needs a CPU with numba."""
        return self.coding != "entropy" or kernels.backend(entropy.__name__, device, "numba") is not None

    @property
    def packed(self) -> QSGD:
        """What sends the same numbers without ``coding``."""
        return replace(self, coding="packed")

    @property
    def safe_with_adam(self) -> bool:
        """True from 4 bits on."""
        return self.bits >= 4

    def refined(self, ranks: int) -> Codec:
        """Return QSGD with ``log2(ranks) / 2`` more bits, rounded up, or ``bf16`` if these are more than 8.

        With the L2 norm the number of bits follows from the paper's bound of the variance. Most elements are then below
        the first level, where a bit divides the variance by 2 and not by 4.
        """
        bits = self.bits + more_bits(ranks)
        if self.norm == "l2":
            enough = self._variance(self.bits) / ranks
            bits = next((b for b in range(self.bits, BITS + 1) if self._variance(b) <= enough), BITS + 1)
        return replace(self, bits=bits) if bits <= BITS else BF16()

    def _coder(self) -> Codec | None:
        """Return the codec of another coding, or None if messages are packed."""
        if self.coding != "elias":
            return None
        coder: Codec = lookup(f"{self.name}_{self.coding}", Codec)(self.bits, self.bucket, self.norm)
        return coder

    def _variance(self, bits: int) -> float:
        """Return the paper's bound of the variance for a bucket with the L2 norm, relative to its squared norm."""
        levels: int = 2 ** (bits - 1) - 1
        return min(self.bucket / levels**2, math.sqrt(self.bucket) / levels)

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        if coder := self._coder():
            return coder.plan(layout, device)
        if self.coding == "entropy":
            return EntropyPlan(layout, device, self.bits, self.bucket)
        fused = kernels.backend(__name__, device, "triton")
        if fused and self.bucket <= fused.LONGEST:
            width, count = block_shape(layout.numel, self.bucket)
            body = aligned(4 * count)
            coder = fused.coder(width, self.norm == "l2", self.bits, body)
            return KernelPlan(layout, body + code_bytes(layout.numel, self.bits), coder)
        return _QSGDPlan(layout, device, self)


class _QSGDPlan(LevelPlan):
    def __init__(self, layout: Layout, device: torch.device, codec: QSGD) -> None:
        self._buckets = Buckets(layout.numel, codec.bucket, codec.norm, device)
        fast = kernels.backend(__name__, device, "numba") if codec.norm == "max" else None
        parts = []
        for buckets, elements in self._buckets.pieces:
            count = buckets.stop - buckets.start
            width = (elements.stop - elements.start) // count
            arguments = (width,) if fast and width % fast.WIDTH == 0 else None
            parts.append(Piece(buckets, elements, elements, (count, width), arguments))
        super().__init__(layout, device, codec.bits, 0.0, parts, fast)

    def norms_of(self, numbers: Tensor) -> Tensor:
        return self._buckets.norms(numbers).unsqueeze(1)

    def forward(self, part: Tensor, piece: Piece) -> Tensor:
        return part.view(piece.shape)

    def inverse(self, numbers: Tensor, piece: Piece) -> Tensor:
        return numbers.view(-1)

    def add(self, part: Tensor, piece: Piece, numbers: Iterable[Tensor]) -> None:
        for decoded in numbers:
            part.add_(decoded.view(-1))
