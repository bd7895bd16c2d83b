"""The strategy over a ``Synchroniser``: each rank trains its own model, and all ranks synchronise every few steps.

It builds on Lightning's ``DDPStrategy`` for processes, devices and samplers, but leaves the model unwrapped. For
evaluation and checkpoints, the model that all ranks share is swapped in.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.collectives import TorchCollective
from lightning_compress.core import errors, state_dict
from lightning_compress.core.kinds import kinds_of
from lightning_compress.core.registry import plain
from lightning_compress.engine import checks
from lightning_compress.periodic.synchroniser import Synchroniser
from lightning_compress.strategies import sidecar
from lightning_compress.strategies.advice import short_round, steps_of, untested, warn
from lightning_compress.strategies.common import CommonMixin
from lightning_compress.strategies.recount import Recount
from lightning_compress.strategies.rendezvous import Rendezvous
from lightning_compress.strategies.report import Lines, of_rounds, settle_rounds, tell
from lightning_compress.strategies.resume import Resume
from lightning_compress.strategies.sidecar import SavedState
from lightning_compress.strategies.signals import ELSEWHERE, END, EVALUATION
from lightning_compress.strategies.step_count import StepCount
from lightning_compress.strategies.unsupported import check_fit, without_wrapper


class PeriodicMixin(CommonMixin):
    """Turn a ``DDPStrategy`` into one over a synchroniser; see ``PeriodicStrategy``."""

    _fitting = False
    """Whether a fit is running."""
    _ended = False
    """Whether the fit has ended with the same model on all ranks."""
    _swa = False
    """Whether SWA has replaced the rank's model by its average; then only the mean of these averages is useful."""
    _started = _stepping = False
    _steps: StepCount
    _schedulers: Sequence[Any] = ()
    """Restored states of this rank's learning-rate schedules, until the training starts."""
    _shared: Mapping[str, Tensor] | None = None
    """Cache of ``_shared_model``, until the next step."""
    _replaced: dict[str, Tensor] | None = None
    """The rank's own tensors while the shared model is swapped in."""

    def __init__(
        self,
        synchroniser: Synchroniser,
        state: SavedState = "sidecar",
        strict_state: bool = False,
        **kwargs: Any,
    ) -> None:
        ours = inspect.signature(type(self)).parameters.values()
        checks.check_known(kwargs, type(self), [each.name for each in ours if each.kind != each.VAR_KEYWORD])
        super().__init__(**without_wrapper(kwargs))
        if state == "mean":
            raise ValueError("state='mean' is not possible, since each rank has its own model: use 'sidecar' or 'none'")
        self.synchroniser, self._resume = synchroniser, Resume(state, strict_state)
        self._watched: list[Any] = []

    @property
    def attempts(self) -> int:
        """Optimizer steps attempted so far; equal on all ranks, even if a GradScaler skips some on one rank.

        With several optimizers, a step counts if the same optimizer has stepped since the last one that counted.
        """
        return self.synchroniser.attempts

    def setup(self, trainer: Any) -> None:
        """Set up the fit and start the synchroniser; before that, raise on every rank if settings cannot work."""
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        module, ranks = self.lightning_module, TorchCollective()
        assert module is not None
        check_fit(type(self).__name__, trainer, module, bool(self._layer_sync))
        self.synchroniser.may_unfreeze = any("BaseFinetuning" in kinds_of(each) for each in trainer.callbacks)
        self.synchroniser.check(module, ranks, self.root_device)
        self._trainer, self._shared, self._replaced = trainer, None, None
        self._steps = StepCount(self.synchroniser, self._changed)
        self._started = self._ended = self._swa = False
        self.rendezvous, self._fitting = self._make_rendezvous(trainer), True
        self._resume.begin(ranks, self.root_device)
        around, loop = self.rendezvous.signals.around, trainer.fit_loop
        around(loop, "on_run_end", first=self._end)
        around(loop.epoch_loop.val_loop, "on_run_start", first=self._begin_evaluation)
        self.rendezvous.watch_stops()
        super().setup(trainer)
        self.synchroniser.start(module, self.optimizers, ranks, self.rendezvous)
        self._started = True
        self._recount = Recount(module, self.synchroniser.rules, wanted=self.synchroniser.needs_recount)
        own = [each for each in self.optimizers if isinstance(each, Optimizer)]
        self._watched = [each.register_step_post_hook(self._after_step) for each in own]

    def _make_rendezvous(self, trainer: Any) -> Rendezvous:
        return Rendezvous.apart(trainer, self._timeout)

    def configure_ddp(self) -> None:
        """Broadcast rank 0's parameters and buffers; the model is not wrapped."""
        ranks = TorchCollective()
        assert self.model is not None
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            ranks.broadcast(tensor, self.root_device)

    def on_train_start(self) -> None:
        """Check that all ranks have equally many batches; log what runs."""
        super().on_train_start()
        self._ended = self._swa = False  # a LearningRateFinder runs the loop before the fit does
        for each, state in zip(self._trainer.lr_scheduler_configs, self._schedulers, strict=False):
            each.scheduler.load_state_dict(state)  # now: Lightning has restored rank 0's
        self._shared, self._schedulers = None, ()
        self.rendezvous.compare_batches()
        self.rendezvous.signals.watch_clocks()
        self.rendezvous.agree(where=ELSEWHERE)  # on stops that hooks have asked for
        if not self.synchroniser.furthest():
            self.synchroniser.rebase(0)  # hooks may have loaded another model
        rank_zero_info(f"lightning_compress: {self.synchroniser.summary}")
        warn(short_round(self.synchroniser, steps_of(self._trainer)))
        warn(untested(self.root_device))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Save if a cluster's signal asked for it, between two batches; pass the epoch to the schedules."""
        super().on_train_batch_start(batch, batch_idx)
        self.rendezvous.signals.act()
        self.synchroniser.epoch = self._trainer.current_epoch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``training_step``, and keep the batch to recompute BatchNorm's statistics."""
        self._recount.keep(args, kwargs)
        with self._steps.batch(len(self.optimizers) > 1):
            return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Attempt a step, then synchronise if it is time to."""
        if self._trainer.fit_loop._skip_backward:  # SWA's last epoch only runs forward; gradients are old
            return closure()

        def before() -> Any:
            result = closure()
            self.synchroniser.before_step(optimizer, self._loss_scale())
            return result

        self._steps.before(optimizer)
        self._stepping = True
        try:
            output = super().optimizer_step(optimizer, before, model, **kwargs)
        finally:
            self._stepping = False
        self._steps.after(optimizer)
        return output

    def _changed(self) -> None:
        self._shared = None

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepping:
            raise ValueError(
                f"{type(optimizer).__name__} stepped without Lightning, as with self.optimizers(use_pl_optimizer=False)"
                f", so {type(self).__name__} would not average this step. Use the optimizers of self.optimizers()"
            )

    def _end(self) -> None:
        """Finish after the training loop, before callbacks save."""
        if not self._averages_weights:
            self._finish()

    @property
    def _averages_weights(self) -> bool:
        return any("StochasticWeightAveraging" in kinds_of(each) for each in self._trainer.callbacks)

    def _finish(self) -> None:
        self.rendezvous.agree(where=END)
        if self._averages_weights:
            self.synchroniser.put(self.synchroniser.averaged_model(plain=True))
        else:
            self._finish_steps()
            self.synchroniser.put(self._recounted({}))
        self._ended = True

    def _finish_steps(self) -> None:
        self.synchroniser.finish()

    def on_train_end(self) -> None:
        """Average the models that SWA left on the ranks; act on signals of the last batches."""
        super().on_train_end()
        if self._averages_weights:
            self._finish()
        self.rendezvous.signals.act()  # no batch follows that would act on them
        settle_rounds(self, self._steps.clock)
        tell(self.report(), self._trainer)

    def teardown(self) -> None:
        """Undo what ``setup`` changed in the trainer and the optimizers."""
        if self._fitting:
            with suppress(ValueError):  # after another error
                self._swap_back()
            unfinished = self._started and self.synchroniser.furthest() and not (self._ended or self.gives_up)
            if unfinished:  # resumed at the end of an earlier run, with no step left
                self._finish()
            self._fitting = False
            for hook in self._watched:
                hook.remove()
            if self._started:
                self._final_synchroniser.close()
            self.rendezvous.close(waits=self.gives_up)
        super().teardown()

    @property
    def _final_synchroniser(self) -> Synchroniser:
        """The synchroniser; if the fit is aborted, it does not communicate any more."""
        if self.gives_up:
            self.synchroniser.abandon()
        return self.synchroniser

    # where the ranks meet

    def meet(self) -> None:
        """Bring all ranks to the same batch before a collective of Lightning's, if their loaders may end apart."""
        if self._fitting and self.rendezvous.unsized and self._trainer.training and not self.gives_up:
            self.rendezvous.agree(where=ELSEWHERE)

    def _begin_evaluation(self) -> None:
        """Swap the shared model in before any hook of the evaluation; the strategy's own hook would be the last."""
        if self.rendezvous.unsized:  # another rank may still be training
            self.rendezvous.agree(where=EVALUATION)
        self._swap_in()

    # the model that is evaluated and saved

    def replica(self) -> dict[str, Tensor]:
        """Return this rank's own parameters and buffers by name, also while the shared model is swapped in."""
        return self.synchroniser.named() | (self._replaced or {})

    def _shared_model(self) -> Mapping[str, Tensor]:
        """Return the tensors of the evaluated model that differ from the rank's own, by name."""
        self._steps.clock.pause()  # evaluating or saving takes time, too
        if self._ended:
            return {}
        self._swa = self._swa or self._trainer.fit_loop._skip_backward  # in the epoch after SWA's last training epoch
        if self._shared is None or self._swa:
            model = self._final_synchroniser.averaged_model(plain=self._swa)
            self._shared = model if self.gives_up or self._swa else model | self._recounted(model)
        return self._shared

    def _recounted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return BatchNorm's statistics for these weights; empty if those of the ranks' models are right."""
        if self.attempts <= self.synchroniser.averaged_steps:
            return {}
        return self._recount.count(weights, super().training_step, self.synchroniser.counted, self.root_device)

    def _swap_in(self) -> None:
        if self._fitting and self._replaced is None:
            named, shared = self.synchroniser.named(), self._shared_model()
            self._replaced = {name: named[name].detach().clone() for name in shared if name in named}
            self.synchroniser.put(shared)

    def _swap_back(self) -> None:
        replaced, self._replaced = self._replaced, None
        self.synchroniser.put(replaced or {})

    def on_validation_end(self) -> None:
        """Swap the rank's own model back in; all ranks stop if a hook of this validation says so on one of them."""
        self._swap_back()
        super().on_validation_end()
        if self._fitting and not self._trainer.sanity_checking:
            self.rendezvous.agree(where=ELSEWHERE)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the model that is evaluated."""
        if not self._fitting or self._replaced is not None:
            return super().lightning_module_state_dict()
        named, shared = self.synchroniser.named(), self._shared_model()
        own = {name: named[name].data for name in shared}
        try:  # a user's state_dict may rename, filter and convert tensors
            for name, tensor in shared.items():
                named[name].data = tensor.detach()
            return super().lightning_module_state_dict()
        finally:
            for name, tensor in own.items():
                named[name].data = tensor

    # checkpoints

    @errors.called_by_all("trainer.save_checkpoint()")
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write each rank's file beside the checkpoint, then the checkpoint itself (rank 0)."""
        if self._started and "optimizer_states" in checkpoint:
            for name in ("optimizer_states", "lr_schedulers"):  # weights_only loading refuses NumPy's numbers
                checkpoint[name] = plain(checkpoint[name])
            checkpoint[sidecar.ATTEMPTS] = self._steps.saved(self.optimizers)
            tree = self._tree()
            if not self.gives_up and self._resume.state != "none":
                for name in self._resume.frozen_alike(self._frozen(), checkpoint.get("state_dict", {})):
                    del tree["model"][name]
            path = str(filepath) if self.gives_up else self.broadcast(str(filepath))  # may contain a rank's own metric
            method, step = self.synchroniser.method, self._final_synchroniser.furthest()
            self._resume.save(self.checkpoint_io, path, checkpoint, method, step, tree, self.gives_up)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _frozen(self) -> dict[str, Tensor]:
        replica, named = self.replica(), self._trainer.lightning_module.named_parameters()
        return {name: replica[name].detach() for name, each in named if not each.requires_grad}

    def _tree(self) -> sidecar.Tree:
        own = self._final_synchroniser.state_dict()
        return {
            "common": {"own": own.pop("common"), "counted": self._recount.last},
            "model": {name: tensor.detach() for name, tensor in self.replica().items()},
            "optimizers": [plain(optimizer.state_dict()) for optimizer in self.optimizers],
            "schedulers": [plain(each.scheduler.state_dict()) for each in self._trainer.lr_scheduler_configs],
            "precision": self.precision_plugin.state_dict(),
            "own": own,
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers and this rank's own model and state, or warn that all start from the checkpoint's."""
        super().load_optimizer_state_dict(checkpoint)
        if not self._fitting:
            return
        synchroniser, resume, device = self.synchroniser, self._resume, self.root_device
        counts = checkpoint.get(sidecar.ATTEMPTS, ())
        self._steps.load(self.optimizers, counts)
        try:
            tree = resume.restore(lambda: resume.read_own(self.checkpoint_io, checkpoint, synchroniser.method))
        except ValueError as error:
            problem = resume.without(error, checkpoint, "All ranks begin from the checkpoint's own model")
            if resume.state != "none":
                rank_zero_warn(problem)
            synchroniser.rebase(max(counts, default=0))
            return
        shapes = {name: each.shape for name, each in synchroniser.named().items()}  # forward makes its caches again
        synchroniser.put({name: each for name, each in tree["model"].items() if shapes.get(name) == each.shape})
        for optimizer, state in zip(self.optimizers, tree["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._schedulers = tree.get("schedulers", ())  # of a file of an earlier version
        if tree["precision"]:
            self.precision_plugin.load_state_dict(tree["precision"])
        synchroniser.load_state_dict(state_dict.moved(tree["own"] | {"common": tree["common"]["own"]}, device))
        self._recount.last = state_dict.moved(tree["common"]["counted"], device)

    def comm_stats(self) -> dict[str, Any]:
        """Return the traffic of the last round and in total; ``bytes_dense``: what stock DDP sends in as many steps.

        Raises:
            RuntimeError: no fit has begun.
        """
        return dict(self.compression.stats())

    def report(self) -> Lines:
        """Return the figures of the fit: what was sent, in all and in a round; once it has ended, what a step took."""
        if not self._started or self.world_size == 1:
            return []
        first = self.synchroniser.averaged_steps
        return of_rounds(self.comm_stats(), self.synchroniser.steps_per_count, self.attempts - first, self._steps.clock)

    def measure_every(self, steps: int) -> None:
        """Measure time and compression error about once every ``steps`` steps."""
        self.compression.measure_every(steps)

    @property
    def compression(self) -> Any:
        """The synchroniser, which has the ``meter`` that callbacks look for.

        Raises:
            RuntimeError: no fit has begun.
        """
        if not self._started:
            raise RuntimeError(
                f"no {self.synchroniser.kind} in this process: this begins with trainer.fit(), and with "
                "start_method='spawn' it is in the spawned processes. Use CommunicationMonitor to see the figures"
            )
        return self.synchroniser


class PeriodicStrategy(PeriodicMixin, DDPStrategy):
    """Train one model per rank; a synchroniser keeps them together.

    Args:
        synchroniser: When and how the ranks synchronise: one of ``lightning_compress.periodic``, or your own.
        state: Where checkpoints keep each rank's own model and state: "sidecar" or "none"; default "sidecar".
            "sidecar" writes one file per rank beside the checkpoint, and the run resumes bit for bit, also in the
            middle of a round. On another number of ranks, or without these files, all ranks start from the
            checkpoint's model.
        strict_state: Whether state that cannot be restored is an error: True or False; default False. False: warn.
        **kwargs: Arguments of Lightning's ``DDPStrategy`` (``start_method``, ``timeout``, ...), but not those of
            DistributedDataParallel.

    Raises:
        ValueError: an argument is unknown, or is one of DistributedDataParallel's.
    """
