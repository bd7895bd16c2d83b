"""The entry point: compress the gradient averaging of a DistributedDataParallel or sharded model."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_compress import kernels
from lightning_compress.collectives import Collective, TorchCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.core import errors
from lightning_compress.engine import checks, hook
from lightning_compress.engine.compression import Compression, ScaleSource
from lightning_compress.engine.delayed import DelayedCompression, DelayedHook
from lightning_compress.engine.sharded import attach as sharded
from lightning_compress.engine.sharded.units import is_sharded
from lightning_compress.planning.decide import decide
from lightning_compress.planning.summary import run_summary
from lightning_compress.settings.parsing import CompressorLike, ExchangeLike
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("lightning_compress")

BUCKET_CAP_MB = 5
"""Bucket size on CPUs where the user names none: backward goes on while these are encoded and travel."""
GPU_BUCKET_CAP_MB = 100
"""The same on GPUs, where starting a bucket's kernels costs more than their work."""
_FIRST_BUCKET = 1 << 20
"""Bytes of DistributedDataParallel's first bucket, unless the user set a cap."""


def _unscaled() -> None:
    """Return no factor of the loss."""


def attach(
    model: nn.Module,
    compressor: CompressorLike = "auto",
    exchange: ExchangeLike = "auto",
    *,
    scale: ScaleSource = _unscaled,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    replicas: DeviceMesh | None = None,
    **settings: Any,
) -> Compression:
    """Compress the gradient averaging of a bare DistributedDataParallel model, or among replicas of a sharded one.

    Call it on every rank, once, before the first backward, and for a sharded model before the first forward. A
    DistributedDataParallel model stays as it is with ``none``, if ``auto`` chooses ``none``, and on one rank. Rank 0
    logs one line that says what runs, or prints it to stderr if logging is not configured.

    Args:
        model: a DistributedDataParallel model, or one to which ``fully_shard`` was applied with a mesh of the shards.
            For the first, on CPUs, ``bucket_cap_mb=5`` suits compressed messages better than its default of 25, and on
            GPUs 100.
        compressor: see ``CompressedDDPStrategy``.
        exchange: see ``CompressedDDPStrategy``.
        scale: returns the factor of the loss, so that residuals survive a change of it; None if there is no scaler.
            With a GradScaler, enabled or not: ``lambda: getattr(scaler, "_scale", None)``.
        optimizer: the model's optimizer, or several. ``error_feedback="auto"`` needs it to choose. Otherwise it may be
            left out; then every biased method keeps a full residual. To resume a run exactly with
            ``residual_follows_lr`` or a schedule by the learning rate, give it: it would only be known from its first
            step on.
        replicas: of a sharded model, the dimension of the mesh over which its replicas lie, as ``mesh["replicate"]``.
            A backward pass with ``set_requires_all_reduce(False)`` averages over the shards only.
        **settings: ``error_feedback`` and the other arguments of ``CompressedDDPStrategy`` from ``warmup_steps`` to
            ``delay``, but not ``state`` and ``strict_state``, which are about checkpoints. If a schedule
            counts epochs, or ``dgc`` warms up, set the handle's ``epoch`` at the start of each epoch.

    Returns:
        the handle: ``summary`` (one line that says what runs), ``stats()``, ``retune()``, ``roll_back()`` (discards
        what was averaged since an optimizer stepped) and ``close()``, which every rank calls at the end: it compares
        the ranks' models once more, and raises a RuntimeError if they differ.

    Raises:
        ValueError: settings, model or ranks cannot work together; on every rank.
    """
    chosen = RunState.of(compressor, exchange, **settings)
    optimizers = [_inner(each) for each in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer or ())]
    if chosen.options.error_feedback.needs_optimizer and not optimizers:
        raise ValueError(
            "error_feedback='auto' depends on the optimizer: pass attach(..., optimizer=optimizer), or leave "
            "error_feedback out to keep a full residual if the method is biased"
        )
    if is_sharded(model):
        ranks, compression = TorchCollective(), _sharded(model, chosen, scale, optimizers, replicas)
    else:
        ranks, compression = _replicated(model, chosen, scale, replicas)
    if ranks.rank == 0 and not settings.get("schedule"):
        warn_of_epochs(chosen)

    def compare() -> None:
        """Compare the ranks, unless an error ends this one's training alone."""
        if dist.is_initialized() and sys.exc_info()[0] is None:
            with errors.called_by_all("compression.close()"):
                compression.compare_ranks(now=True)

    compression.closing.callback(compare)
    compression.stepped_by(optimizers)
    if ranks.rank == 0:
        say(compression)
    return compression


