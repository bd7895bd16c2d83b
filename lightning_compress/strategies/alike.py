"""Whether all ranks have the same settings, or tensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, TorchCollective
from lightning_compress.core import failures
from lightning_compress.strategies.sidecar import checksum


def check_alike(what: str, described: str, device: torch.device, problem: str = "") -> None:
    """Compare settings over the ranks; a collective call.

    Args:
        what: whose settings they are, for the message.
        described: this rank's, which must be equal on all ranks.
        device: where to exchange.
        problem: what this rank refuses, or an empty text: then all ranks stop.

    Raises:
        ValueError: a rank refuses its settings, or they differ; on every rank.
    """
    ranks = TorchCollective()
    digest = zlib.crc32(described.encode())
    said = torch.tensor([bool(problem), digest, -digest], dtype=torch.int64, device=device)
    ranks.all_reduce_max(said)
    refused, most, least = said.tolist()
    if refused:
        raise ValueError(problem or "another rank refuses these settings, and says why")
    if most != -least:
        raise ValueError(
            f"the settings of {what} differ over the ranks; start all with the same script and arguments. Rank "
            f"{ranks.rank} has {described}"
        )


def differing(named: Mapping[str, Tensor], ranks: Collective, device: torch.device) -> list[str]:
    """Names of tensors that are not the same on all ranks, bit for bit; a collective call, of checksums alone.

    Args:
        named: tensors by name, of equal names in equal order on all ranks.
        ranks: that compare.
        device: where to exchange.

    Raises:
        ExchangeError: a rank is gone or silent.
    """
    if not named:
        return []
    own = torch.tensor([checksum(each) for each in named.values()], device=device)
    said = torch.stack([own, -own])
    with failures.explained(f"comparing {next(iter(named))} and on", ranks.rank):
        ranks.all_reduce_max(said)
    same = (said[0] == -said[1]).tolist()
    return [name for name, each in zip(named, same, strict=True) if not each]
