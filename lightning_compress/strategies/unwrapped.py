"""The base of strategies whose ranks train models of their own, which meet every so often.

Lightning's strategy for DistributedDataParallel goes on to do what does not concern averaging: processes, devices,
samplers. The model stays as it is; what the ranks have in common is made in ``after_attempt``.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.collectives import TorchCollective
from lightning_compress.core import snapshot
from lightning_compress.core.primitives import plain
from lightning_compress.engine import checks
from lightning_compress.strategies import sidecar
from lightning_compress.strategies.alike import check_common, differing
from lightning_compress.strategies.evaluated import EvaluatedMixin
from lightning_compress.strategies.meeting import ELSEWHERE, END, Meeting
from lightning_compress.strategies.refused import check_fit, without_wrapper
from lightning_compress.strategies.resume import Resume
from lightning_compress.strategies.sidecar import SavedState


class UnwrappedMixin(EvaluatedMixin):
    """Turns a ``DDPStrategy`` into one that leaves the model unwrapped.

    A subclass says what happens after each attempt of an optimizer step (``after_attempt``), which model is evaluated
    and saved (``evaluated``), what a rank has of its own (``own_state``, ``load_own_state``), and how the fit ends
    (``finish``). Attempts are equal on all ranks, also where a GradScaler skips steps rank by rank; with several
    optimizers they are the most over them.

    Args:
        state: see ``LocalSGDStrategy``.
        strict_state: likewise.
        **kwargs: of Lightning's ``DDPStrategy``.

    Attributes:
        attempts: optimizer steps so far that were tried.
        meeting: of the ranks, for ``meeting.agree()``; only in a fit.

    Raises:
        ValueError: an argument is unknown, or one of DistributedDataParallel's.
    """

    attempts: int
    meeting: Meeting

    def __init__(self, state: SavedState = "sidecar", strict_state: bool = False, **kwargs: Any) -> None:
        ours = [each for each in type(self).__mro__ if issubclass(each, UnwrappedMixin)]
        makers = [vars(each)["__init__"] for each in ours if "__init__" in vars(each)]
        own = [name for make in makers for name in _arguments(make)]
        checks.check_known(kwargs, type(self), own)
        super().__init__(**without_wrapper(kwargs))
        if state == "mean":
            raise ValueError(
                "state='mean': ranks have models of their own, not only residuals; use 'sidecar' or 'none'"
            )
        self._resume = Resume(state, strict_state)
        self._counts: dict[int, int] = {}
        self._trained = self._stepping = False
        self._watched: list[Any] = []

    # what a subclass is made of

    @property
    @abstractmethod
    def method(self) -> str:
        """What a checkpoint has to be of, for a run to go on from its sidecars."""

    @abstractmethod
    def prepare(self, trainer: Any) -> None:
        """Refuse what cannot work, on every rank, before anything is set up for a fit."""

    @abstractmethod
    def begin(self, trainer: Any) -> None:
        """A fit begins; all ranks have rank 0's model, on its device, and there are optimizers."""

    @abstractmethod
    def after_attempt(self, step: int) -> None:
        """An optimizer's step was tried, the ``step``-th of the run; parameters may be changed."""

    @abstractmethod
    def own_state(self) -> sidecar.Tree:
        """What else this rank has: tensors and primitives; as ``"common"`` what has to be the same on all ranks."""

    @abstractmethod
    def load_own_state(self, state: sidecar.Tree) -> None:
        """Go on from ``own_state``; the model and the optimizers were restored."""

    @abstractmethod
    def begin_after(self, step: int) -> None:
        """Begin from the model as it is now: a checkpoint's, of so many steps; or 0, and hooks may have loaded it."""

    @abstractmethod
    def finish(self) -> None:
        """The last step was made: leave one model on all ranks."""

    @abstractmethod
    def average_model(self) -> None:
        """Leave the mean of the ranks' models on all of them."""

    def close(self) -> None:
        """The fit is over, or was cut short."""

    # a fit

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot work, set up what Lightning does, and begin."""
        fitting = trainer.state.fn == "fit"
        if fitting:
            assert self.lightning_module is not None
            check_fit(type(self).__name__, trainer, self.lightning_module, bool(self._layer_sync))
            self.prepare(trainer)
            self.attempts, self._counts = 0, {}
            self._cached = self._held = None
            self.meeting = Meeting(trainer, self._timeout)
            self._resume.begin(TorchCollective(), self.root_device)
            self._trainer, self._fitting, self._trained, self._ended, self._swa = trainer, True, True, False, False
            loop = trainer.fit_loop
            vars(loop)["on_run_end"] = lambda: self._end(type(loop).on_run_end.__get__(loop))
            evaluation = loop.epoch_loop.val_loop
            start = type(evaluation).on_run_start.__get__(evaluation)
            vars(evaluation)["on_run_start"] = lambda: self._begin_evaluation(start)
        super().setup(trainer)
        if fitting:
            self.begin(trainer)
            watched = [each for each in self.optimizers if isinstance(each, Optimizer)]
            self._watched = [each.register_step_post_hook(self._after_step) for each in watched]

    def configure_ddp(self) -> None:
        """Give all ranks rank 0's parameters and buffers; nothing is wrapped."""
        ranks = TorchCollective()
        assert self.model is not None
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            ranks.broadcast(tensor, self.root_device)

    def on_train_start(self) -> None:
        """Compare numbers of batches over the ranks, which are known by now."""
        super().on_train_start()
        self._ended = self._swa = False  # a LearningRateFinder's steps are a run of the loop too
        self._cached = None
        self.meeting.compare_batches()
        self.meeting.signals.watch_clocks()
        if not self.attempts:
            self._begin_after(0)

    def _begin_after(self, step: int) -> None:
        assert self.lightning_module is not None
        own, named = self.replica(), self.lightning_module.named_parameters()
        trained = {name: own[name] for name, each in named if each.requires_grad}
        check_common(trained, TorchCollective(), self.root_device)
        with torch.no_grad():
            self.begin_after(step)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, or try to; then do what is due."""
        if self._trainer.fit_loop._skip_backward:  # SWA's last epoch only looks at data; its gradients are old ones
            return closure()
        self._stepping = True
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._stepping = False
        self._cached = None
        count = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if count > self.attempts:  # else another optimizer has led to it
            self.attempts = count
            with torch.no_grad():
                self.after_attempt(count)
        return output

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepping:
            raise ValueError(
                f"{type(optimizer).__name__} stepped without Lightning, as with self.optimizers(use_pl_optimizer=False)"
                f", and {type(self).__name__} would not average what it learns: take those of self.optimizers()"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Save what a cluster's signal asked for, between two batches."""
        super().on_train_batch_start(batch, batch_idx)
        self.meeting.signals.act()

    def _end(self, end: Any) -> None:
        """The training loop is done; callbacks may save after this."""
        if not self._averages_weights:
            with torch.no_grad():
                self.finish()
            self._ended = True
        end()

    @property
    def _averages_weights(self) -> bool:
        return any("StochasticWeightAveraging" in str(type(each).__mro__) for each in self._trainer.callbacks)

    def on_train_end(self) -> None:
        """Callbacks are done with the model: SWA left the average of the rank's own models there."""
        super().on_train_end()
        if self._averages_weights:
            with torch.no_grad():
                self.average_model()
            self._ended = True
        self.meeting.signals.act()  # no batch follows what was agreed at the end

    def _end_again(self) -> None:
        with torch.no_grad():
            if self._averages_weights:
                self.meeting.agree(END)
                self.average_model()
            else:
                self.finish()

    def teardown(self) -> None:
        """Give back what was taken for the fit."""
        if self._fitting:
            with suppress(ValueError):  # after another error
                self._swap_back()
            if self.attempts and not self._ended and not self.gives_up:  # resumed where it had ended: no step was left
                self._end_again()
            self._fitting = False
            loop = self._trainer.fit_loop
            vars(loop).pop("on_run_end", None)
            vars(loop.epoch_loop.val_loop).pop("on_run_start", None)
            for each in self._watched:
                each.remove()
            self.close()
            self.meeting.close(waits=self.gives_up)
        super().teardown()

    # where the ranks meet

    def meet(self) -> None:
        """Lightning talks on all ranks at the same batch, also if their loaders end at different times."""
        if self._fitting and self.meeting.unsized and self._trainer.training and not self.gives_up:
            self.meeting.agree(ELSEWHERE)

    def _begin_evaluation(self, begin: Callable[[], None]) -> None:
        """Evaluate what the ranks have in common; hooks, too, of which the strategy's own would be the last."""
        if self.meeting.unsized:  # one of them may still be training
            self.meeting.agree(ELSEWHERE)
        self._swap_in()
        begin()

    # checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save what every rank has of its own beside the checkpoint, then the checkpoint, which rank 0 writes."""
        if self._trained and "optimizer_states" in checkpoint:
            for name in ("optimizer_states", "lr_schedulers"):  # which are not loaded with NumPy's numbers
                checkpoint[name] = plain(checkpoint[name])
            checkpoint[sidecar.ATTEMPTS] = [self._counts.get(id(optimizer), 0) for optimizer in self.optimizers]
            files, ranks, device = self.checkpoint_io, TorchCollective(), self.root_device
            tree = self._tree()
            if not self.gives_up and self._resume.state != "none":
                for name in self._kept_once(checkpoint.get("state_dict", {})):
                    del tree["model"][name]
            own = self.method, self.attempts, tree
            path = str(filepath) if self.gives_up else self.broadcast(str(filepath))  # a name may hold a rank's metric
            self._resume.save_tree(files, path, checkpoint, *own, ranks, device, self.gives_up)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _kept_once(self, saved: Mapping[str, Any]) -> set[str]:
        """Frozen parameters that the checkpoint has as all ranks have them; a collective call."""
        assert self.lightning_module is not None
        ranks, replica, told, there = TorchCollective(), self.replica(), {}, set()
        for name, parameter in self.lightning_module.named_parameters():
            own, other = replica[name].detach(), saved.get(name)
            if not parameter.requires_grad and isinstance(other, Tensor) and _equal(own, other):
                there.add(name)
            told[name] = own if name in there else f"rank {ranks.rank}"  # which no other says
        return there - set(differing(told, ranks, self.root_device))

    def _tree(self) -> sidecar.Tree:
        own = self.own_state()
        return {
            "common": {"attempts": self.attempts, "own": own.pop("common", None)},
            "model": {name: tensor.detach() for name, tensor in self.replica().items()},
            "optimizers": [plain(optimizer.state_dict()) for optimizer in self.optimizers],
            "precision": self.precision_plugin.state_dict(),
            "own": own,
        }

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint; what is beside it is restored with the optimizers."""
        self._resume.remember(str(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and this rank's own model and state, or say why all begin from the checkpoint's."""
        super().load_optimizer_state_dict(checkpoint)
        if not self._fitting:
            return
        ranks, device = TorchCollective(), self.root_device
        tree, problem = self._resume.restore_tree(self.checkpoint_io, checkpoint, self.method, ranks, device)
        counts = checkpoint.get(sidecar.ATTEMPTS, (tree or {}).get("attempts", ()))  # where it was at first
        self._counts = dict(zip(map(id, self.optimizers), counts, strict=False))
        self.attempts = max(self._counts.values(), default=0)
        if tree is None:
            if self._resume.state != "none":
                rank_zero_warn(problem)
            self._begin_after(self.attempts)
            return
        named = self._named()
        with torch.no_grad():
            for name, tensor in tree["model"].items():
                if name in named and named[name].shape == tensor.shape:  # caches that forward makes, it makes again
                    named[name].copy_(tensor)
        for optimizer, state in zip(self.optimizers, tree["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if tree["precision"]:
            self.precision_plugin.load_state_dict(tree["precision"])
        self.load_own_state(snapshot.moved(tree["own"] | {"common": tree["common"]["own"]}, self.root_device))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and what is beside it."""
        super().remove_checkpoint(filepath)
        self._resume.remove(str(filepath), self.global_rank)


def _equal(own: Tensor, other: Tensor) -> bool:
    alike = (own.dtype, own.shape, own.device) == (other.dtype, other.shape, other.device)
    return alike and own.equal(other)


def _arguments(make: Any) -> list[str]:
    return [name for name in inspect.signature(make).parameters if name not in ("self", "args", "kwargs")]
