"""The public door: compress the averaging of a DistributedDataParallel model."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import checks, hook, kernels
from lightning_compress.codecs import Dense
from lightning_compress.collectives import Collective, TorchCollective
from lightning_compress.compression import Compression, ScaleSource
from lightning_compress.settings import CompressorLike, ExchangeLike, Settings

log = logging.getLogger(__name__)


def attach(
    ddp: DistributedDataParallel,
    compressor: CompressorLike = "bf16",
    exchange: ExchangeLike = "auto",
    *,
    scale: ScaleSource = lambda: None,
    **settings: Any,
) -> Compression:
    """Compress the gradient averaging of a bare DistributedDataParallel model.

    Call it on every rank, once, before the first backward. ``none`` and one rank leave the model as it is.

    Args:
        ddp: the model.
        compressor: see ``CompressedDDPStrategy``.
        exchange: likewise.
        scale: returns what the loss is multiplied by (``lambda: scaler._scale`` with a GradScaler), so that residuals
            survive a change of it; None where there is no scaler.
        **settings: ``error_feedback`` and the others of ``CompressedDDPStrategy``, from ``warmup_steps``
            to ``check_drift_every``; but for those on checkpoints, ``state`` and ``strict_state``. Where a schedule
            goes by epochs, or ``dgc`` warms up, set the handle's ``epoch`` when one begins: nobody else knows of it.

    Returns:
        the handle: ``stats()``, ``retune()``, ``roll_back()`` (for steps that you skip yourself) and ``close()``.

    Raises:
        ValueError: settings, module or ranks that cannot work together; on every rank.
    """
    chosen = Settings.of(compressor, exchange, **settings)
    checks.check_ddp(ddp)
    if chosen.schedule.by_epoch and not settings.get("schedule") and TorchCollective(ddp.process_group).rank == 0:
        log.warning(
            "%s begins with other settings, epoch by epoch: set the handle's epoch when one begins, or give a schedule "
            "by steps, or warmup=False",
            chosen.compressor,
        )
    check_setup(chosen, ddp.module, TorchCollective(ddp.process_group), next(ddp.module.parameters()).device)
    return compress(ddp, chosen, scale)


def check_setup(settings: Settings, module: nn.Module, collective: Collective, device: torch.device) -> None:
    """Everything that can be refused before training; talks to the other ranks first, so that none of them waits.

    Raises:
        ValueError: on every rank.
    """
    problem = None
    try:
        checks.check_module(module, settings)
        kernels.fused(device)  # may refuse what the environment asks for
    except ValueError as error:
        problem = error
    checks.check_ranks_agree(settings, module, problem, collective, device)


def compress(
    ddp: DistributedDataParallel, settings: Settings, scale: ScaleSource = lambda: None, accumulates: bool = True
) -> Compression:
    """``attach`` for what was checked already; ``accumulates``: see ``Compression``."""
    collective = TorchCollective(ddp.process_group)
    dense = all(isinstance(method, Dense) for method in settings.methods)
    idle = (collective.size == 1 or (dense and not settings.deterministic)) and settings.local_clip_norm is None
    idle = idle and settings.correction is None and not settings.exchange.optimizes  # who work in any world
    own = None
    if not idle and next(ddp.module.parameters()).device.type == "cpu":  # Gloo goes by order; see hook.ThreadHook
        own = collective.apart()
    unused = ddp.find_unused_parameters or ddp.static_graph
    compression = Compression(
        ddp.module,
        settings,
        own or collective,
        scale,
        ddp.parameters_to_ignore,
        unused,
        accumulates and not idle,
        _caps(ddp),
    )
    if idle:
        hook.leave_to(compression, ddp, collective.size)
    else:
        hook.register(compression, ddp, own)
    return compression


def _caps(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Bytes at which the model's first bucket is full, and the others, once it has rebuilt them."""
    usual = dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    return min(usual, ddp.bucket_bytes_cap), ddp.bucket_bytes_cap
