"""Do all ranks agree? All get the same answer, so that no rank goes on alone or waits for one that stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.collectives.collective import Collective
from lightning_compress.core import errors

PROBLEM_BYTES = 500
"""Bytes of a rank's problem that the other ranks get to read, at most."""
BLOCK = 32
"""Bytes by which texts are compared, to show where they differ."""
SAME_ARGUMENTS = "; start all ranks with the same script and arguments"
"""Advice if settings differ."""


def check(
    said: Mapping[str, object], problem: ValueError | None, ranks: Collective, device: torch.device, advice: str
) -> None:
    """Raise on all ranks if one has a problem, or if they do not agree, see ``disagreement``; a collective call.

    Raises:
        ValueError: on every rank, with the text of ``disagreement``; on a rank with a problem, that problem itself.
    """
    why = disagreement(said, problem, ranks, device, advice)
    if why:
        raise problem or ValueError(errors.called_alone() or why)  # else that call was taken for this one


def disagreement(
    said: Mapping[str, object], problem: Exception | None, ranks: Collective, device: torch.device, advice: str = ""
) -> str:
    """Return why the ranks cannot continue together; a collective call.

    Args:
        said: values that have to be equal on all ranks, by what they are called; compared by their ``repr``.
        problem: why this rank cannot continue, or None.
        ranks: the ranks to compare.
        device: of the tensors that are exchanged.
        advice: is appended to the list of ranks that differ.

    Returns:
        this rank's problem, or that of the first rank that has one, or which ranks differ from rank 0 in what. Empty if
        all agree.
    """
    digests = [problem is not None, *(digest(repr(value).encode()) for value in said.values())]
    table = gathered(torch.tensor(digests, dtype=torch.int64, device=device), ranks).tolist()
    if failed := [rank for rank, row in enumerate(table) if row[0]]:
        text = "" if problem is None else str(problem) or type(problem).__name__
        letters = text.encode()[:PROBLEM_BYTES].ljust(PROBLEM_BYTES, b"\0")
        first = gathered(torch.tensor(list(letters), dtype=torch.uint8, device=device), ranks)[failed[0]]
        return text or f"rank {failed[0]}: {bytes(first.tolist()).rstrip(bytes(1)).decode(errors='ignore')}"
    for place, what in enumerate(said, start=1):
        if others := [str(rank) for rank, row in enumerate(table) if row[place] != table[0][place]]:
            shown = not isinstance(said[what], int)  # checksums tell nobody anything
            apart = _difference(repr(said[what]).encode(), int(others[0]), ranks, device) if shown else ""
            return f"the {what} of rank {', '.join(others)} differ from those of rank 0{apart}{advice}"
    return ""


def _difference(letters: bytes, other: int, ranks: Collective, device: torch.device) -> str:
    """Return what two ranks have where their texts begin to differ; a collective call.

    Args:
        letters: this rank's text.
        other: the rank whose text differs from that of rank 0.
        ranks: the ranks.
        device: of the tensors that are exchanged.
    """
    longest = int(gathered(torch.tensor([len(letters)], dtype=torch.int64, device=device), ranks).max())
    starts = range(0, longest, BLOCK)
    blocks = [digest(letters[start : start + BLOCK]) for start in starts]
    table = gathered(torch.tensor(blocks, dtype=torch.int64, device=device), ranks)
    begin = max(0, starts[int((table[0] != table[other]).nonzero()[0])] - BLOCK)
    part = letters[begin : begin + 4 * BLOCK].ljust(4 * BLOCK, b"\0")
    shown = gathered(torch.tensor(list(part), dtype=torch.uint8, device=device), ranks).tolist()
    own, first = (bytes(shown[rank]).rstrip(bytes(1)).decode(errors="ignore") for rank in (other, 0))
    return f" (rank {other} has ... {own} ..., and rank 0 has ... {first} ...)"


def same(numbers: Tensor, ranks: Collective) -> Tensor:
    """Return for each integer of ``numbers [n]`` whether it is equal on all ranks, bool ``[n]``.

    A collective call: one all-reduce.
    """
    extremes = torch.stack([numbers, -numbers])
    ranks.all_reduce(extremes, "max")
    return extremes[0] == -extremes[1]


def anywhere(flags: Sequence[bool], ranks: Collective, device: torch.device) -> list[bool]:
    """Return for each flag whether any rank has set it; a collective call: one all-reduce."""
    votes = torch.tensor(flags, dtype=torch.int32, device=device)
    ranks.all_reduce(votes, "max")
    return [bool(vote) for vote in votes.tolist()]


def gathered(tensor: Tensor, ranks: Collective) -> Tensor:
    """Return ``tensor [n]`` of every rank as ``[size, n]``, in rank order; a collective call: one all-gather."""
    everyone = tensor.new_empty(ranks.size, len(tensor))
    ranks.all_gather(tensor, everyone)
    return everyone


def digest(content: bytes | memoryview) -> int:
    """Return a 56-bit hash, an integer whose negative is an int64 too."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
