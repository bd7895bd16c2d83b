"""Methods by the package's own code: ``attach``, and local steps."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._local import Local
from benchmarks._network.methods import LINK
from benchmarks._target.averaging import Averaging, MakeOptimizer
from lightning_compress.engine.attach import attach, own_bucket_cap_mb

EXCHANGE: dict[str, Any] = {"exchange": {"name": "auto", "fallback": "never", "link": LINK}}
"""As in ``benchmarks.network``: a method exchanges the same way in training and on every link, so that steps of one and
milliseconds of the other belong together."""


def build(settings: dict[str, Any], module: nn.Module, optimizer: MakeOptimizer) -> Averaging:
    """Attach to a module, or train it by local steps; collective.

    Args:
        settings: arguments of ``attach``; with ``rounds``, of ``Local``.
        module: returns the loss of a batch.
        optimizer: makes one.
    """
    logging.getLogger("lightning_compress").setLevel(logging.ERROR)  # which method costs what, the table says
    if "rounds" in settings:
        local = Local(module, settings, **EXCHANGE)

        def close() -> None:
            local.finish()
            local.close()

        return Averaging(module, optimizer(module.parameters()), local.every, local.after, close)
    model = DistributedDataParallel(module, bucket_cap_mb=own_bucket_cap_mb(dist.get_world_size()))
    own = settings["compressor"] == "onebit_adam"  # it is Adam itself
    stepper = optimizer(module.parameters(), **({"kind": torch.optim.SGD} if own else {}))
    handle = attach(model, optimizer=stepper, **(EXCHANGE | settings))
    return Averaging(model, stepper, close=handle.close, handle=handle)
