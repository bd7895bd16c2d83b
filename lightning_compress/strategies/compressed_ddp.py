"""``CompressedDDPStrategy``: connects Lightning's Trainer to the compression engine."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.engine import checks
from lightning_compress.engine.attach import compress
from lightning_compress.engine.compression import Compression
from lightning_compress.strategies.advice import frozen_early, name_ours, warn
from lightning_compress.strategies.common import accumulation
from lightning_compress.strategies.compression import DDPArgumentsMixin
from lightning_compress.strategies.fit import FitMixin
from lightning_compress.strategies.report import settle

if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


class CompressedDDPMixin(DDPArgumentsMixin, FitMixin, _Base):
    """Turn a ``DDPStrategy`` into a compressed one; see ``CompressedDDPStrategy``."""

    def setup(self, trainer: Any) -> None:
        """Set up the fit; raise on every rank, before DistributedDataParallel is built, if settings cannot work."""
        super().setup(trainer)
        if trainer.state.fn == "fit" and self.world_size > 1:
            assert self.lightning_module is not None
            warn(frozen_early(trainer.callbacks, self.lightning_module))

    def _check_fit(self, trainer: Any) -> None:
        checks.check_accumulation(bool(self._ddp_kwargs.get("static_graph")), accumulation(trainer))
        super()._check_fit(trainer)

    def configure_ddp(self) -> None:
        """Build DistributedDataParallel, on CPUs with smaller buckets than its own default."""
        self._choose_bucket_cap()
        super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        # The base class registers hooks on CUDA only, and silently none on CPU.
        assert isinstance(self.model, DistributedDataParallel)
        assert self.lightning_module is not None
        module = self.lightning_module
        loop = [getattr(module, name).__module__ for name in ("optimizer_step", "optimizer_zero_grad")]
        overrides = not all(name.startswith(("lightning.pytorch.", "pytorch_lightning.")) for name in loop)
        # only Lightning's own loop is known to average once per step
        accumulates = overrides or not module.automatic_optimization
        self._compression = compress(
            self.model, self._settings, self._loss_scale, self._earlier_choice, accumulates=accumulates
        )

    def rebuild(self) -> None:
        """Wrap the model again after its parameters were replaced; steps continue, residuals start at zero."""
        before = self.compression
        before.close()
        self.model = self.lightning_module
        gc.collect()  # the old wrapper removes its hooks from the remaining parameters
        self.configure_ddp()
        self.compression.follow(before)
        self._check_optimizers()

    def on_exception(self, exception: BaseException) -> None:
        """Name this strategy where Lightning advises to change to its own because of unused parameters."""
        super().on_exception(exception)
        name_ours(exception, type(self).__name__)

    def _settle(self, compression: Compression) -> None:
        settle(self, compression, self._clock, self._rendezvous)


class CompressedDDPStrategy(CompressedDDPMixin, DDPStrategy):
    """DistributedDataParallel with a compressed gradient average; everything else is Lightning's.

    Args:
        compressor: Which compressor to use: a name (``"topk"``), a mapping (``{"name": "topk", "density": 0.01}``) or
            an object; default ``"auto"``. ``"auto"`` measures the link and picks float32, ``bf16``, ``qsgd`` 8 bits
            or ``qsgd`` 4 bits, which are safe with any optimizer and in short runs (``Automatic``). A compressor
            that you name always runs. Which stronger ones suit your optimizer and length of run:
            ``lightning-compress docs choose``.
        exchange: How messages travel between the ranks: a name, a mapping or an object; default ``"auto"``. ``"auto"``
            measures the link once and picks the pattern that is fastest by a cost model (``Auto``).
        error_feedback: What happens to the part of a gradient that was not sent; default None.

            - True, "residual": add it to the next gradient. Costs 8 bytes per parameter.
            - False: drop it.
            - "loco", or a mapping such as ``{"name": "loco", "beta": 0.05}``: add a moving average of it (``LoCo``).
              Costs 2 bytes per parameter.
            - None, "auto": what was measured to be best for this method and optimizer (settings/compensation.py).
              Where nothing was measured: True for biased methods (topk, onebit), whose theory needs it, else False.
            - A mapping without a name, such as ``{"decay": 0.95}``: where the method is biased, a residual with these
              settings of ``Residual``. ``decay``: the factor per step. ``follows_lr``: sent and kept parts add up in
              units of updates (for SGD; Stich et al., NeurIPS 2018). ``dtype``: "bfloat16" takes 4 bytes per parameter
              instead of 8, and some time.
        warmup_steps: Optimizer steps with dense (float32) averages before compression starts: an integer from 0, or
            None; default None. None: what the method needs, 1000 for ``onebit_adam`` and 0 for the others. (The
            1-bit Adam paper takes 15 to 25 % of all steps, and never fewer than the learning rate's warm-up and a few
            times ``1 / (1 - beta2)``.)
        min_numel: Parameters with fewer elements are sent as float32: an integer from 0; default 1024. The same holds
            for all 1-D parameters (biases, norms). Together they are about 1 % of the bytes, and the most sensitive.
            They travel in the same message. Casts (``bf16``, ``fp16``) are applied to them too.
        seed: Seed of all randomness: an integer from 0, or None, which is 0; default 0. Equal seeds give equal
            messages.
        state: Where checkpoints keep residuals and other per-rank state: "sidecar", "mean" or "none"; default
            "sidecar".

            - "sidecar": one file per rank in a folder beside the checkpoint (``epoch=3.ckpt.lc``). The run resumes bit
              for bit. A file has 4 bytes per parameter for the residual (2 in bfloat16), 1 for LoCo (``onebit``),
              8 for ``dgc``, 12 for ``onebit_adam``.
            - "mean": the mean over ranks, inside the checkpoint.
            - "none": nothing.

            On another number of ranks, every rank resumes from the mean. See ``lightning-compress docs reliability``.
        strict_state: Whether state that cannot be restored is an error: True or False; default False. False: warn, and
            start from zero.
        schedule: Compressor settings that change during training: a mapping, a preset, "none" or None; default None.

            - ``{"density": {0: 0.25, 100: 0.0625}}``: a value from each optimizer step on. Steps count from 0 and
              include ``warmup_steps``. Before the first, the compressor's own value holds.
            - ``{"density": {"unit": "epoch", "values": {0: 0.25, 4: 0.01}}}``: the same by epoch.
            - ``{"theta": {"kind": "linear", "to": 0.0, "steps": 1000}}``, or ``"exponential"``: a ramp over ``"steps"``
              or ``"epochs"``, in 8 ``"stages"``, from the compressor's own value or ``"from"``.
            - ``{"theta": {"kind": "lr", "factor": 5}}``: drop a share of ``factor`` times the learning rate (the
              largest of all parameter groups), at most the compressor's own share.
            - ``"dgc"`` or ``{"preset": "dgc", "steps": 100}``: densities 0.25, 0.0625, 0.0156, 0.004 and 0.001, as far
              as they are above the compressor's own, then that. Each lasts one epoch, or ``"steps"`` or ``"epochs"``.
            - None: what the compressor brings along: this preset for ``dgc`` at its default density, else nothing.
            - ``"none"``: no schedule, not even that one.
        rules: Other compressors for some parameters: a list of mappings; default none. For example ``[{"kind":
            "embedding", "compressor": "bf16"}, {"match": ["head.*"], "compressor": {"name": "topk", "density":
            0.1}}]``. ``match`` is one or several patterns of parameter names. ``kind`` is that of the module which owns
            the parameter: embedding, conv, linear, norm or other. If both are given, both must hold. The first rule
            that takes a parameter counts; ``compressor`` has the rest. The compressor ``"none"`` keeps float32.
            ``min_numel`` comes before the rules. With ``error_feedback=None``, each method has its own.
        local_clip_norm: Clip each rank's gradient before it is compressed: a norm above 0, a mapping, or None; default
            None. The bound is this norm times the square root of the number of ranks, so that the mean of independent
            gradients has about this norm. It holds for each parameter, or with ``{"norm": 1.0, "by": "bucket"}`` for
            each bucket of DistributedDataParallel. The norm of the whole gradient is not known when the first bucket is
            sent, unless ``bucket_cap_mb`` is at least the model's size. The Trainer's ``gradient_clip_val`` clips the
            mean instead. It is refused where the optimizer does not get a mean of gradients (dgc, onebit_adam, signsgd,
            AdaGrad at the owner): use ``local_clip_norm`` there.
        deterministic: Whether floating-point sums follow the order of the ranks, independent of buckets: True or False;
            default False. With True, ``none`` resumes bit for bit too. Sends as many bytes, in two rounds.
        on_nonfinite: What to do if a rank's gradient is NaN or infinite, in a run without a GradScaler: "pass", "skip"
            or "raise"; default "pass". Where state is kept from step to step, values above 1.3e30 count as infinite.

            - "pass": pass it on, as DistributedDataParallel does, but as NaN in all parameters of its bucket.
            - "skip": skip the optimizer's step on all ranks.
            - "raise": raise a ``FloatingPointError`` that names the parameters.

            Residuals stay as they were in each case. On CUDA, "skip" and "raise" wait for the device in every step.
        on_drift: What to do if parameters or averaged gradients differ between ranks: "error" or "resync"; default
            "error". "error": raise with the step, parameters and ranks. "resync": copy parameters and optimizer state
            from rank 0.
        check_drift_every: Steps between these checks, which compare checksums: an integer from 0; default 100. 0: never
            check.
        delay: Steps until an average is applied: 0 or 1; default 0. With 1, an average travels while the next step
            computes, and the optimizer applies it at the end of that step (double buffering, Seide et al., Interspeech
            2014). A step then takes the longer of computing and communication, not both. The gradients are a step old,
            which costs some loss; the first step applies nothing, and the last average is not applied. For CPUs over
            Gloo and any codec; 8 bytes per parameter. When it pays: ``lightning-compress docs settings``.
        **kwargs: Arguments of Lightning's ``DDPStrategy``: ``find_unused_parameters``, ``start_method``, ...
            ``bucket_cap_mb=None`` means 5 where CPUs compress and each rank has a core, so that messages travel while
            backward goes on, 100 on GPUs, so that few kernels are started, and otherwise DistributedDataParallel's 25.

    Raises:
        ValueError: a name or setting is unknown, a value is out of range, or an argument does not work with
            compression.
    """


CompressedDDPStrategy.register_strategies(StrategyRegistry)
