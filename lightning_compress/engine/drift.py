"""Do all ranks still train the same model?

DistributedDataParallel copies parameters at its start and never again: one wrong bit on one rank stays, and grows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, consensus
from lightning_compress.settings.run_state import RunState

log = logging.getLogger(__name__)

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECES = {"cpu": 1 << 16}
"""Elements that are multiplied at once: what stays in a processor's cache, and elsewhere what few kernels do."""


class DriftGuard:
    """Compares parameters and reduced gradients over the ranks, bit by bit through a checksum, every so many steps.

    Args:
        parameters: names and parameters, in the same order on all ranks.
        same: returns what else has to be the same on all ranks, in the same order.
        collective: the ranks.
        settings: how often, and what to do.

    Attributes:
        every: a step that makes a multiple of these is due; 0: none is.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        same: Callable[[], Iterable[Tensor]],
        collective: Collective,
        settings: RunState,
    ) -> None:
        self._parameters = parameters
        self._same = same
        self._collective = collective
        self.every = settings.options.check_drift_every if collective.size > 1 else 0
        self._resyncs = settings.options.on_drift == "resync"
        self._gradients: dict[str, Tensor] = {}
        self._looked = 0

    def note(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Remember these parameters' averaged gradients, in a step that is due."""
        self._gradients |= {name: _checksum(each) for name, each in zip(names, gradients, strict=True)}

    def look(self, step: int) -> None:
        """Compare, if one of the steps since the last look was due; a collective call, outside of an optimizer's step.

        Args:
            step: optimizer steps so far.

        Raises:
            RuntimeError: they differ, on every rank; it names step, parameters and ranks.
        """
        if not self.every or step // self.every == self._looked // self.every:
            return
        self._looked = step
        none = torch.zeros((), dtype=torch.int64, device=self._parameters[0][1].device)
        sums = [(_checksum(parameter), self._gradients.get(name, none)) for name, parameter in self._parameters]
        self._gradients.clear()
        mine = torch.stack([each for pair in sums for each in pair])
        if consensus.same(mine, self._collective).all():
            return
        problem = self._problem(step, mine)
        if not self._resyncs:
            raise RuntimeError(
                f"{problem}. Ranks train different models from here on; on_drift='resync' copies rank 0's"
            )
        same = list(self._same())
        shapes = consensus.digest(repr([(each.shape, each.dtype) for each in same]).encode())
        alike = bool(consensus.same(mine.new_tensor([shapes]), self._collective))
        for tensor in [*(parameter for _, parameter in self._parameters), *(same if alike else ())]:
            self._collective.broadcast(tensor, self._parameters[0][1].device)
        if self._collective.rank == 0:
            what = "parameters and optimizer state" if alike else "parameters (each rank has a state of its own)"
            log.warning("%s. Rank 0's %s were copied to all", problem, what)

    def _problem(self, step: int, mine: Tensor) -> str:
        everyone = consensus.gathered(mine, self._collective)
        wrong = (everyone != everyone[0]).cpu()
        ranks = ", ".join(map(str, wrong.any(dim=1).nonzero().flatten().tolist()))
        parameters, gradients = wrong.any(dim=0).view(-1, 2).unbind(dim=1)
        names = [name for (name, _), differs in zip(self._parameters, parameters | gradients, strict=True) if differs]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        where = "their averaged gradients too" if gradients.any() else "their averaged gradients do not"
        return (
            f"drift: after step {step}, {', '.join(names[:3])}{more} of rank {ranks} differ from rank 0's, {where}; "
            "something changed them on one rank alone: randomness, code that depends on the rank, processors of "
            "another kind (fft, dct and powersgd want one), or faulty memory"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """int64 scalar: the sum of the bits as numbers, each times an odd number that only its place has."""
    words = tensor.detach().view(_WORDS[tensor.element_size()]).reshape(-1)
    size = _PIECES.get(words.device.type, 1 << 22)
    places = 2 * torch.arange(min(len(words), size), device=words.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(size):
        total += (piece * places[: len(piece)]).sum()
        places += 2 * size
    return total
