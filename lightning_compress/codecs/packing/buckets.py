"""Buckets of a vector: equal runs of elements that share a norm."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_compress.codecs.packing.bits import packed_size
from lightning_compress.core.workspace import pieces, scratch

Norm = Literal["max", "l2"]
RUN = 1 << 18
"""Elements that are encoded at a time: what they need fits a CPU's caches."""


def bucket_shape(numel: int, bucket: int) -> tuple[int, int]:
    """The elements of a whole bucket, and how many buckets there are; a vector that is shorter than one is one."""
    width = min(bucket, 8 * packed_size(max(1, numel)))
    return width, -(-numel // width)


class Buckets:
    """Cuts a vector into runs of whole buckets, and a last one that may be shorter.

    Args:
        numel: length of the vector.
        bucket: elements of a bucket; a vector that is shorter is one bucket.
        norm: "max", the largest magnitude, or "l2".
        device: where the vector is.

    Attributes:
        width: elements of a whole bucket.
        count: buckets.
        pieces: ``(buckets, elements)`` as slices, each with buckets of one width.
        most: elements of the largest piece.
    """

    def __init__(self, numel: int, bucket: int, norm: Norm, device: torch.device) -> None:
        self.width, self.count = bucket_shape(numel, bucket)
        whole, rest = divmod(numel, self.width)
        rows = max(1, min(RUN // self.width, whole))
        self.most = rows * self.width
        self.pieces = [(part, slice(part.start * self.width, part.stop * self.width)) for part in pieces(whole, rows)]
        if rest:
            self.pieces.append((slice(whole, whole + 1), slice(whole * self.width, numel)))
        self._wide = scratch("qsgd wide", self.most, torch.float64, device) if norm == "l2" else None

    def norms(self, rows: Tensor) -> Tensor:
        """The norm of each row, in float64 so that every device finds the same."""
        if self._wide is None:
            return torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_()).double()
        return self._wide[: rows.numel()].view(rows.shape).copy_(rows).square_().sum(dim=1).sqrt_()
