"""What averages gradients in the lab: ours, and what PyTorch brings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import Compression, attach

ONE_BUCKET = 1 << 20
"""Megabytes: more than any model has. PyTorch's PowerSGD hook aborts on Gloo with two buckets."""


def nothing(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # DDP looks
    """No communication at all: the bound that no method can pass."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def _hooked(hook: Callable[..., Any], state: Callable[[], object] = lambda: None, **ddp: Any) -> Any:
    def make(module: nn.Module) -> tuple[DistributedDataParallel, None]:
        model = DistributedDataParallel(module, **ddp)
        model.register_comm_hook(state(), hook)
        return model, None

    return make


def _power_sgd(rank: int) -> Any:
    def state() -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)

    return _hooked(powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=ONE_BUCKET)


def _ours(settings: dict[str, Any]) -> Any:
    def make(module: nn.Module) -> tuple[DistributedDataParallel, Compression]:
        model = DistributedDataParallel(module)
        return model, attach(model, **settings)

    return make


# Its bf16 hook refuses Gloo.
PYTORCH: dict[str, Any] = {
    "no communication": _hooked(nothing),
    "DDP": lambda module: (DistributedDataParallel(module), None),
    "PyTorch fp16": _hooked(default_hooks.fp16_compress_hook),
    "PyTorch PowerSGD 1": _power_sgd(1),
    "PyTorch PowerSGD 4": _power_sgd(4),
}

OURS: dict[str, dict[str, Any]] = {
    "bf16": {"compressor": "bf16"},
    "onebit": {"compressor": "onebit"},
    "rotated": {"compressor": "rotated"},
    "qsgd": {"compressor": "qsgd"},
    "topk 1 %": {"compressor": {"name": "topk", "density": 0.01, "selection": "sampled"}},
    "dgc 0.1 %": {"compressor": {"name": "dgc", "momentum": 0.0}},
    "powersgd 1": {"compressor": {"name": "powersgd", "rank": 1}},
    "powersgd 4": {"compressor": {"name": "powersgd", "rank": 4}},
}


def make(name: str) -> Callable[[nn.Module], tuple[DistributedDataParallel, Compression | None]]:
    """What wraps a model, by name, or by JSON of the arguments of ``attach``.

    Raises:
        ValueError: there is no such method.
    """
    if name in PYTORCH:
        return PYTORCH[name]  # type: ignore[no-any-return]
    if name in OURS:
        return _ours(OURS[name])  # type: ignore[no-any-return]
    if name.startswith("{"):
        return _ours(json.loads(name))  # type: ignore[no-any-return]
    raise ValueError(
        f"unknown method {name!r}; there are {', '.join([*PYTORCH, *OURS])}, or JSON such as "
        '{"compressor": "topk", "exchange": "split_gather"}'
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD without momentum, of which every method takes the same part."""
    return torch.optim.SGD(model.parameters(), 1e-3)
