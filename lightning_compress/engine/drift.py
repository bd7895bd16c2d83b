"""Check that all ranks still train the same model.

DistributedDataParallel copies parameters only once, at its start. A wrong bit on one rank would stay and grow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, consensus
from lightning_compress.core import errors
from lightning_compress.engine.optimizers import Trained
from lightning_compress.settings.run_state import RunState

log = logging.getLogger(__name__)

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECES = {"cpu": 1 << 16}
"""Elements per multiplication: what fits a processor's cache, and on other devices enough to launch few kernels."""


class DriftGuard:
    """Compare parameters and averaged gradients over the ranks, by bit-exact checksums, every ``every`` steps.

    Args:
        trained: the parameters, in the same order on all ranks.
        same: each returns other tensors that have to be equal on all ranks, in the same order.
        collective: the ranks.
        settings: how often to compare, and what to do if ranks differ.
        everyone: see ``FiniteGuard``.

    Attributes:
        every: steps between comparisons; 0: never.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        same: Iterable[Callable[[], Iterable[Tensor]]],
        collective: Collective,
        settings: RunState,
        everyone: Collective | None = None,
    ) -> None:
        self._trained = trained
        self._same = same
        self._collective, self._everyone = collective, everyone
        self._unit = "replica" if everyone else "rank"
        self.every = settings.options.check_drift_every if collective.size > 1 else 0
        self._resyncs = settings.options.on_drift == "resync"
        self._gradients: dict[str, Tensor] = {}
        self._compared = 0

    def record(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Record checksums of these parameters' averaged gradients, in a step after which ranks are compared."""
        self._gradients |= {name: _checksum(gradient) for name, gradient in zip(names, gradients, strict=True)}

    def due(self, step: int) -> bool:
        """Return whether ``compare`` is due after so many optimizer steps."""
        return bool(self.every) and step // self.every != self._compared // self.every

    def compare(self, step: int, now: bool = False) -> None:
        """Compare the ranks if a comparison is due; collective, and not to be called during an optimizer's step.

        Args:
            step: optimizer steps so far.
            now: compare what the last step has left, due or not; there may be no more steps.

        Raises:
            RuntimeError: ranks differ; on every rank. The message names the step, the parameters, and the ranks or, of
                shards, the replicas.
        """
        if not (self.due(step) or (now and self.every and step != self._compared)):
            return
        self._compared = step
        device = self._trained[0].held().device
        none = torch.zeros((), dtype=torch.int64, device=device)
        sums = [(_checksum(each.held()), self._gradients.get(each.name, none)) for each in self._trained]
        recorded = bool(self._gradients)
        self._gradients.clear()
        checksums = torch.stack([checksum for pair in sums for checksum in pair])
        ranks = self._collective.uncounted if now else self._collective
        with errors.explained(f"comparing the ranks after step {step}", (self._everyone or ranks).rank):
            differs = ~consensus.same(checksums, ranks).all().view(1)
        somewhere = differs.to(torch.int64)
        if self._everyone:
            self._everyone.all_reduce(somewhere, "max")
        if not somewhere:
            return
        if not differs:  # ranks that hold other shards raise, or get a copy
            if self._resyncs:
                return
            raise RuntimeError(f"drift: after step {step}, replicas differ in another shard: see other ranks' errors")
        problem = self._problem(step, checksums, recorded)
        if not self._resyncs:
            raise RuntimeError(f"{problem}. Use on_drift='resync' to copy {self._unit} 0's model to all and continue")
        self._resync(problem)

    def _resync(self, problem: str) -> None:
        """Copy the first rank's parameters to the others, and its optimizer state if all have as much. Collective."""
        same = [tensor for tensors in self._same for tensor in tensors()]
        shapes = consensus.digest(repr([(tensor.shape, tensor.dtype) for tensor in same]).encode())
        device = self._trained[0].held().device
        equal = bool(consensus.same(torch.tensor([shapes], dtype=torch.int64, device=device), self._collective))
        for tensor in [*(each.held() for each in self._trained), *(same if equal else ())]:
            self._collective.broadcast(tensor, device)
        if self._collective.rank == 0:
            what = "parameters and optimizer state" if equal else "parameters (not the optimizer state: shapes differ)"
            log.warning("%s. %s 0's %s were copied to all", problem, self._unit.capitalize(), what)

    def _problem(self, step: int, checksums: Tensor, recorded: bool) -> str:
        gathered = consensus.gathered(checksums, self._collective)
        wrong = (gathered != gathered[0]).cpu()
        ranks = ", ".join(map(str, wrong.any(dim=1).nonzero().flatten().tolist()))
        parameters, gradients = wrong.any(dim=0).view(-1, 2).unbind(dim=1)
        pairs = zip(self._trained, parameters | gradients, strict=True)
        names = [each.name for each, differs in pairs if differs]
        where = ", and so do their averaged gradients" if gradients.any() else ", but their averaged gradients do not"
        unit = self._unit
        return (
            f"drift: after step {step}, {errors.listed(names)} of {unit} {ranks} differ from {unit} 0's"
            f"{where * recorded}; possible causes are randomness or code that depends on the rank, different "
            "processors (fft, dct and powersgd need equal ones), and faulty memory"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """Return an int64 scalar: the sum of the tensor's words, each times an odd number unique to its place."""
    words = tensor.detach().view(_WORDS[tensor.element_size()]).reshape(-1)
    size = _PIECES.get(words.device.type, 1 << 22)
    places = 2 * torch.arange(min(len(words), size), dtype=torch.int64, device=words.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(size):
        total += (piece * places[: len(piece)]).sum()
        places += 2 * size
    return total
