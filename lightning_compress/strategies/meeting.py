"""Where ranks meet, every so many steps: are they at the same batch, and has a signal come to any, or time run out?"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_compress.collectives import TorchCollective
from lightning_compress.core import failures
from lightning_compress.strategies.alike import batches_by_rank, check_batches
from lightning_compress.strategies.signals import Signals

STEP, END, ELSEWHERE = range(3)
"""Ranks meet in a step, at the end of the fit, or in a collective call of Lightning's."""

_GROUP = (
    "connecting the ranks by Gloo (where a host's own name resolves to 127.0.x.x, others cannot reach it: set "
    "GLOO_SOCKET_IFNAME to the network interface between the hosts, such as eth0)"
)


class Meeting:
    """The ranks of one fit, over a process group of Gloo of its own, for small tensors on the CPU.

    Args:
        trainer: of the fit.
        timeout: after which a rank that does not come is an error; None: the default.

    Attributes:
        ranks: that meet.
        signals: what a cluster asked for.
        unsized: loaders have no length, or are made anew in the fit, and may end at different times.
        joined: of this rank, a checksum of what it has begun to train since the fit began.

    Raises:
        ExchangeError: the ranks cannot connect.
    """

    def __init__(self, trainer: Any, timeout: timedelta | None) -> None:
        self._trainer = trainer
        with failures.explained(_GROUP, dist.get_rank()):
            self.ranks = TorchCollective(dist.new_group(backend="gloo", timeout=timeout))
        self.signals = Signals(trainer)
        self.unsized, self.joined = False, 0

    def compare_batches(self) -> None:
        """Compare numbers of training batches.

        Raises:
            ValueError: they differ; on all ranks.
        """
        counts = batches_by_rank(self._trainer, self.ranks, torch.device("cpu"))
        self.unsized = -1 in counts or bool(self._trainer.reload_dataloaders_every_n_epochs)
        check_batches(counts)

    def ask(self, where: int = STEP) -> Tensor:
        """What this rank has to say, int64 on the CPU: for ``heed``, after ``all_reduce_max`` over the ranks."""
        loop = self._trainer.fit_loop
        place = (where, loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready)
        signed = [each for number in (self.joined, *place) for each in (number, -number)]
        told = self.signals
        return torch.tensor([told.end, told.save, told.stop, *signed], dtype=torch.int64)

    def heed(self, said: Tensor) -> None:
        """Act on what all ranks said.

        Raises:
            ValueError: they are not at the same batch, or train different parameters; on all of them.
        """
        self.check_joined(said)
        end, save, stop, _, _, *signed = said.tolist()
        if any(most != -least for most, least in zip(signed[::2], signed[1::2], strict=True)):
            loop = self._trainer.fit_loop
            raise ValueError(
                f"the ranks have different numbers of training batches: rank {self.ranks.rank} is at batch "
                f"{loop.epoch_loop.batch_progress.current.ready} of epoch {loop.epoch_progress.current.processed}, and "
                "another rank elsewhere, or an optimizer's step was skipped on one of them; give all the same number, "
                "or set limit_train_batches, and in manual optimization step on all ranks or on none"
            )
        self.signals.agreed(bool(end), bool(save), bool(stop))

    def check_joined(self, said: Tensor) -> None:
        """Compare what the ranks have begun to train.

        Raises:
            ValueError: it differs; on all of them.
        """
        _, _, _, most, least, *_ = said.tolist()
        if most != -least:
            raise ValueError(
                "the ranks have begun to train different parameters since the fit began; freeze and unfreeze the same "
                "ones before the same step on all ranks"
            )

    def agree(self, where: int = STEP) -> None:
        """Meet the other ranks: SIGTERM to one is for all, and all are at the same batch.

        Raises:
            ValueError: they are not.
            ExchangeError: a rank died, or did not come in time.
        """
        said = self.ask(where)
        with failures.explained(f"meeting the others after {self._trainer.global_step} steps", self.ranks.rank):
            self.ranks.all_reduce_max(said)
        self.heed(said)

    def close(self, waits: bool) -> None:
        """The fit is over; ``waits``: a rank may still wait in the process group, and the exit ends that."""
        self.signals.release()
        if not waits:
            self.ranks.close()
