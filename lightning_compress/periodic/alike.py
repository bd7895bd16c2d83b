"""Whether tensors are the same on all ranks, bit for bit, by checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, consensus
from lightning_compress.core import failures
from lightning_compress.core.snapshot import checksum


def differing(named: Mapping[str, Tensor | None], ranks: Collective, device: torch.device) -> list[str]:
    """Names of what is not the same on all ranks; a collective call, of checksums alone.

    Args:
        named: tensors by name; None for one that is gone.
        ranks: that compare.
        device: where to exchange.

    Raises:
        ValueError: names, dtypes or shapes are not those of the other ranks; on every rank.
        ExchangeError: a rank is gone or silent.
    """
    names, said = list(named), ", ".join([*named][:3]) + ", ..." * (len(named) > 3) or "none"
    if not all(_same([names], ranks, device)):
        raise ValueError(
            f"the ranks' models are not alike, and cannot be compared: rank {ranks.rank} has {said}, "
            "and another one others; add, freeze and unfreeze the same parameters before the same step on all ranks"
        )
    kinds = ["gone" if each is None else f"{each.dtype} of shape {tuple(each.shape)}" for each in named.values()]
    flags = _same([*kinds, *named.values()], ranks, device) if names else []
    for name, kind, alike in zip(names, kinds, flags, strict=False):
        if not alike:
            raise ValueError(
                f"the models of the ranks cannot be averaged: {name!r} is {kind} on rank {ranks.rank}, and not so on "
                "another one; keep the same shape and dtype on all ranks, or keep what is each rank's own in a plain "
                "attribute"
            )
    return [name for name, equal in zip(names, flags[len(names) :], strict=True) if not equal]


def check_common(named: Mapping[str, Tensor], ranks: Collective, device: torch.device) -> None:
    """Refuse to begin with parameters that are not the same on all ranks; see ``differing``.

    Raises:
        ValueError: some are not; on every rank.
    """
    if names := differing(named, ranks, device):
        raise ValueError(
            f"{len(names)} parameters differ over the ranks before the first step, among them {names[0]}: hooks "
            "such as on_fit_start have to leave the same model on all ranks; load one file, or draw by one seed"
        )


def _same(content: Sequence[object], ranks: Collective, device: torch.device) -> list[bool]:
    own = torch.tensor([checksum(each) for each in content], dtype=torch.int64, device=device)
    with failures.explained("comparing models by checksums", ranks.rank):
        return [bool(each) for each in consensus.same(own, ranks).tolist()]
