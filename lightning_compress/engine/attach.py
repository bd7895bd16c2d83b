"""The entry point: compress the averaging of a DistributedDataParallel model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_compress import kernels
from lightning_compress.collectives import Collective, TorchCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine import checks, hook
from lightning_compress.engine.compression import Compression, ScaleSource
from lightning_compress.planning.decide import decide
from lightning_compress.planning.summary import forecast
from lightning_compress.settings.parsing import CompressorLike, ExchangeLike
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState

log = logging.getLogger("lightning_compress")

_FIRST_BUCKET = 1 << 20
"""Bytes of DistributedDataParallel's first bucket, unless its cap is given."""


def attach(
    ddp: DistributedDataParallel,
    compressor: CompressorLike = "auto",
    exchange: ExchangeLike = "auto",
    *,
    scale: ScaleSource = lambda: None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    **settings: Any,
) -> Compression:
    """Compress the gradient averaging of a bare DistributedDataParallel model.

    Call it on every rank, once, before the first backward. ``none``, also where ``auto`` chooses it, and one rank leave
    the model as it is. Rank 0 says in a line what runs: to the log, or where none is shown to stderr.

    Args:
        ddp: the model.
        compressor: see ``CompressedDDPStrategy``.
        exchange: likewise.
        scale: returns what the loss is multiplied by, so that residuals survive a change of it; None where there is no
            scaler. With a GradScaler, enabled or not: ``lambda: getattr(scaler, "_scale", None)``.
        optimizer: the model's, one or several, on which ``error_feedback`` depends where that is left to the method; it
            need not be given, and then every biased method keeps a full residual. A run that goes on from a state with
            ``residual_follows_lr``, or a schedule by the learning rate, needs it to go on exactly: it would be known
            from its first step on only.
        **settings: ``error_feedback`` and the others of ``CompressedDDPStrategy``, from ``warmup_steps``
            to ``check_drift_every``; but for those on checkpoints, ``state`` and ``strict_state``. Where a schedule
            goes by epochs, or ``dgc`` warms up, set the handle's ``epoch`` when one begins.

    Returns:
        the handle: ``summary`` (what runs, in a line), ``stats()``, ``retune()``, ``roll_back()`` (throws away what
        was averaged since an optimizer stepped) and ``close()``.

    Raises:
        ValueError: settings, module or ranks that cannot work together; on every rank.
    """
    chosen = RunState.of(compressor, exchange, **settings)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    if chosen.options.error_feedback.needs_optimizer and not optimizers:
        raise ValueError(
            "error_feedback='auto' depends on the optimizer; give it as attach(..., optimizer=optimizer), or leave "
            "error_feedback out for a full residual where the method is biased"
        )
    checks.check_ddp(ddp)
    by_epoch = chosen.options.schedule.by_epoch and not settings.get("schedule")
    if by_epoch and TorchCollective(ddp.process_group).rank == 0:
        log.warning(
            "%s begins with other settings, epoch by epoch: set the handle's epoch when one begins, or give a schedule "
            "by steps, or schedule='none'",
            chosen.compressor,
        )
    check_setup(chosen, ddp.module, TorchCollective(ddp.process_group), next(ddp.module.parameters()).device)
    compression = compress(ddp, chosen, scale)
    compression.stepped_by(optimizers)
    for each in optimizers:
        compression.take_over(each)
    if dist.get_rank(ddp.process_group) == 0:
        say(compression)
    return compression


def say(compression: Compression) -> None:
    """Show what runs, and what is wrong with it: on one rank."""
    made = compression.forecast
    announce(made.line)
    if made.warning and log.level <= logging.INFO:
        log.warning(made.warning)


def announce(line: str) -> None:
    """Show a line: in the log, or where none is shown on stderr; not where the log was turned down by hand."""
    if log.level > logging.INFO:
        return
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(line)
    else:
        print(line, file=sys.stderr)


def check_setup(settings: RunState, module: nn.Module, collective: Collective, device: torch.device) -> None:
    """Everything that can be refused before training; talks to the other ranks first, so that none of them waits.

    Raises:
        ValueError: on every rank.
    """
    problem = None
    try:
        checks.check_module(module, settings)
        kernels.compiler(device)  # may refuse what the environment asks for
    except ValueError as error:
        problem = error
    checks.check_ranks_agree(settings, module, problem, collective, device)


def compress(
    ddp: DistributedDataParallel,
    settings: RunState,
    scale: ScaleSource = lambda: None,
    kept: object = None,
    accumulates: bool = True,
) -> Compression:
    """``attach`` for what was checked already.

    Args:
        ddp: the model.
        settings: likewise.
        scale: likewise.
        kept: what an earlier run chose, see ``decide``.
        accumulates: see ``Compression``.
    """
    collective = TorchCollective(ddp.process_group)
    parameters = checks.trained_parameters(ddp.module, ddp.parameters_to_ignore)
    device = parameters[0][1].device
    world = World(collective, device, Meter(device))
    settings = decide(settings.bound(kinds_of(ddp.module)), parameters, world, kept)
    alone = collective.size == 1 and not settings.works_alone
    idle = alone or settings.plain
    own = None
    if not alone and not (idle and settings.chosen is None) and device.type == "cpu":  # see hook.ThreadHook
        own = collective.apart()  # Gloo goes by order
    unused = ddp.find_unused_parameters or ddp.static_graph
    compression = Compression(
        ddp.module,
        settings,
        own or collective,
        scale,
        set(ddp.parameters_to_ignore) - checks.averaged_beside(ddp.module),
        unused,
        accumulates,
        _caps(ddp),
    )
    compression.forecast = forecast(compression.settings, parameters, world)
    if not idle:
        hook.register(compression, ddp, own)
    counting = hook.leave_to(compression, ddp, collective.size) if idle else None
    if idle and own:
        compression.at_close(lambda: None if compression.active else own.close())

    def loaded() -> None:
        """A state says what goes on."""
        runs = compression.next_settings
        if counting and own and not (compression.active or (runs.plain and not runs.error_feedback)):
            counting()
            hook.register(compression, ddp, own)
        compression.forecast = forecast(runs, parameters, world)

    compression.at_load(loaded)
    return compression


def _caps(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Bytes at which the model's first bucket is full, and the others, once it has rebuilt them."""
    first = _FIRST_BUCKET if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    return min(first, ddp.bucket_bytes_cap), ddp.bucket_bytes_cap
