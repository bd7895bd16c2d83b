"""The strategy over a ``Synchroniser``: ranks train models of their own, and meet every so often.

Lightning's strategy for DistributedDataParallel goes on to do what does not concern averaging: processes, devices,
samplers. The model stays unwrapped. While it is evaluated or saved, the one that the ranks have in common takes its
place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.collectives import TorchCollective, consensus
from lightning_compress.core import state_dict
from lightning_compress.core.registry import plain
from lightning_compress.engine import checks
from lightning_compress.periodic.synchroniser import Synchroniser, differing
from lightning_compress.strategies import sidecar
from lightning_compress.strategies.common import CommonMixin
from lightning_compress.strategies.recount import Recount
from lightning_compress.strategies.rendezvous import ELSEWHERE, END, Rendezvous
from lightning_compress.strategies.resume import Resume
from lightning_compress.strategies.sidecar import SavedState
from lightning_compress.strategies.unsupported import check_fit, without_wrapper


class PeriodicMixin(CommonMixin):
    """Turns a ``DDPStrategy`` into one over a synchroniser; see ``PeriodicStrategy``."""

    _fitting = False
    """A fit is under way."""
    _ended = False
    """It has left one model on all ranks."""
    _swa = False
    """SWA has put an average in the place of the rank's own: only the mean of these is worth anything."""
    _started = _stepping = False
    _cached: Mapping[str, Tensor] | None = None
    _held: dict[str, Tensor] | None = None

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
            raise ValueError(
                "state='mean': ranks have models of their own, not only residuals; use 'sidecar' or 'none'"
            )
        self.synchroniser = synchroniser
        self._resume = Resume(state, strict_state)
        self._counts: dict[int, int] = {}
        self._watched: list[Any] = []

    @property
    def attempts(self) -> int:
        """Optimizer steps so far that were tried; equal on all ranks, also where a GradScaler skips some rank by rank.

        With several optimizers they are the most over them.
        """
        return self.synchroniser.attempts

    # a fit

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot work, on every rank, before anything is set up for a fit; set up; and begin."""
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        module, ranks = self.lightning_module, TorchCollective()
        assert module is not None
        check_fit(type(self).__name__, trainer, module, bool(self._layer_sync))
        kinds = [kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__]
        self.synchroniser.thaws = "BaseFinetuning" in kinds
        self.synchroniser.check(module, ranks, self.root_device)
        self._trainer, self._cached, self._held, self._counts = trainer, None, None, {}
        self._started = self._ended = self._swa = False
        self.meeting, self._fitting = Rendezvous.apart(trainer, self._timeout), True
        self._resume.begin(ranks, self.root_device)
        loop = trainer.fit_loop
        vars(loop)["on_run_end"] = lambda: self._end(type(loop).on_run_end.__get__(loop))
        evaluation = loop.epoch_loop.val_loop
        start = type(evaluation).on_run_start.__get__(evaluation)
        vars(evaluation)["on_run_start"] = lambda: self._begin_evaluation(start)
        super().setup(trainer)
        self.synchroniser.start(module, self.optimizers, ranks, self.meeting)
        self._started = True
        self._recount = Recount(module, self.synchroniser.rules, wanted=self.synchroniser.leaps)
        watched = [each for each in self.optimizers if isinstance(each, Optimizer)]
        self._watched = [each.register_step_post_hook(self._after_step) for each in watched]

    def configure_ddp(self) -> None:
        """Give all ranks rank 0's parameters and buffers; nothing is wrapped."""
        ranks = TorchCollective()
        assert self.model is not None
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            ranks.broadcast(tensor, self.root_device)

    def on_train_start(self) -> None:
        """Compare numbers of batches over the ranks, which are known by now; say what runs."""
        super().on_train_start()
        self._ended = self._swa = False  # a LearningRateFinder's steps are a run of the loop too
        self._cached = None
        self.meeting.compare_batches()
        self.meeting.signals.watch_clocks()
        if not self.attempts:
            self.synchroniser.rebase(0)  # hooks may have loaded another model
        rank_zero_info(f"lightning_compress: {self.synchroniser.summary}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Save what a cluster's signal asked for, between two batches; tell the schedules which epoch it is."""
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self.meeting.signals.act()
        self.synchroniser.epoch = self.lightning_module.current_epoch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's, and keep the batch for BatchNorm's statistics."""
        self._recount.keep(args, kwargs)
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, or try to; then do what is due."""
        if self._trainer.fit_loop._skip_backward:  # SWA's last epoch only looks at data; its gradients are old ones
            return closure()

        def before() -> Any:
            result = closure()
            self.synchroniser.before_step(optimizer, getattr(self.precision_plugin, "scaler", None) is not None)
            return result

        self._stepping = True
        try:
            output = super().optimizer_step(optimizer, before, model, **kwargs)
        finally:
            self._stepping = False
        self._cached = None
        count = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if count > self.attempts:  # else another optimizer has led to it
            self.synchroniser.after_step()
        return output

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepping:
            raise ValueError(
                f"{type(optimizer).__name__} stepped without Lightning, as with self.optimizers(use_pl_optimizer=False)"
                f", and {type(self).__name__} would not average what it learns: take those of self.optimizers()"
            )

    def _end(self, end: Any) -> None:
        """The training loop is done; callbacks may save after this."""
        if not self._averages_weights:
            self._finish()
        end()

    @property
    def _averages_weights(self) -> bool:
        return any("StochasticWeightAveraging" in str(type(each).__mro__) for each in self._trainer.callbacks)

    def _finish(self) -> None:
        self.meeting.agree(where=END)
        if self._averages_weights:
            self.synchroniser.put(self.synchroniser.averaged_model(plain=True))
        else:
            self.synchroniser.finish()
            self.synchroniser.put(self._recounted({}))
        self._ended = True

    def on_train_end(self) -> None:
        """Callbacks are done with the model: SWA left the average of the rank's own models there."""
        super().on_train_end()
        if self._averages_weights:
            self._finish()
        self.meeting.signals.act()  # no batch follows what was agreed at the end

    def teardown(self) -> None:
        """Give back what was taken for the fit."""
        if self._fitting:
            with suppress(ValueError):  # after another error
                self._swap_back()
            if (
                self._started and self.attempts and not (self._ended or self.gives_up)
            ):  # resumed where it had ended: no step was left
                self._finish()
            self._fitting = False
            loop = self._trainer.fit_loop
            vars(loop).pop("on_run_end", None)
            vars(loop.epoch_loop.val_loop).pop("on_run_start", None)
            for each in self._watched:
                each.remove()
            if self._started:
                self._over.close()
            self.meeting.close(waits=self.gives_up)
        super().teardown()

    @property
    def _over(self) -> Synchroniser:
        """Which does not communicate any more where the fit is aborted."""
        if self.gives_up:
            self.synchroniser.abandon()
        return self.synchroniser

    # where the ranks meet

    def meet(self) -> None:
        """Lightning talks on all ranks at the same batch, also if their loaders end at different times."""
        if self._fitting and self.meeting.unsized and self._trainer.training and not self.gives_up:
            self.meeting.agree(where=ELSEWHERE)

    def _begin_evaluation(self, begin: Callable[[], None]) -> None:
        """Evaluate what the ranks have in common; hooks, too, of which the strategy's own would be the last."""
        if self.meeting.unsized:  # one of them may still be training
            self.meeting.agree(where=ELSEWHERE)
        self._swap_in()
        begin()

    # the model that is evaluated and saved

    def replica(self) -> dict[str, Tensor]:
        """This rank's own parameters and buffers by name, also while another model is evaluated."""
        return self.synchroniser.named() | (self._held or {})

    def _shown(self) -> Mapping[str, Tensor]:
        """What differs from the rank's own, in the model that is evaluated."""
        if self._ended:
            return {}
        self._swa = self._swa or self._trainer.fit_loop._skip_backward  # in the epoch after SWA's last of training
        if self._cached is None or self._swa:
            found = self._over.averaged_model(plain=self._swa)
            self._cached = found if self.gives_up or self._swa else found | self._recounted(found)
        return self._cached

    def _recounted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """BatchNorm's statistics under these weights, where they are not those of the ranks' own models."""
        if self.attempts <= self.synchroniser.averaged_steps:
            return {}
        return self._recount.count(weights, super().training_step, self.synchroniser.counted, self.root_device)

    def _swap_in(self) -> None:
        if self._fitting and self._held is None:
            named, other = self.synchroniser.named(), self._shown()
            self._held = {name: named[name].detach().clone() for name in other if name in named}
            self.synchroniser.put(other)

    def _swap_back(self) -> None:
        held, self._held = self._held, None
        self.synchroniser.put(held or {})

    def on_validation_end(self) -> None:
        """Go on with the rank's own."""
        self._swap_back()
        super().on_validation_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of the model that is evaluated."""
        if not self._fitting or self._held is not None:
            return super().lightning_module_state_dict()
        named, other = self.synchroniser.named(), self._shown()
        own = {name: named[name].data for name in other}
        try:  # a user's state_dict may name, filter and convert as it likes
            for name, tensor in other.items():
                named[name].data = tensor.detach()
            return super().lightning_module_state_dict()
        finally:
            for name, tensor in own.items():
                named[name].data = tensor

    # checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save what every rank has of its own beside the checkpoint, then the checkpoint, which rank 0 writes."""
        if self._started and "optimizer_states" in checkpoint:
            for name in ("optimizer_states", "lr_schedulers"):  # which are not loaded with NumPy's numbers
                checkpoint[name] = plain(checkpoint[name])
            checkpoint[sidecar.ATTEMPTS] = [self._counts.get(id(optimizer), 0) for optimizer in self.optimizers]
            tree = self._tree()
            if not self.gives_up and self._resume.state != "none":
                for name in self._kept_once(checkpoint.get("state_dict", {})):
                    del tree["model"][name]
            own = self.synchroniser.method, self.attempts, tree
            path = str(filepath) if self.gives_up else self.broadcast(str(filepath))  # a name may hold a rank's metric
            self._resume.save_tree(self.checkpoint_io, path, checkpoint, *own, self.gives_up)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _kept_once(self, saved: Mapping[str, Any]) -> set[str]:
        """Frozen parameters that the checkpoint has as all ranks have them; a collective call."""
        assert self.lightning_module is not None
        replica, ranks, device = self.replica(), TorchCollective(), self.root_device
        names = [name for name, each in self.lightning_module.named_parameters() if not each.requires_grad]
        own = {name: replica[name].detach() for name in names}
        if not names:
            return set()
        other = set(differing(own, ranks, device))
        away = consensus.anywhere([not _equal(each, saved.get(name)) for name, each in own.items()], ranks, device)
        return {name for name, missing in zip(names, away, strict=True) if not missing} - other

    def _tree(self) -> sidecar.Tree:
        own = self._over.state_dict()
        return {
            "common": {"own": own.pop("common"), "counted": self._recount.last},
            "model": {name: tensor.detach() for name, tensor in self.replica().items()},
            "optimizers": [plain(optimizer.state_dict()) for optimizer in self.optimizers],
            "precision": self.precision_plugin.state_dict(),
            "own": own,
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and this rank's own model and state, or say why all begin from the checkpoint's."""
        super().load_optimizer_state_dict(checkpoint)
        if not self._fitting:
            return
        ours, device = self.synchroniser, self.root_device
        tree, problem = self._resume.restore_tree(self.checkpoint_io, checkpoint, ours.method)
        counts = checkpoint.get(sidecar.ATTEMPTS, ())
        self._counts = dict(zip(map(id, self.optimizers), counts, strict=False))
        if tree is None:
            if self._resume.state != "none":
                rank_zero_warn(problem)
            ours.rebase(max(counts, default=0))
            return
        shapes = {name: each.shape for name, each in ours.named().items()}  # caches that forward makes, it makes again
        ours.put({name: each for name, each in tree["model"].items() if shapes.get(name) == each.shape})
        for optimizer, state in zip(self.optimizers, tree["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if tree["precision"]:
            self.precision_plugin.load_state_dict(tree["precision"])
        ours.load_state_dict(state_dict.moved(tree["own"] | {"common": tree["common"]["own"]}, device))
        self._recount.last = state_dict.moved(tree["common"]["counted"], device)

    # figures

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of the last round and in total; ``bytes_dense`` is what stock DDP sends in as many steps."""
        return dict(self._begun.stats())

    def measure_every(self, steps: int) -> None:
        """Have time and error measured about once in so many steps."""
        self._begun.measure_every(steps)

    @property
    def compression(self) -> Any:
        """What has the ``meter`` that callbacks look for: the synchroniser."""
        return self._begun

    @property
    def _begun(self) -> Any:
        """The synchroniser.

        Raises:
            RuntimeError: there was no fit.
        """
        if not self._started:
            raise RuntimeError(f"there is no {self.synchroniser.kind} in this process: it begins with trainer.fit()")
        return self.synchroniser


def _equal(own: Tensor, other: object) -> bool:
    if not isinstance(other, Tensor) or (own.dtype, own.shape, own.device) != (other.dtype, other.shape, other.device):
        return False
    return own.equal(other)


class PeriodicStrategy(PeriodicMixin, DDPStrategy):
    """Trains models of the ranks' own, which a synchroniser keeps together.

    Args:
        synchroniser: of ``lightning_compress.periodic``, or one of your own.
        state: how checkpoints hold what a rank has of its own: "sidecar", a file a rank beside the checkpoint, from
            which a run goes on bit for bit, also in the middle of a round; or "none". At another world size, or
            without these files, all ranks begin from the checkpoint's model.
        strict_state: state that cannot be restored stops the run, instead of a warning.
        **kwargs: of Lightning's ``DDPStrategy``, none of DistributedDataParallel's: ``start_method``, ``timeout``, ...

    Raises:
        ValueError: an argument is unknown, or one of DistributedDataParallel's.
    """
