"""What every fit with compressed gradient averages needs, whatever averages them: DistributedDataParallel or FSDP."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import wraps
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_compress.collectives import TorchCollective
from lightning_compress.core import errors
from lightning_compress.engine import checks
from lightning_compress.engine.attach import check_setup
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.optimizers import notifying
from lightning_compress.strategies.advice import few_steps, steps_of, untested, warn, warn_beside
from lightning_compress.strategies.common import CommonMixin, accumulation
from lightning_compress.strategies.compression import CompressionMixin
from lightning_compress.strategies.rendezvous import Rendezvous
from lightning_compress.strategies.report import Lines, StepClock, log_hyperparameters, of_fit, tell
from lightning_compress.strategies.resume import restore_compression, save_compression
from lightning_compress.strategies.sidecar import CHOSEN


class FitMixin(CompressionMixin, CommonMixin):
    """Check a fit, say what runs, follow signals, save the state and report; a subclass makes ``_compression``."""

    _compression: Compression | None = None
    _earlier_choice: object = None
    _rendezvous: Rendezvous | None = None
    _clock: StepClock
    _told = False
    """Whether the line that says what runs was logged in this fit."""

    def setup(self, trainer: Any) -> None:
        """Set up the fit; raise on every rank, before the model is wrapped, if settings cannot work."""
        assert self.lightning_module is not None
        fitting = trainer.state.fn == "fit"
        if fitting:
            self._check_fit(trainer)
            self._begin_states()
            self._rendezvous = Rendezvous.everywhere(trainer, self.root_device) if self.world_size > 1 else None
        super().setup(trainer)
        self._earlier_choice = None
        if fitting:
            self._check_optimizers()
            self._watch_clipping()
            self._told, self._clock = False, StepClock()
            if trainer.ckpt_path is None:
                self._tell()
            if getattr(trainer, "enable_autolog_hparams", True) and self.is_global_zero:  # from Lightning 2.6 on
                log_hyperparameters(trainer, self.compression.run_summary)

    def _begin_states(self) -> None:
        """Let the ranks agree on how they save their states. Collective."""
        self._resume.begin(TorchCollective(), self.root_device)

    def _check_fit(self, trainer: Any) -> None:
        """Raise ValueError, on every rank, if the fit cannot work. Collective."""
        assert self.lightning_module is not None
        checks.check_clipping(self._settings, trainer.gradient_clip_val)
        checks.check_delayed_loop(self._settings, self.lightning_module.automatic_optimization)
        ranks = TorchCollective()
        check_setup(self._settings, self.lightning_module, ranks, self.root_device, lambda: self._check_model(ranks))

    def _check_model(self, ranks: TorchCollective) -> None:
        """Raise ValueError if this rank's model cannot work."""

    def on_train_start(self) -> None:
        """Check that all ranks have equally many batches; log what a restored run goes on with."""
        super().on_train_start()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._rendezvous is not None:  # if max_steps ends the fit first, epochs may differ in length
            most = trainer.max_steps * accumulation(trainer)
            self._rendezvous.compare_batches(most if most >= 0 else math.inf)
        self._tell()
        warn(few_steps(self.compression.settings, steps_of(trainer)) if self.world_size > 1 else "")
        warn(untested(self.root_device))

    def _tell(self) -> None:
        """Log what runs, once: before the progress bar begins, or as soon as a checkpoint is restored."""
        if self._compression is not None and not self._told:
            self._told = True
            rank_zero_info(self._compression.run_summary.line)
            warn(self._compression.run_summary.warning)

    def _check_optimizers(self) -> None:
        assert self._compression is not None
        assert self.lightning_module is not None
        self._compression.stepped_by(self.optimizers)
        if self.world_size > 1:
            warn_beside(self._compression.settings, self.optimizers, self.lightning_module)

    def _watch_clipping(self) -> None:
        """Check the gradient clipping that a module does itself, such as in manual optimization."""
        plugin = self.precision_plugin
        clip = type(plugin).clip_gradients.__get__(plugin)

        @wraps(clip)
        def checked(optimizer: Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
            checks.check_clipping(self.compression.settings, clip_val)
            clip(optimizer, clip_val, *args, **kwargs)

        plugin.clip_gradients = checked  # type: ignore[method-assign]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Pass the epoch to the schedule, and act on a cluster's signals that all ranks know of."""
        super().on_train_batch_start(batch, batch_idx)
        if self._compression is not None and self.lightning_module is not None:
            self._compression.epoch = self.lightning_module.current_epoch
        if self._rendezvous is not None:
            self._rendezvous.next_batch()

    def on_train_end(self) -> None:
        """Log what the fit sent, and what that took; act on signals of the last batches; compare the ranks."""
        super().on_train_end()
        assert self.lightning_module is not None
        if self._rendezvous is not None:
            self._rendezvous.finish()
        if (compression := self._compression) is not None:
            self._settle(compression)
            tell(self.report(), self.lightning_module.trainer)
            compression.compare_ranks(now=True)

    def _settle(self, compression: Compression) -> None:
        """Find out what a step would take without compression, with all ranks at the end of the fit. Collective."""

    def pre_backward(self, closure_loss: Any) -> None:
        """Note gradients of earlier backward passes: manual optimization may do several per forward pass."""
        if self._compression is not None:
            self._compression.before_backward()
        super().pre_backward(closure_loss)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step; ``optimizer`` may be any object with an optimizer's methods."""
        self._clock.step()
        if isinstance(optimizer, Optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with notifying(optimizer, closure) as wrapped_closure:
            return super().optimizer_step(optimizer, wrapped_closure, model, **kwargs)

    @errors.called_by_all("trainer.save_checkpoint()")
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write each rank's file beside the checkpoint, then the checkpoint itself (rank 0)."""
        if self._compression is not None:
            self._save_state(self._compression, checkpoint, str(filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_state(self, compression: Compression, checkpoint: dict[str, Any], filepath: str) -> None:
        """Save this rank's state with a checkpoint that is about to be written."""
        alone = self.gives_up or self._answers_signal(filepath)
        path = filepath if alone else self._beside(filepath)
        save_compression(self._resume, self.checkpoint_io, path, checkpoint, compression, alone)

    def _beside(self, filepath: str) -> str:
        """Return the path beside which the ranks write: rank 0's, because a name may contain a rank's own metric."""
        return str(self.broadcast(filepath))

    def _answers_signal(self, filepath: str) -> bool:
        """Whether a signal handler saves, at any moment, instead of all ranks at the same batch."""
        agreed = self._rendezvous is not None and self._rendezvous.signals.taken
        return os.path.basename(filepath).startswith("hpc_ckpt") and not agreed

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint; the files beside it are read with the optimizers' states."""
        content = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._earlier_choice = content.get(CHOSEN)
        return content

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers and the compression's state."""
        super().load_optimizer_state_dict(checkpoint)
        if (compression := self._compression) is None:
            return
        warn(restore_compression(self._resume, self.checkpoint_io, checkpoint, compression))

    def report(self) -> Lines:
        """Return the figures of the fit: what was sent, and what an average and a step took.

        Once training has ended, also what DistributedDataParallel's step would take, where the link is known.
        """
        return [] if self._compression is None else self._figures(self._compression)

    def _figures(self, compression: Compression) -> Lines:
        return of_fit(compression, self.world_size, self._clock)

    @property
    def compression(self) -> Compression:
        """The compression of the current fit.

        Raises:
            RuntimeError: no fit is running.
        """
        if self._compression is None:
            raise RuntimeError(
                "there is no compression in this process: it starts with trainer.fit(), and with start_method='spawn' "
                "it lives in the spawned processes. Use CommunicationMonitor to see their figures"
            )
        return self._compression

    def teardown(self) -> None:
        """Stop watching the optimizers; ``comm_stats`` stays readable."""
        if self._compression is not None:
            self._compression.close()
            vars(self.precision_plugin).pop("clip_gradients", None)
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
        self._earlier_choice = None  # may be of a checkpoint that a Tuner restored
        super().teardown()
