"""Whether all ranks have the same settings, or tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lightning_compress.collectives import Collective, consensus


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
