"""The Lightning strategy: passes its arguments to the engine, and the Trainer's events on."""

from __future__ import annotations

import gc
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_compress.codecs import Method
from lightning_compress.collectives import TorchCollective
from lightning_compress.corrections import Corrected
from lightning_compress.engine import checks
from lightning_compress.engine.attach import check_setup, compress
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.optimizers import telling
from lightning_compress.exchanges import Pattern
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.compensation import beside_adam, kind_of
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.run_state import RunState
from lightning_compress.strategies.common import VARIANTS, CommonMixin, register
from lightning_compress.strategies.rendezvous import Rendezvous
from lightning_compress.strategies.resume import Resume
from lightning_compress.strategies.sidecar import CHOSEN, SavedState

_UNUSED: dict[str, dict[str, object]] = {"_find_unused_parameters_true": {"find_unused_parameters": True}}


class CompressedDDPMixin(CommonMixin):
    """Turns a ``DDPStrategy`` into a compressed one; see ``CompressedDDPStrategy``."""

    def __init__(
        self,
        compressor: Method | Corrected | Automatic | str | dict[str, Any] = "auto",
        exchange: Pattern | str | dict[str, Any] = "auto",
        error_feedback: bool | str | dict[str, Any] | None = None,
        warmup_steps: int | None = None,
        min_numel: int = 1024,
        seed: int = 0,
        state: SavedState = "sidecar",
        strict_state: bool = False,
        schedule: str | dict[str, Any] | None = None,
        rules: Sequence[dict[str, Any]] | None = (),
        local_clip_norm: float | dict[str, Any] | None = None,
        deterministic: bool = False,
        on_nonfinite: Literal["pass", "skip", "raise"] = "pass",
        on_drift: Literal["error", "resync"] = "error",
        check_drift_every: int = 100,
        **kwargs: Any,
    ) -> None:
        given = locals()  # settings by name: RunState has their checks and nothing here repeats them
        checks.check_known(kwargs, type(self), _OURS)
        checks.check_ddp_arguments(kwargs)
        super().__init__(**kwargs)
        self._settings = RunState.of(**{name: given[name] for name in _OURS if name not in _ON_CHECKPOINTS})
        self._compression: Compression | None = None
        self._resume = Resume(state, strict_state)
        self._kept: object = None
        self._meeting: Rendezvous | None = None

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot work, on every rank, before DistributedDataParallel is built."""
        assert self.lightning_module is not None
        fitting = trainer.state.fn == "fit"
        if fitting:
            checks.check_accumulation(bool(self._ddp_kwargs.get("static_graph")), _accumulation(trainer))
            checks.check_clipping(self._settings, trainer.gradient_clip_val)
            check_setup(self._settings, self.lightning_module, TorchCollective(), self.root_device)
            self._resume.begin(TorchCollective(), self.root_device)
            self._meeting = Rendezvous.everywhere(trainer, self.root_device) if self.world_size > 1 else None
        super().setup(trainer)
        self._kept = None
        if fitting:
            self._check_optimizers()
            self._watch_clipping()
            if trainer.enable_autolog_hparams:
                self._log_hyperparameters(trainer)

    def _log_hyperparameters(self, trainer: Any) -> None:
        """Tell all loggers what runs, with the module's own: where a logger keeps one call of several, it has all."""
        made = self.compression.forecast
        holders = [each for each in (self.lightning_module, trainer.datamodule) if each is not None]
        theirs = {
            name: value
            for each in holders
            if each._log_hyperparams
            for name, value in each.hparams_initial.items()
            if name != "_class_path"  # LightningCLI's own
        }
        for logger in trainer.loggers if self.is_global_zero else ():
            logger.log_hyperparams(theirs | made.hyperparameters())

    def on_train_start(self) -> None:
        """Compare numbers of batches, which are known by now; say what runs, once everything is restored."""
        super().on_train_start()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._meeting is not None:  # before max_steps no epoch ends
            most = trainer.max_steps * _accumulation(trainer)
            self._meeting.compare_batches(most if most >= 0 else math.inf)
        if self._compression is not None:
            rank_zero_info(self._compression.forecast.line)
            if self._compression.forecast.warning:
                rank_zero_warn(self._compression.forecast.warning)

    def _check_optimizers(self) -> None:
        assert self._compression is not None
        self._compression.stepped_by(self.optimizers)
        for optimizer in self.optimizers:
            self._compression.take_over(optimizer)
        adaptive = [type(each).__name__ for each in self.optimizers if kind_of([each]) == "adam"]
        coarse = [each for each in self._settings.methods if not each.safe_with_adam]
        if adaptive and self.world_size > 1 and coarse:
            running = self._compression.settings
            errors = beside_adam(coarse[0], running.compensation(coarse[0]), running.correction)
            rank_zero_warn(
                f"{coarse[0]} with {adaptive[0]} trains worse than without compression: adaptive learning rates do not "
                f"go with so coarse a method. {errors} Use compressor='rotated', which costs nothing; or "
                "LocalSGDStrategy(sync_every=8, compressor='rotated'), which sends half a bit a parameter and step, of "
                "what Adam changed; or 'onebit_adam', which takes Adam's place (give it torch.optim.SGD); or SGD with "
                "momentum."
            )

    def _watch_clipping(self) -> None:
        """Check what a module clips by itself too, in manual optimization or in ``configure_gradient_clipping``."""
        plugin = self.precision_plugin
        clip = type(plugin).clip_gradients.__get__(plugin)

        @wraps(clip)
        def checked(optimizer: Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
            checks.check_clipping(self.compression.settings, clip_val)
            clip(optimizer, clip_val, *args, **kwargs)

        plugin.clip_gradients = checked  # type: ignore[method-assign]

    def _register_ddp_hooks(self) -> None:
        # The base class registers hooks on CUDA only, and silently none on CPU.
        assert isinstance(self.model, DistributedDataParallel)
        assert self.lightning_module is not None
        module = self.lightning_module
        loop = [getattr(module, name).__module__ for name in ("optimizer_step", "optimizer_zero_grad")]
        own = not all(each.startswith(("lightning.pytorch.", "pytorch_lightning.")) for each in loop)
        several = own or not module.automatic_optimization  # else Lightning makes every average for one step
        self._compression = compress(self.model, self._settings, self._loss_scale, self._kept, accumulates=several)

    def rebuild(self) -> None:
        """Wrap the model anew, whose parameters are others now; steps are counted on, residuals begin at zero."""
        before = self.compression
        before.close()
        self.model = self.lightning_module
        gc.collect()  # the old wrapper takes its hooks from the parameters that stayed
        self.configure_ddp()
        self.compression.follow(before)
        self._check_optimizers()

    def _loss_scale(self) -> torch.Tensor | None:
        return getattr(getattr(self.precision_plugin, "scaler", None), "_scale", None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the schedule which epoch it is; heed a cluster's signals."""
        super().on_train_batch_start(batch, batch_idx)
        if self._compression is not None and self.lightning_module is not None:
            self._compression.epoch = self.lightning_module.current_epoch
        if self._meeting is not None:
            self._meeting.next_batch()

    def on_train_end(self) -> None:
        """Heed signals that came in the last batches."""
        super().on_train_end()
        if self._meeting is not None:
            self._meeting.finish()

    def pre_backward(self, closure_loss: Any) -> None:
        """Look at the gradients of earlier backwards: in manual optimization there may be several to a forward."""
        if self._compression is not None:
            self._compression.before_backward()
        super().pre_backward(closure_loss)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step; any object with the methods of an optimizer may do that."""
        if isinstance(optimizer, Optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with telling(optimizer, closure) as told:
            return super().optimizer_step(optimizer, told, model, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save what every rank knows beside the checkpoint, then the checkpoint, which is written by rank 0."""
        if self._compression is not None:
            alone = self.gives_up or self._answers_signal(str(filepath))
            path = str(filepath) if alone else self.broadcast(str(filepath))  # a name may hold the rank's own metric
            self._resume.save(self.checkpoint_io, path, checkpoint, self._compression, alone)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _answers_signal(self, filepath: str) -> bool:
        """Whether it is saved in a signal's handler, at any moment, and not where all ranks met."""
        meets = self._meeting is not None and self._meeting.signals.taken
        return os.path.basename(filepath).startswith("hpc_ckpt") and not meets

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint; what is beside it is restored with the optimizers."""
        content = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._kept = content.get(CHOSEN)
        return content

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers and the state of the compression."""
        super().load_optimizer_state_dict(checkpoint)
        if (ours := self._compression) and (problem := self._resume.restore(self.checkpoint_io, checkpoint, ours)):
            rank_zero_warn(problem)

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of the last step and in total, see ``Compression.stats``; ``summary``: what runs, in a line.

        Raises:
            RuntimeError: there is no fit under way.
        """
        return self.compression.stats() | {"summary": self.compression.summary}

    def measure_every(self, steps: int) -> None:
        """Have time and error measured on each so-manieth step."""
        self.compression.meter.sample_every = steps

    @property
    def compression(self) -> Compression:
        """The compression of the fit under way.

        Raises:
            RuntimeError: there is none.
        """
        if self._compression is None:
            raise RuntimeError(
                "there is no compression in this process: it begins with trainer.fit(), and with start_method='spawn' "
                "it lives in the spawned processes; use CommunicationMonitor to see their figures"
            )
        return self._compression

    def teardown(self) -> None:
        """Stop watching the optimizers; the figures stay readable."""
        if self._compression is not None:
            self._compression.close()
            vars(self.precision_plugin).pop("clip_gradients", None)
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
        self._kept = None  # of a checkpoint that a Tuner went back to
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``compressed_ddp``, one name per compressor, and the variants of each."""
        named: dict[str, dict[str, object]] = {"compressed_ddp": {}}
        named |= {f"compressed_ddp_{name}": {"compressor": name} for name in COMPRESSORS.offered}
        register(strategy_registry, cls, "Compressed DDP", named, VARIANTS | _UNUSED)


_ON_CHECKPOINTS = ("state", "strict_state")
_OURS = [name for name in inspect.signature(CompressedDDPMixin.__init__).parameters if name not in ("self", "kwargs")]


def _accumulation(trainer: Any) -> int:
    """The most batches that are accumulated at any time of the training."""
    schedules = [getattr(callback, "scheduling", None) for callback in trainer.callbacks]
    scheduled = [max(each.values()) for each in schedules if isinstance(each, dict) and each]
    return int(max([trainer.accumulate_grad_batches, *scheduled]))


class CompressedDDPStrategy(CompressedDDPMixin, DDPStrategy):
    """DistributedDataParallel whose gradient averaging is compressed.

    Args:
        compressor: a name (``"topk"``), a mapping (``{"name": "topk", "density": 0.01}``), or a codec; what is named
            always compresses. The default, ``auto``, measures the link and chooses among float32, ``bf16`` and
            ``rotated`` at 8 or 4 bits, which are safe with any optimizer and in a short run: see ``Automatic``.
            Everything stronger is a choice that depends on the optimizer and on the length of the run.
        exchange: the pattern in which messages travel, by name, mapping or object. ``auto`` measures the
            link once and takes what a cost model says: see ``Auto``.
        error_feedback: what becomes of what was not sent. True: it is added to the next gradient, for 8 bytes a
            parameter; False: nothing; "loco", or a mapping with its settings: an average of it is, for 2 bytes a
            parameter, see ``LoCo``. None or "auto": what was measured to go best with the method and the optimizer
            (``settings/compensation.py``), and where nothing was, True for methods that are biased (topk, onebit),
            whose theory needs it, and False for the others. A mapping without a name, such as ``{"decay": 0.95}``,
            keeps a residual like that where the method is biased; see ``Residual``: ``decay``, ``follows_lr`` (what is
            sent and what is kept then add up in units of updates, Stich et al., NeurIPS 2018, for SGD), and ``dtype``
            ("bfloat16" halves its memory, from 8 to 4 bytes a parameter, for some time).
        warmup_steps: optimizer steps with dense averaging before compression begins; None: what the method needs, 1000
            for ``onebit_adam`` (the paper takes 15 to 25 % of the steps, and never fewer than the learning rate's
            warm-up and a few times ``1 / (1 - beta2)``), else 0.
        min_numel: parameters with fewer elements, and 1-D ones (biases, norms), travel as float32 in the same
            message: together they are a percent of the bytes and the most sensitive. Casts take them too.
        seed: of all randomness; equal seeds give equal messages.
        state: how checkpoints hold residuals and other state of the ranks: "sidecar", a file a rank in a folder beside
            the checkpoint (``epoch=3.ckpt.lc``), from which a run goes on bit for bit; "mean", their mean inside the
            checkpoint; or "none". At another world size every rank goes on from the mean. A rank's file takes 4 bytes a
            parameter for the residual (2 in bfloat16), and what else the method keeps: ``dgc`` 8, ``onebit_adam`` 12.
        strict_state: state that cannot be restored stops the run, instead of a warning and a start from zero.
        schedule: settings of the compressor that change while training, one or several:
            ``{"density": {0: 0.25, 100: 0.0625}}`` from an optimizer step on (the compressor's own value before the
            first); ``{"density": {"unit": "epoch", "values": {0: 0.25, 4: 0.01}}}``;
            ``{"theta": {"kind": "linear", "to": 0.0, "steps": 1000}}`` or ``exponential``, from the compressor's own
            value (or ``"from"``), in 8 ``"stages"``, over steps or epochs; ``{"theta": {"kind": "lr", "factor": 5}}``:
            the dropped share is ``factor`` times the learning rate (the largest of a parameter group), at most the
            compressor's own. Or a preset: ``"dgc"``, density 0.25, 0.0625, 0.0156, 0.004, 0.001, as far as they
            are above the compressor's own, an epoch each, then that; ``{"preset": "dgc", "steps": 100}``. Steps count
            from 0, ``warmup_steps`` included. The compressor ``dgc`` brings that preset along at its default density;
            ``"none"`` does without.
        rules: what takes another compressor, in order; the first rule that takes a parameter has it, and ``compressor``
            has the rest: ``[{"kind": "embedding", "compressor": "bf16"}, {"match": ["head.*"], "compressor":
            {"name": "topk", "density": 0.1}}]``. ``match`` is a pattern or several, ``kind`` (of the module that owns
            the parameter) embedding, conv, linear, norm or other; both may be given. ``"none"`` keeps
            what it takes float32; ``min_numel`` comes first. Error feedback is for those methods that need it, if it is
            None.
        local_clip_norm: clip gradients on each rank before they are compressed, to this norm times the square root of
            the number of ranks, so that the mean of independent gradients is clipped to about this norm. It is that of
            each parameter, or with ``{"norm": 1.0, "by": "bucket"}`` that of a bucket of DistributedDataParallel: the
            norm of the whole gradient is not known when the first bucket is sent, but where ``bucket_cap_mb`` is no
            less than the model. The Trainer's ``gradient_clip_val`` clips the mean, after; it is refused where the
            optimizer is given steps and no mean of gradients (dgc, onebit_adam, signsgd, AdaGrad), and this is what to
            use there.
        deterministic: add floating-point numbers up in the order of the ranks, whatever DistributedDataParallel's
            buckets are: then ``none`` too resumes bit for bit. As many bytes, in two rounds.
        on_nonfinite: what to do, in a run without a GradScaler, when a rank's gradient is NaN or infinite, or above
            1.3e30 where something is kept from step to step: "pass" it on, as DistributedDataParallel does, but to the
            whole group of parameters that it travels with, as NaN; "skip" the step, on all ranks; or "raise" a
            ``FloatingPointError`` that names the parameters. Residuals of what the optimizer owns stay as they were in
            each case. On CUDA the last two wait for the device in every step.
        on_drift: what to do when parameters or averaged gradients are not the same on all ranks any more: an "error"
            that names step, parameters and ranks, or "resync": copy parameters and optimizer state from rank 0.
        check_drift_every: steps between these checks, of a checksum; 0: never.
        **kwargs: of Lightning's ``DDPStrategy``: ``find_unused_parameters``, ``bucket_cap_mb``, ``start_method``, ...

    Raises:
        ValueError: unknown names or settings, values out of range, or arguments that compression cannot work with.
    """


CompressedDDPStrategy.register_strategies(StrategyRegistry)
