"""``AsyncGossipStrategy``: ranks train at their own pace, and meet only to validate, to save and to end."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, DistributedSampler

from lightning_compress.contrib.asynchronous.async_gossip import AsyncGossip
from lightning_compress.contrib.asynchronous.shared_work import SharedBatches
from lightning_compress.gossip.topology import Topology
from lightning_compress.strategies.common import register
from lightning_compress.strategies.constructors import ASYNCHRONOUS
from lightning_compress.strategies.periodic import PeriodicMixin
from lightning_compress.strategies.rendezvous import EVERY, Rendezvous
from lightning_compress.strategies.sidecar import SavedState, Tree
from lightning_compress.strategies.signals import ELSEWHERE, END, STEP, Place

PASSES = 1 << 24
"""Passes over one list of batches at most, so that each list has numbers of its own."""
_ALONE = "give share_work=False, so that every rank has as many batches"


class AsyncRendezvous(Rendezvous):
    """The agreement of ranks that are at different batches: they pause before it.

    A rank that is asked to end or to save calls the others, which come between two batches, or where they wait.
    """

    synchroniser: AsyncGossip
    unsized = True
    _waits_at, _called = STEP, False

    def compare_batches(self, needed: float = math.inf) -> None:
        """Check that all ranks have equally many batches, unless they share them. Collective."""
        if not self.synchroniser.share_work:
            super().compare_batches(needed)
        self.unsized = True

    @property
    def place(self) -> Place:
        """See ``Rendezvous``; nobody has to catch up with a rank that waits where the fit ends."""
        own = super().place
        return own._replace(halves=0) if self._waits_at == END else own

    def comparable(self, place: Place) -> tuple[int, ...]:
        """See ``Rendezvous``; ranks are at different batches, and where one of them calls, in different epochs."""
        return () if place.where == STEP else place[:2]

    def agree(self, own: Sequence[int] = (), where: int = STEP) -> list[int]:
        """Wait for all ranks, then see ``Meeting``."""
        before, self._waits_at = self._waits_at, where
        try:
            self.synchroniser.pause()
            return super().agree(own, STEP if self._called else where)
        finally:
            self._waits_at = before

    def end_epoch(self) -> None:
        """See ``Rendezvous``; ranks that have not met since their last batch do not wait for each other here."""
        if self.synchroniser.paused:
            super().end_epoch()
        self.signals.hold_back()
        self.signals.stop_if_due()

    def between_batches(self, number: int) -> None:
        """Call the others if this rank was asked to end, save or stop, and come if some rank has called."""
        synchroniser = self.synchroniser
        if self.signals.pending and not synchroniser.called:
            synchroniser.call()
        elif number % EVERY == 0:
            synchroniser.look_for_calls()
        if synchroniser.called:
            self.hold()

    def hold(self) -> None:
        """Agree on signals with all others, and save if they say so. Collective.

        Raises:
            SIGTERMException: all ranks are to end.
        """
        self._called = True  # until this rank goes on; one that ends here saves in the company of all others
        self.synchroniser.join()
        super().agree()
        self.signals.act()
        if self._trainer.received_sigterm:  # here all ranks end together, at the end of a batch they would not
            raise SIGTERMException
        self._called = False


class AsyncGossipMixin(PeriodicMixin):
    """Turn a ``DDPStrategy`` into one without waiting; see ``AsyncGossipStrategy``."""

    def __init__(
        self,
        algorithm: str | dict[str, Any] = "adpsgd",
        topology: Topology | str | dict[str, Any] | list[Any] | None = None,
        compressor: Any = "auto",
        share_work: bool = True,
        answer_timeout: float = 30.0,
        buffers: dict[str, str] | None = None,
        seed: int | None = 0,
        *,
        state: SavedState = "sidecar",
        strict_state: bool = False,
        **kwargs: Any,
    ) -> None:
        gossip = AsyncGossip(algorithm, topology, compressor, share_work, answer_timeout, buffers, seed)
        super().__init__(gossip, state, strict_state, **kwargs)

    synchroniser: AsyncGossip
    rendezvous: AsyncRendezvous
    _share_work: bool | None = None
    """As the user gave it."""
    _shared_batches: Sequence[SharedBatches] = ()
    """Of this fit, in the order in which they were made."""
    _training_data = False
    """Whether the loaders of the training are being made."""

    def setup(self, trainer: Any) -> None:
        """See ``PeriodicStrategy``; also give all ranks one list of batches."""
        if trainer.state.fn == "fit":
            self._share_work = self.synchroniser.share_work if self._share_work is None else self._share_work
            self.synchroniser.share_work = self._share_work and not trainer.fast_dev_run  # which limits each rank
        super().setup(trainer)

    def _make_rendezvous(self, trainer: Any) -> AsyncRendezvous:
        made = AsyncRendezvous.apart(trainer, self._timeout)
        assert isinstance(made, AsyncRendezvous)
        made.synchroniser = self.synchroniser
        self.synchroniser.on_call = self._hold
        self._making(False)  # an earlier fit may have failed in between
        made.signals.around(trainer.fit_loop, "setup_data", partial(self._making, True), partial(self._making, False))
        self._shared_batches = []
        if self.synchroniser.share_work:
            check_shared_work(trainer)
        return made

    def _making(self, training: bool) -> None:
        self._training_data = training

    def _hold(self) -> None:
        self.rendezvous.hold()
        self._shared = None  # the other ranks train on from here

    def process_dataloader(self, dataloader: Any) -> Any:
        """Replace the batches of the training's loader by those that all ranks share.

        Raises:
            ValueError: it is of a kind whose batches cannot be shared.
        """
        if not (self._training_data and self._fitting and self.synchroniser.share_work and self.world_size > 1):
            return super().process_dataloader(dataloader)
        old = getattr(dataloader, "sampler", None)
        if not isinstance(dataloader, DataLoader) or type(old) is not DistributedSampler or not dataloader.batch_size:
            raise ValueError(
                f"the training's {type(dataloader).__name__} takes indices from {type(old).__name__}, and only batches "
                f"of a DataLoader with Lightning's own DistributedSampler can be shared among ranks; {_ALONE}"
            )
        whole = DistributedSampler[Any](dataloader.dataset, 1, 0, old.shuffle, old.seed)
        size, last, place = dataloader.batch_size, dataloader.drop_last, len(self._shared_batches) * PASSES
        batches = SharedBatches(
            whole,
            size,
            last,
            self.global_rank,
            self.world_size,
            lambda number: self.synchroniser.take(place + number),  # lists of several loaders differ
        )
        self._go_on(batches)
        shared = copy.copy(dataloader)  # with workers and all else; attributes of a loader cannot be set
        vars(shared).update(batch_sampler=batches, sampler=whole)
        return super().process_dataloader(shared)

    def _go_on(self, batches: SharedBatches) -> None:
        """Go on in the epoch in which a checkpoint was saved. Collective."""
        loop, work = self._trainer.fit_loop, self.synchroniser.work
        epoch, progress = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress
        batches.sampler.set_epoch(epoch)  # Lightning does so after the first batch was taken
        self._shared_batches = [*self._shared_batches, batches]
        if work is not None:
            ended = progress.is_last_batch and progress.current.ready == progress.current.processed
            done, self.synchroniser.work = progress.current.processed, None
            if batches.load_state_dict(work, epoch, done, ended, partial(self.rendezvous.agree, where=ELSEWHERE)):
                progress.is_last_batch = False  # all ranks have the progress of rank 0, which may have ended first

    def _tree(self) -> Tree:
        tree = super()._tree()
        if len(self._shared_batches) == 1:  # of several, each would have another share
            done = self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
            tree["own"]["work"] = self._shared_batches[0].state_dict(done)
        return tree

    def on_train_start(self) -> None:
        """See ``PeriodicStrategy``; log what a resumed run is."""
        super().on_train_start()
        if self.attempts:
            rank_zero_info(
                "lightning_compress: each rank goes on with its own model, from its own step; what follows is not bit "
                "for bit what would have followed, because nobody knows when neighbours ask"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Come if some rank has called; then go on averaging."""
        if self.world_size > 1:
            self.rendezvous.between_batches(batch_idx)
            self._shared = None
        super().on_train_batch_start(batch, batch_idx)
        self.synchroniser.resume()

    def meet(self) -> None:
        """Pause all ranks before a collective of Lightning's.

        Raises:
            ValueError: it is within a batch, and ranks that share batches have different numbers of them.
        """
        if not self._started or self.world_size == 1:
            return
        batches, shared = self._trainer.fit_loop.epoch_loop.batch_progress.current, self.synchroniser.share_work
        if shared and not self.synchroniser.paused and batches.ready > batches.completed and not self.gives_up:
            raise ValueError(
                "share_work=True, and a training step talks to all ranks, as self.log(..., sync_dist=True) does in "
                "each step: ranks that share their batches have different numbers of steps, and would wait forever. "
                f"Log with on_step=False, on_epoch=True, or {_ALONE}"
            )
        super().meet()

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return all ranks' tensors."""
        self.meet()
        return super().all_gather(tensor, group, sync_grads)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """See ``PeriodicStrategy``; the step is this rank's own."""
        super().load_optimizer_state_dict(checkpoint)
        if self._fitting:
            self._steps.load(self.optimizers, [self.attempts] * len(self.optimizers))

    def on_exception(self, exception: BaseException) -> None:
        """Tell the others why this rank stops."""
        if self._started and self.world_size > 1:
            self.synchroniser.leave(None if isinstance(exception, SIGTERMException) else exception)
        super().on_exception(exception)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of ``ASYNCHRONOUS``, each with its variants."""
        register(strategy_registry, cls, "Asynchronous gossip", ASYNCHRONOUS)


class AsyncGossipStrategy(AsyncGossipMixin, DDPStrategy):
    """Decentralised training in which no rank waits for another: a slow one, or a slow link, holds up nobody.

    The arguments are those of ``lightning_compress.asynchronous.async_gossip.AsyncGossip`` and of
    ``PeriodicStrategy`` (``state``, ``strict_state``, Lightning's own). When it pays, and what it costs:
    ``lightning-compress docs async``.

    Raises:
        ValueError: a name or setting is unknown, a value is out of range, or an argument belongs to
            DistributedDataParallel, which does not wrap the model here.
    """


def check_shared_work(trainer: Any) -> None:
    """Raise if something counts the batches or steps of a rank, which differ where ranks share their batches.

    Raises:
        ValueError: the trainer or a callback does.
    """
    counted = {
        f"max_steps={trainer.max_steps}": trainer.max_steps != -1,
        f"min_steps={trainer.min_steps}": trainer.min_steps is not None,
        f"limit_train_batches={trainer.limit_train_batches}": trainer.limit_train_batches != 1.0,
        f"val_check_interval={trainer.val_check_interval}": trainer.val_check_interval != 1.0,
        f"overfit_batches={trainer.overfit_batches}": trainer.overfit_batches != 0.0,
    }
    saves = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint) and each._every_n_train_steps]
    counted |= {f"every_n_train_steps={each._every_n_train_steps}": True for each in saves}
    for setting, given in counted.items():
        if given:
            raise ValueError(
                f"share_work=True and {setting}: ranks that share their batches are at different steps, and would "
                f"count apart; use epochs, or {_ALONE}"
            )