def _replicated(
    ddp: Any, chosen: RunState, scale: ScaleSource, replicas: DeviceMesh | None
) -> tuple[TorchCollective, Compression]:
    """Check a DistributedDataParallel model, and return its ranks and compression."""
    checks.check_ddp(ddp)
    if replicas is not None:
        raise ValueError(f"replicas={replicas} is for models of fully_shard: DistributedDataParallel has its own ranks")
    checks.check_delay(chosen, *(bool(getattr(ddp, name)) for name in checks.UNUSED))
    ranks = TorchCollective(ddp.process_group)
    check_setup(chosen, ddp.module, ranks, next(ddp.module.parameters()).device)
    return ranks, compress(ddp, chosen, scale)


def _sharded(
    model: nn.Module,
    chosen: RunState,
    scale: ScaleSource,
    optimizers: Sequence[Optimizer],
    replicas: DeviceMesh | None,
) -> Compression:
    """Check a sharded model, and return its compression."""
    ranks = TorchCollective()

    def check() -> None:
        if scale is not _unscaled:
            raise ValueError(
                "scale= is for a GradScaler, and each shard would find its own infinite gradients: use "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16), which needs no scaler"
            )
        sharded.check(model, chosen, replicas, optimizers, ranks)

    check_setup(chosen, model, ranks, next(model.parameters()).device, check)
    return sharded.compress(model, chosen, replicas, ranks)


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps, where accelerate's wrapper passes everything on to it."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and inner.param_groups is optimizer.param_groups:
        return _inner(inner)
    return optimizer


def warn_of_epochs(settings: RunState) -> None:
    """Warn if only the training loop can tell the schedule which epoch it is; call it on one rank."""
    if settings.options.schedule.by_epoch:
        log.warning(
            "%s changes its settings in the first epochs: set the compression's epoch at the start of each epoch, or "
            "give a schedule by steps, or schedule='none'",
            settings.compressor,
        )


def say(compression: Compression) -> None:
    """Announce what runs, and its warning; call it on one rank."""
    announce(compression.run_summary.line)
    if compression.run_summary.warning and log.level <= logging.INFO:
        log.warning(compression.run_summary.warning)


def announce(line: str) -> None:
    """Log a line, or print it to stderr if logging is not configured; do nothing if the log level was raised."""
    if log.level > logging.INFO:
        return
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(line)
    else:
        print(line, file=sys.stderr)


