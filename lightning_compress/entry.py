"""The public door: compress the averaging of a DistributedDataParallel model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import checks, hook
from lightning_compress.codecs import Dense
from lightning_compress.collectives import Collective, TorchCollective
from lightning_compress.compression import Compression, ScaleSource
from lightning_compress.settings import CompressorLike, ExchangeLike, ScheduleLike, Settings


def attach(
    ddp: DistributedDataParallel,
    compressor: CompressorLike = "bf16",
    exchange: ExchangeLike = "auto",
    error_feedback: bool | None = None,
    warmup_steps: int = 0,
    min_numel: int = 1024,
    exclude: Sequence[str] | None = (),
    seed: int = 0,
    schedule: ScheduleLike = None,
    rules: Sequence[Mapping[str, object]] | None = (),
    residual_decay: float = 1.0,
    residual_follows_lr: bool = False,
    scale: ScaleSource = lambda: None,
) -> Compression:
    """Compress the gradient averaging of a bare DistributedDataParallel model.

    Call it on every rank, once, before the first backward. ``none`` and one rank leave the model as it is.

    Args:
        ddp: the model.
        compressor: see ``CompressedDDPStrategy``, as the other arguments.
        exchange: the pattern in which messages travel.
        error_feedback: add what was not sent to the next gradient.
        warmup_steps: dense steps before compression begins.
        min_numel: smaller parameters stay dense.
        exclude: patterns of parameter names that stay dense.
        seed: of all randomness.
        schedule: settings that change; where it goes by epochs, set the handle's ``epoch`` when one begins.
        rules: parameters that take another compressor.
        residual_decay: factor on the residual before it is added.
        residual_follows_lr: keep the residual in units of updates.
        scale: returns what the loss is multiplied by (``lambda: scaler._scale`` with a GradScaler), so that residuals
            survive a change of it; None where there is no scaler.

    Returns:
        the handle: ``stats()``, ``retune()``, ``roll_back()`` (for steps that you skip yourself) and ``close()``.

    Raises:
        ValueError: settings, module or ranks that cannot work together; on every rank.
    """
    settings = Settings.of(
        compressor,
        exchange,
        error_feedback,
        warmup_steps,
        min_numel,
        exclude,
        seed,
        schedule,
        rules,
        residual_decay,
        residual_follows_lr,
    )
    checks.check_ddp(ddp)
    check_setup(settings, ddp.module, TorchCollective(ddp.process_group), next(ddp.module.parameters()).device)
    return compress(ddp, settings, scale)


def check_setup(settings: Settings, module: nn.Module, collective: Collective, device: torch.device) -> None:
    """Everything that can be refused before training; talks to the other ranks first, so that none of them waits.

    Raises:
        ValueError: on every rank.
    """
    problem = None
    try:
        checks.check_module(module, settings)
    except ValueError as error:
        problem = error
    checks.check_ranks_agree(settings, module, problem, collective, device)


def compress(ddp: DistributedDataParallel, settings: Settings, scale: ScaleSource = lambda: None) -> Compression:
    """``attach`` for what was checked already."""
    collective = TorchCollective(ddp.process_group)
    compression = Compression(ddp.module, settings, collective, scale, ddp.parameters_to_ignore)
    idle = collective.size == 1 or all(isinstance(method, Dense) for method in settings.methods)
    if idle and settings.correction is None and not settings.exchange.optimizes:  # who do their work on any world
        hook.leave_to(compression, ddp, collective.size)
    else:
        hook.register(compression, ddp)
    return compression
