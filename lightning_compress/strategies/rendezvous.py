"""Where ranks meet, every so many steps: are they at the same batch, and has a signal come to any, or time run out?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_compress.collectives import TorchCollective
from lightning_compress.core import failures
from lightning_compress.periodic.synchroniser import Meeting
from lightning_compress.strategies.alike import batches_by_rank, check_batches
from lightning_compress.strategies.signals import Signals

STEP, END, ELSEWHERE = range(3)
"""Ranks meet in a step, at the end of the fit, or in a collective call of Lightning's."""

_GROUP = (
    "connecting the ranks by Gloo (where a host's own name resolves to 127.0.x.x, others cannot reach it: set "
    "GLOO_SOCKET_IFNAME to the network interface between the hosts, such as eth0)"
)


class Rendezvous(Meeting):
    """The ranks of one fit, over a process group of Gloo of its own, for small tensors on the CPU.

    Args:
        trainer: of the fit.
        timeout: after which a rank that does not come is an error; None: the default.

    Attributes:
        signals: what a cluster asked for.

    Raises:
        ExchangeError: the ranks cannot connect.
    """

    def __init__(self, trainer: Any, timeout: timedelta | None) -> None:
        with failures.explained(_GROUP, dist.get_rank()):
            group = dist.new_group(backend="gloo", timeout=timeout)
        super().__init__(TorchCollective(group), torch.device("cpu"))
        self.signals = Signals(trainer)
        self._trainer, self._where = trainer, STEP

    def compare_batches(self) -> None:
        """Compare numbers of training batches.

        Raises:
            ValueError: they differ; on all ranks.
        """
        counts = batches_by_rank(self._trainer, self.ranks, torch.device("cpu"))
        self.unsized = -1 in counts or bool(self._trainer.reload_dataloaders_every_n_epochs)
        check_batches(counts)

    def ask(self) -> Tensor:
        """See ``Meeting``."""
        loop = self._trainer.fit_loop
        place = self._where, loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready
        told = self.signals
        words = [told.end, told.save, told.stop, *place, *(-each for each in place)]
        return torch.cat([super().ask(), torch.tensor(words, dtype=torch.int64)])

    def heed(self, said: Tensor) -> None:
        """See ``Meeting``."""
        super().heed(said)
        _, _, end, save, stop, *place = said.tolist()
        if place[:3] != [-each for each in place[3:]]:
            loop = self._trainer.fit_loop
            raise ValueError(
                f"the ranks have different numbers of training batches: rank {self.ranks.rank} is at batch "
                f"{loop.epoch_loop.batch_progress.current.ready} of epoch {loop.epoch_progress.current.processed}, and "
                "another rank elsewhere, or an optimizer's step was skipped on one of them; give all the same number, "
                "or set limit_train_batches, and in manual optimization step on all ranks or on none"
            )
        self.signals.agreed(bool(end), bool(save), bool(stop))

    def agree(self, own: Sequence[int] = (), where: int = STEP) -> list[int]:
        """See ``Meeting``; SIGTERM to one is for all."""
        self._where = where
        try:
            return super().agree(own)
        finally:
            self._where = STEP

    def close(self, waits: bool) -> None:
        """The fit is over; ``waits``: a rank may still wait in the process group, and the exit ends that."""
        self.signals.release()
        if not waits:
            self.ranks.close()
