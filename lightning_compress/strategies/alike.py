"""Whether all ranks have the same settings, or tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_compress.collectives import Collective, TorchCollective, consensus
from lightning_compress.core import failures
from lightning_compress.core.snapshot import checksum

COMPARING = "comparing models by checksums"


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
    refused, ranks = ValueError(problem) if problem else None, TorchCollective()
    advice = f"{consensus.ALIKE}. Rank {ranks.rank} has {described}"
    consensus.check({f"settings of {what}": described}, refused, ranks, device, advice)


def batches_by_rank(trainer: Any, ranks: Collective, device: torch.device) -> list[int]:
    """Numbers of training batches of an epoch, by rank, -1 where a loader has no length; a collective call.

    Args:
        trainer: of the fit, whose loaders are set up.
        ranks: that compare.
        device: where to exchange.
    """
    known = trainer.num_training_batches
    own = torch.tensor([-1 if math.isinf(known) else int(known)], device=device)
    return [int(count) for count in consensus.gathered(own, ranks).flatten().tolist()]


def check_batches(counts: Sequence[int]) -> None:
    """Refuse numbers of batches that differ.

    Args:
        counts: by rank; -1 where one is not known.

    Raises:
        ValueError: they differ.
    """
    if len(set(counts)) > 1:
        said = ", ".join("unknown" if each < 0 else str(each) for each in counts)
        raise ValueError(
            f"the ranks have different numbers of training batches ({said}, by rank), and would wait for each other "
            "for ever; give all the same (a DistributedSampler does), or set limit_train_batches"
        )


def differing(named: Mapping[str, object], ranks: Collective, device: torch.device) -> list[str]:
    """Names of what is not the same on all ranks, bit for bit; a collective call, of checksums alone.

    Args:
        named: tensors or primitives by name.
        ranks: that compare.
        device: where to exchange.

    Raises:
        ValueError: the names are not those of the other ranks; on every rank.
        ExchangeError: a rank is gone or silent.
    """
    names = list(named)
    if not all(same([names], ranks, device)):
        said = f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}" or "none"
        raise ValueError(
            f"the ranks' models are not alike, and cannot be compared: rank {ranks.rank} has {said}, "
            "and another one others; add, freeze and unfreeze the same parameters before the same step on all ranks"
        )
    alike = same(list(named.values()), ranks, device) if names else []
    return [name for name, each in zip(names, alike, strict=True) if not each]


def check_common(named: Mapping[str, object], ranks: Collective, device: torch.device) -> None:
    """Refuse to begin with parameters that are not the same on all ranks; see ``differing``.

    Raises:
        ValueError: some are not; on every rank.
    """
    if names := differing(named, ranks, device):
        raise ValueError(
            f"{len(names)} parameters differ over the ranks before the first step, among them {names[0]}: hooks "
            "such as on_fit_start have to leave the same model on all ranks; load one file, or draw by one seed"
        )


def same(content: Sequence[object], ranks: Collective, device: torch.device, doing: str = COMPARING) -> list[bool]:
    """Of each tensor or primitive, whether it is the same on all ranks, bit for bit; a collective call.

    Args:
        content: tensors or primitives.
        ranks: that compare.
        device: where to exchange.
        doing: what for, if a rank is gone.

    Raises:
        ExchangeError: a rank is gone or silent.
    """
    own = torch.tensor([checksum(each) for each in content], dtype=torch.int64, device=device)
    with failures.explained(doing, ranks.rank):
        return [bool(each) for each in consensus.same(own, ranks).tolist()]
