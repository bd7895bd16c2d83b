"""Do all ranks still train the same model?

DistributedDataParallel copies parameters at its start and never again: one wrong bit on one rank stays, and grows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.guards import Guards

log = logging.getLogger(__name__)

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DriftGuard:
    """Compares parameters and reduced gradients over the ranks, bit by bit through a checksum, every so many steps.

    Args:
        parameters: names and parameters, in the same order on all ranks.
        collective: the ranks.
        guards: how often, and what to do.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], collective: Collective, guards: Guards) -> None:
        self._parameters = parameters
        self._collective = collective
        self._every = guards.check_drift_every if collective.size > 1 else 0
        self._resyncs = guards.on_drift == "resync"

    def look(self, step: int, kept: Callable[[], Iterable[Tensor]]) -> None:
        """Compare, if this step is due; all ranks come.

        Args:
            step: optimizer steps so far.
            kept: returns the tensors that have to be the same on all ranks beside the parameters, in the same order.

        Raises:
            RuntimeError: they differ, on every rank; it names step, parameters and ranks.
        """
        if not self._every or step % self._every:
            return
        mine = torch.stack([_checksum(each, p.device) for _, p in self._parameters for each in (p, p.grad)])
        extremes = torch.cat([mine, -mine])
        self._collective.all_reduce_max(extremes)
        highest, lowest = extremes[: len(mine)], -extremes[len(mine) :]
        if highest.equal(lowest):
            return
        problem = self._problem(step, mine)
        if not self._resyncs:
            raise RuntimeError(
                f"{problem}. Ranks train different models from here on; on_drift='resync' copies rank 0's"
            )
        for tensor in [*(parameter for _, parameter in self._parameters), *kept()]:
            self._broadcast(tensor)
        if self._collective.rank == 0:
            log.warning("%s. Rank 0's parameters and optimizer state were copied to all", problem)

    def _problem(self, step: int, mine: Tensor) -> str:
        everyone = mine.new_empty(self._collective.size, len(mine))
        self._collective.all_gather(mine, everyone)
        wrong = (everyone != everyone[0]).cpu()
        ranks = ", ".join(map(str, wrong.any(dim=1).nonzero().flatten().tolist()))
        parameters, gradients = wrong.any(dim=0).view(-1, 2).unbind(dim=1)
        names = [name for (name, _), differs in zip(self._parameters, parameters | gradients, strict=True) if differs]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        where = "their averaged gradients too" if gradients.any() else "their averaged gradients do not"
        return (
            f"drift: after step {step}, {', '.join(names[:3])}{more} of rank {ranks} differ from rank 0's, {where}; "
            "something changed them on one rank alone: randomness, code that depends on the rank, or faulty memory"
        )

    def _broadcast(self, tensor: Tensor) -> None:
        """Rank 0's bytes to all: a sum with zeros, which every transport has."""
        data = tensor.detach().reshape(-1).contiguous().to(self._parameters[0][1].device, copy=True).view(torch.uint8)
        if self._collective.rank:
            data.zero_()
        self._collective.all_reduce(data)
        with torch.no_grad():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def _checksum(tensor: Tensor | None, device: torch.device) -> Tensor:
    """int64 scalar: the sum of the bits as numbers, in any order; 0 for None."""
    if tensor is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return tensor.detach().view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64)
