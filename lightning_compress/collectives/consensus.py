"""Do all ranks agree? One answer for all of them, so that none goes on alone, and none waits for one that stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.collectives.collective import Collective

LONGEST = 500
"""Bytes of what one rank tells the others of its problem."""
ALIKE = "; start all ranks with the same script and arguments"
"""Advice where settings differ."""


def check(
    said: Mapping[str, object], problem: ValueError | None, ranks: Collective, device: torch.device, advice: str
) -> None:
    """Stop all ranks where one has to, or where they do not say the same; a collective call.

    Raises:
        ValueError: on every rank, what ``disagreement`` says; on one that has a problem that itself.
    """
    why = disagreement(said, problem, ranks, device, advice)
    if why:
        raise problem or ValueError(why)


def disagreement(
    said: Mapping[str, object], problem: Exception | None, ranks: Collective, device: torch.device, advice: str = ""
) -> str:
    """Why the ranks cannot go on together; a collective call.

    Args:
        said: what has to be the same on all ranks, by what it is called; compared by its ``repr``.
        problem: why this rank cannot go on, or None.
        ranks: that compare.
        device: on which they talk.
        advice: goes behind who differs.

    Returns:
        this rank's problem, else that of the first rank which has one, else which ranks differ from rank 0 and in what;
        an empty text where all is well.
    """
    own = [problem is not None, *(digest(repr(each).encode()) for each in said.values())]
    table = gathered(torch.tensor(own, dtype=torch.int64, device=device), ranks).tolist()
    if failed := [rank for rank, row in enumerate(table) if row[0]]:
        text = "" if problem is None else str(problem) or type(problem).__name__
        letters = text.encode()[:LONGEST].ljust(LONGEST, b"\0")
        told = gathered(torch.tensor(list(letters), dtype=torch.uint8, device=device), ranks)[failed[0]]
        return text or f"rank {failed[0]}: {bytes(told.tolist()).rstrip(bytes(1)).decode(errors='ignore')}"
    for place, what in enumerate(said, start=1):
        if others := [str(rank) for rank, row in enumerate(table) if row[place] != table[0][place]]:
            return f"the {what} of rank {', '.join(others)} differ from those of rank 0{advice}"
    return ""


def same(numbers: Tensor, ranks: Collective) -> Tensor:
    """Of each whole number ``[n]``, whether all ranks have it, bool ``[n]``; a collective call, one all-reduce."""
    extremes = torch.stack([numbers, -numbers])
    ranks.all_reduce_max(extremes)
    return extremes[0] == -extremes[1]


def anywhere(flags: Sequence[bool], ranks: Collective, device: torch.device) -> list[bool]:
    """Of each flag, whether any rank has it; a collective call, one all-reduce."""
    told = torch.tensor(flags, dtype=torch.int32, device=device)
    ranks.all_reduce_max(told)
    return [bool(each) for each in told.tolist()]


def gathered(own: Tensor, ranks: Collective) -> Tensor:
    """What every rank has, ``[size, n]`` of ``[n]``, in their order; a collective call, one all-gather."""
    everyone = own.new_empty(ranks.size, len(own))
    ranks.all_gather(own, everyone)
    return everyone


def digest(content: bytes | memoryview) -> int:
    """56 bits of it, a number whose negative is an int64 too."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
