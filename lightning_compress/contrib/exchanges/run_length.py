"""Sparse sums with run-length encoding of zeros.

Hofmann, Ruenger, "MPI Reduction Operations for Sparse Floating-point Data", EuroPVM/MPI 2008.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.collectives import World
from lightning_compress.contrib.exchanges.recursive_doubling import DoublingPlan
from lightning_compress.core.state import States
from lightning_compress.exchanges.exchange import Exchange, ExchangePlan
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.sparse import coding
from lightning_compress.exchanges.sparse.split_gather import expected_count

HEADER = 16
GAP = 2
"""Number of zeros that takes as many bytes as a run."""


def most_bytes(numel: int) -> int:
    """Return the most bytes of a message of ``numel`` numbers."""
    return HEADER + 8 + 4 * numel


def expected_bytes(numel: int, share: float) -> float:
    """Return the expected bytes of runs and numbers, if a number is nonzero with probability ``share``."""
    zero = 1 - share
    between = share * zero + 2 * share * zero**2  # zeros that are written, for each number
    return numel * share * (8 * zero**3 + 4 * (1 + between))


def write(values: Tensor, message: Tensor) -> int:
    """Write float32 ``[numel]`` to uint8 ``[most_bytes(numel)]``; return the bytes of the message."""
    indices = coding.indices_of(values)
    return write_entries(indices, values[indices], len(values), message)


def write_entries(indices: Tensor, values: Tensor, numel: int, message: Tensor) -> int:
    """Do as ``write`` for values at ascending, distinct indices, int64 ``[count]``."""
    there = values != 0
    indices, values = indices[there], values[there]
    message[:HEADER] = 0
    if not len(indices):
        return HEADER
    begins = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
    begins[1:] = indices.diff() > GAP + 1
    first = begins.nonzero().flatten()
    starts, ends = indices[first], indices[torch.cat([first[1:] - 1, first.new_tensor([len(indices) - 1])])] + 1
    lengths = ends - starts
    offsets = lengths.cumsum(0) - lengths
    zeros = starts - torch.cat([starts.new_zeros(1), ends[:-1]])
    count, runs = int(lengths.sum()), len(starts)
    message[:8].view(torch.int32).copy_(torch.tensor([runs, count], dtype=torch.int32))
    middle, used = HEADER + 8 * runs, HEADER + 8 * runs + 4 * count
    message[HEADER:middle].view(torch.int32).copy_(torch.stack([zeros, lengths], dim=1).flatten())
    body = message[middle:used].view(torch.float32).zero_()
    body[indices - (starts - offsets)[begins.cumsum(0) - 1]] = values
    return used


def read_entries(message: Tensor, numel: int) -> tuple[Tensor | None, Tensor]:
    """Return indices, int64 ``[count]``, and values; or None and all ``numel`` numbers if all were written.

    Raises:
        ValueError: the message is damaged.
    """
    runs, count = message[:8].view(torch.int32).tolist()
    if not 0 <= runs <= count <= numel or HEADER + 8 * runs + 4 * count > len(message):
        raise ValueError(f"a message is damaged: it reports {runs} runs of {count} of {numel} numbers")
    middle = HEADER + 8 * runs
    zeros, lengths = message[HEADER:middle].view(torch.int32).long().view(runs, 2).unbind(1)
    ends = (zeros + lengths).cumsum(0)
    wrong = bool((zeros < 0).any()) or bool((lengths < 1).any())
    if wrong or int(lengths.sum()) != count or (runs and int(ends[-1]) > numel):
        raise ValueError(f"a message is damaged: its runs do not hold {count} of {numel} numbers")
    values = message[middle : middle + 4 * count].view(torch.float32)
    if count == numel:
        return None, values
    indices = torch.arange(count, dtype=torch.int64, device=message.device) + zeros.cumsum(0).repeat_interleave(lengths)
    there = values != 0
    return indices[there], values[there]


class Runs:
    """These functions as a ``Coding``."""

    most_bytes = staticmethod(most_bytes)
    write = staticmethod(write)
    write_entries = staticmethod(write_entries)
    read_entries = staticmethod(read_entries)


@dataclass(frozen=True)
class RunLength(Exchange):
    """Does as ``recursive_doubling``, but sends the lengths of runs of zeros, and the numbers between them.

    It suits gradients that are 0 in long runs (rows of an embedding, inactive units) and dense elsewhere. A number
    takes 4 bytes, a run 8, and a sum without zeros 8 bytes more than its numbers. So any method may use it, also
    ``none``. Sums are exact.
    """

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        sizes = [section.layout.numel for section in sections]

        def used(ranks: int) -> float:
            shares = [expected_count([each], ranks) / max(1, each.layout.numel) for each in sections]
            parts = [expected_bytes(numel, share) for numel, share in zip(sizes, shares, strict=True)]
            return HEADER + 8 * any(share == 1 for share in shares) + sum(parts)

        return DoublingPlan("run_length", Runs(), used, sections, world)
