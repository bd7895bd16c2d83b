"""Whether all ranks were given the same settings, asked before a fit."""

from __future__ import annotations

import zlib

import torch

from lightning_compress.collectives import TorchCollective


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
