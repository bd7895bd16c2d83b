"""Layers whose gradients do not travel as factors, though DistributedDataParallel does not average them either."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.backward.sufficient_factors.layers import Layer
from lightning_compress.collectives import Collective
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import reduce_now


def average_ordinary(
    layers: Sequence[Layer],
    ddp: DistributedDataParallel,
    compression: Compression | None,
    collective: Collective,
    device: torch.device,
) -> list[Layer]:
    """Average the gradients of these layers, at the end of backward, as those of other parameters are averaged.

    Args:
        layers: the same on all ranks.
        ddp: says whether some of them may be unused.
        compression: of the other parameters, which averages these too, each layer as a group; or None, or one that is
            off: then float32 is summed here.
        collective: the ranks.
        device: where gradients are.

    Returns:
        Those that were averaged here.
    """
    if layers and (ddp.find_unused_parameters or ddp.static_graph):
        local = [layer.local and any(each.grad is not None for each in layer.parameters) for layer in layers]
        used = torch.tensor(local, dtype=torch.int32, device=device)
        collective.all_reduce_max(used)
        layers = [layer for layer, each in zip(layers, used.tolist(), strict=True) if each]
    waits: list[Callable[[], object]] = []
    for layer in layers:
        layer.local = False
        trained = [each for each in layer.parameters if each.requires_grad]
        for each in trained:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad.contiguous()
        gradients = [each.grad for each in trained if each.grad is not None]
        if compression and compression.active:
            reduce_now(compression, trained, gradients)
            continue
        torch._foreach_div_(gradients, collective.size)
        waits += [collective.begin_all_reduce(each) for each in gradients]
    for wait in waits:
        wait()
    return list(layers) if waits else []