def check_setup(
    settings: RunState,
    module: nn.Module,
    collective: Collective,
    device: torch.device,
    also: Callable[[], object] = lambda: None,
) -> None:
    """Check everything that can be checked before training; a problem on one rank stops all, so that none waits.

    Args:
        settings: the user's.
        module: the model.
        collective: the ranks.
        device: of the model.
        also: raises for other problems.

    Raises:
        ValueError: something is wrong on any rank; on every rank.
    """
    problem = None
    try:
        checks.check_module(module, settings)
        also()
        kernels.compiler(device)  # raises if the environment asks for kernels that are not there
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
    """``attach`` for a model and settings that were checked already.

    Args:
        ddp: the model.
        settings: the user's settings.
        scale: see ``attach``.
        kept: what an earlier run chose, see ``decide``.
        accumulates: see ``Compression``.
    """
    collective = TorchCollective(ddp.process_group)
    parameters = checks.trained_parameters(ddp.module, ddp.parameters_to_ignore)
    device = parameters[0][1].device
    world = World(collective, device, Meter(device))
    settings = decide(settings.bound(kinds_of(ddp.module)), parameters, world, kept)
    mode = _mode(settings, collective.size)
    size = sum(each.nbytes for _, each in parameters)
    transports = _transports(ddp, size) if mode != "stock" and device.type == "cpu" else []  # see hook.ThreadHook
    first, *beside = transports or [collective]
    compression = compression_of(ddp, settings, first, beside, scale, accumulates)
    compression.run_summary = run_summary(compression.settings, parameters, world)
    on_cpu = DelayedHook if isinstance(compression, DelayedCompression) else hook.ThreadHook
    counting = None if mode == "compress" else hook.count_only(compression, ddp, collective.size)
    if mode == "compress":
        hook.register(compression, ddp, transports, on_cpu)
    else:
        compression.closing.callback(lambda: _close_unused(compression, transports))
    model = weakref.ref(ddp)  # whose hook holds the compression: as a cycle, neither would ever be freed

    def loaded() -> None:
        """Switch to what the loaded state runs."""
        runs, ddp = compression.next_settings, model()
        begins = mode == "may begin later" and not compression.active and not (runs.plain and not runs.error_feedback)
        if ddp and counting and begins:
            counting()
            hook.register(compression, ddp, transports, on_cpu)
        compression.run_summary = run_summary(runs, parameters, world)

    compression.at_load(loaded)
    return compression


def _mode(settings: RunState, ranks: int) -> Literal["stock", "may begin later", "compress"]:
    """Return who averages the gradients: DistributedDataParallel, it until a state is loaded that compresses, or us."""
    alone = ranks == 1 and not settings.works_alone
    if not alone and not settings.plain:
        return "compress"
    return "stock" if alone or settings.chosen is None else "may begin later"


def _close_unused(compression: Compression, transports: Sequence[TorchCollective]) -> None:
    """Close the transports of a compression that never averaged; else its hook does."""
    for transport in () if compression.active else transports:
        transport.close()


def compression_of(
    ddp: DistributedDataParallel,
    settings: RunState,
    collective: Collective,
    beside: Sequence[Collective] = (),
    scale: ScaleSource = lambda: None,
    accumulates: bool = True,
) -> Compression:
    """Return the compression of a model, before anything averages with it.

    Args:
        ddp: the model.
        settings: what runs.
        collective: the ranks.
        beside: see ``Compression``.
        scale: see ``attach``.
        accumulates: see ``Compression``.
    """
    delayed = bool(settings.options.delay) and collective.size > 1
    ignored = set(ddp.parameters_to_ignore) - set(getattr(ddp.module, checks.AVERAGED_ELSEWHERE, ()))
    return (DelayedCompression if delayed else Compression)(
        checks.trained(ddp.module, ignored),
        settings.bound(kinds_of(ddp.module)),
        collective,
        scale,
        checks.frozen_parameters(ddp.module, ignored, collective),
        ddp.find_unused_parameters or ddp.static_graph,
        accumulates and not delayed,
        _caps(ddp),
        beside=beside,
    )


def own_bucket_cap_mb(ranks: int, device: str = "cpu") -> int | None:
    """Return the bucket size for so many ranks that compress on this machine, if the user names none.

    None means DistributedDataParallel's default: where ranks share cores, smaller buckets only cost more calls. The
    size never follows from a measured link, because other buckets would draw other random numbers.

    Args:
        ranks: on this machine.
        device: type of device that compresses.
    """
    if device != "cpu":
        return GPU_BUCKET_CAP_MB
    return BUCKET_CAP_MB if ranks <= (os.cpu_count() or 1) else None


def _transports(ddp: DistributedDataParallel, size: int) -> list[TorchCollective]:
    """Return a process group for each lane of gradients of ``size`` bytes: two if they fill several buckets."""
    whole = TorchCollective(ddp.process_group)
    return [whole.apart() for _ in range(2 if size > _caps(ddp)[0] else 1)]  # Gloo matches collectives by their order


def _caps(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Return the bytes at which the first bucket and all others are full, after they were rebuilt."""
    first = _FIRST_BUCKET if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    return min(first, ddp.bucket_bytes_cap), ddp.bucket_bytes_cap
