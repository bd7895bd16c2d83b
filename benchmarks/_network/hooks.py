"""PyTorch's own hooks, as the lab and other benchmarks run them; nothing here imports the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

ONE_BUCKET = 1 << 20
"""Megabytes: more than any model has. PyTorch's PowerSGD hook aborts on Gloo with two buckets."""


def nothing(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # DDP looks
    """No communication at all: the bound that no method can pass."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def bf16_mean(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # DDP looks
    """PyTorch's bf16 hook, which DDP refuses by its name where NCCL is missing, though Gloo sums bfloat16 too."""
    return default_hooks.bf16_compress_hook(state, bucket)


def hooked(hook: Callable[..., Any], state: Callable[[], object] = lambda: None, **ddp: Any) -> Any:
    """Return what wraps a module in DistributedDataParallel, with these arguments, and registers a hook."""

    def make(module: nn.Module) -> tuple[DistributedDataParallel, None]:
        model = DistributedDataParallel(module, **ddp)
        model.register_comm_hook(state(), hook)
        return model, None

    return make


def power_sgd_state(rank: int, start: int = 2) -> powerSGD_hook.PowerSGDState:
    """State of PyTorch's PowerSGD hook; it compresses after ``start`` steps, 2 or more."""
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)


def power_sgd(rank: int, start: int = 2) -> Any:
    """Return what wraps a module, with PyTorch's PowerSGD hook."""

    def make(module: nn.Module) -> tuple[DistributedDataParallel, None]:
        ddp = {"bucket_cap_mb": ONE_BUCKET} if dist.get_backend() == "gloo" else {}
        model: tuple[DistributedDataParallel, None]
        model = hooked(powerSGD_hook.powerSGD_hook, lambda: power_sgd_state(rank, start), **ddp)(module)
        return model

    return make


PYTORCH: dict[str, Any] = {
    "no communication": hooked(nothing, broadcast_buffers=False),
    "DDP": lambda module: (DistributedDataParallel(module), None),
    "PyTorch fp16": hooked(default_hooks.fp16_compress_hook),
    "PyTorch bf16": hooked(bf16_mean),
    "PyTorch PowerSGD 1": power_sgd(1),
    "PyTorch PowerSGD 4": power_sgd(4),
}
