"""What averages gradients in the lab: ours, and what PyTorch brings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._local import LOCAL, Alone, Local
from benchmarks._network.hooks import PYTORCH
from lightning_compress import Compression, attach
from lightning_compress.backward import sufficient_factors
from lightning_compress.engine.attach import own_bucket_cap_mb
from lightning_compress.settings.run_state import RunState

LINK = {"latency_s": 1e-4, "bytes_per_s": 1.25e8}
"""What ``auto`` is told, so that a method goes the same way whatever the machine does: 1 Gbit/s."""


def _ours(arguments: dict[str, Any]) -> Any:
    def make(module: nn.Module) -> tuple[DistributedDataParallel, Compression]:
        model = DistributedDataParallel(module, bucket_cap_mb=own_bucket_cap_mb(dist.get_world_size()))
        return model, attach(model, **arguments)

    return make


def _factors(dtype: Literal["float32", "bfloat16"], rest: str = "none") -> Any:
    def make(module: nn.Module) -> tuple[DistributedDataParallel, Compression]:
        handle = sufficient_factors.enable(module, sufficient_factors.FactorSettings(dtype=dtype, link=LINK))
        model = DistributedDataParallel(module)
        compression = attach(model, rest)
        if handle is not None:
            handle.begin(model, compression)
            compression.closing.callback(handle.close)
        return model, compression

    return make


OURS: dict[str, dict[str, Any]] = {
    "bf16": {"compressor": "bf16"},
    "onebit": {"compressor": "onebit"},
    "rotated": {"compressor": "rotated"},
    "qsgd": {"compressor": "qsgd"},
    "range_float": {"compressor": "range_float"},
    "fft": {"compressor": "fft"},
    "topk 1 %": {"compressor": {"name": "topk", "density": 0.01}},
    "dgc 0.1 %": {"compressor": {"name": "dgc", "momentum": 0.0}, "schedule": "none"},
    "powersgd 1": {"compressor": {"name": "powersgd", "rank": 1}},
    "powersgd 4": {"compressor": {"name": "powersgd", "rank": 4}},
}


FACTORS: dict[str, Any] = {
    "factors": _factors("float32"),
    "factors bf16": _factors("bfloat16", "bf16"),
}
"""Sufficient factors of the linear layers that pay: without loss, the rest by DDP; and all of it in 16 bits."""

LATE = ("bf16", "rotated", "onebit", "topk 1 %")
"""Methods that are compared with themselves one step later."""

SETS: dict[str, dict[str, dict[str, Any]]] = {
    "2_bits": {
        "fft, 2 bits": {"compressor": {"name": "fft", "theta": 0.85, "bits": 10}},
        "qsgd, 2 bits": {"compressor": {"name": "qsgd", "bits": 2, "bucket": 1024}},
        "terngrad, 2 bits": {"compressor": "terngrad"},
        "topk, 2 bits": {"compressor": {"name": "topk", "density": 2 / 64}},
    },
    "4_bits": {
        "fft, 4 bits": {"compressor": {"name": "fft", "theta": 0.65, "bits": 10}},
        "qsgd, 4 bits": {"compressor": {"name": "qsgd", "bits": 4, "bucket": 512}},
        "topk, 4 bits": {"compressor": {"name": "topk", "density": 4 / 64}},
    },
    "papers": {
        "fft, paper": {"compressor": {"name": "fft", "theta": 0.85, "bits": 10}, "error_feedback": False},
        "qsgd, paper": {"compressor": {"name": "qsgd", "bits": 4, "bucket": 512}},
        "terngrad, paper": {"compressor": "terngrad"},
        "topk, paper": {"compressor": {"name": "topk", "density": 0.15}},
    },
    "delay": {
        "float32 delay 1": {"compressor": "none", "delay": 1},
        **{name + more: OURS[name] | late for name in LATE for more, late in (("", {}), (" delay 1", {"delay": 1}))},
    },
}
"""At equal bits of a message per element, and as the FFT paper seems to have run them (theta 0.85 for both sparsifiers,
floats of 10 bits, QSGD with 4 bits in buckets of 512): Wang et al., HPDC 2020. TernGrad has no setting with 4 bits. And
averages that are applied in the same step, or one step later."""


ALONE = "alone"
"""The bound of local steps: nothing is averaged, and ranks do not even meet between two steps."""
UNWRAPPED = {ALONE, *LOCAL}
BESIDE_LOCAL = [ALONE, "PyTorch PowerSGD 4", "bf16", "rotated", "powersgd 4", *LOCAL]
"""What ``--set local`` compares beside PyTorch's: local steps, and the best of what talks in every step."""


def settings(name: str) -> dict[str, Any] | None:
    """Arguments of ``attach`` for a method of ours, by name or as JSON of them; None: it is none of ``attach``.

    Raises:
        ValueError: there is no such method, or it has no such setting.
    """
    known = OURS | {label: each for members in SETS.values() for label, each in members.items()}
    if name in PYTORCH or name in FACTORS or name in UNWRAPPED:
        return None
    found = known[name] if name in known else _read(name) if name.startswith("{") else None
    if found is not None:  # the method that is asked for, also where float32 would be faster
        return {"exchange": {"name": "auto", "fallback": "never", "link": LINK}} | found
    raise ValueError(
        f"unknown method {name!r}; there are {', '.join([*PYTORCH, *FACTORS, *LOCAL, *known])}, or JSON such as "
        '{"compressor": "topk", "exchange": "split_gather"}'
    )


def delayed(name: str) -> bool:
    """Whether a method's averages travel while the next step computes."""
    return bool((settings(name) or {}).get("delay"))


def _read(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
        RunState.of(**found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{text} is no JSON of attach()'s arguments: {error}") from error
    return found


def local(name: str, module: nn.Module) -> Local | Alone | None:
    """The local steps of a method that leaves the model unwrapped; None: it is none."""
    if name == ALONE:
        return Alone()
    if name not in LOCAL:
        return None
    exchange = {"name": "auto", "fallback": "never", "link": LINK}
    return Local(module, LOCAL[name], exchange=exchange)


def make(name: str) -> Callable[[nn.Module], tuple[nn.Module, Compression | None]]:
    """What wraps a model, by name, or by JSON of the arguments of ``attach``.

    Raises:
        ValueError: there is no such method.
    """
    given = settings(name)
    if name in UNWRAPPED:
        return lambda module: (module, None)
    found: Callable[[nn.Module], tuple[nn.Module, Compression | None]]
    found = (PYTORCH | FACTORS)[name] if given is None else _ours(given)
    return found


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD without momentum, of which every method takes the same part."""
    return torch.optim.SGD(model.parameters(), 1e-3)
