"""One rank that does the work of one of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_compress.collectives import Collective
from lightning_compress.collectives.collective import Operation
from lightning_compress.engine.attach import compression_of
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import register
from lightning_compress.settings.run_state import RunState


class EchoCollective(Collective):
    """Pretends to be rank 0 of many: **nothing travels**, and every rank is taken to have this rank's own numbers.

    A benchmark on one GPU has nobody to talk to, and on one rank no compression is registered at all. With this in
    place of a process group a step does all that it does on one of ``size`` ranks (encode, decode ``size`` messages),
    and copies what an all-gather would write; the time of a link is not in it. For measuring alone: models that are
    trained so are those of one rank.

    Args:
        size: how many ranks there would be.
    """

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Sum, or maximise, ``size`` equal tensors."""
        if operation == "sum":
            tensor.mul_(self.size)

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """This rank's, in every row."""
        _wide(out).copy_(_wide(tensor).expand(self.size, -1))

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """What this rank sends to the next one, in every row: what it sends to itself may never have been encoded."""
        _wide(receive).copy_(_wide(send[int(self.size > 1)]).expand(self.size, -1))

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """A peer sends what it is sent.

        Raises:
            ValueError: it is sent nothing, or something of another length.
        """
        for peer, tensor in receives.items():
            if peer not in sends or sends[peer].shape != tensor.shape:
                raise ValueError(f"rank {peer} would send {tuple(tensor.shape)}, which is not what it is sent")
            tensor.copy_(sends[peer])

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """As many as this rank's part has."""
        return EchoCollective(next(len(part) for part in ranks if 0 in part))


def _wide(message: Tensor) -> Tensor:
    """Bytes as words of 8, which are copied faster, where there are no others."""
    whole = message.dtype == torch.uint8 and message.shape[-1] % 8 == 0 and message.is_contiguous()
    return message.view(torch.int64) if whole else message


def compress(
    ddp: DistributedDataParallel, settings: RunState, collective: Collective, optimizer: Optimizer
) -> Compression:
    """Let a model's gradients go through the hook, also where ``attach`` would leave them to DDP; nothing is sampled.

    Args:
        ddp: the model.
        settings: of the compression.
        collective: the ranks, or one that pretends to be of so many.
        optimizer: the model's.
    """
    compression = compression_of(ddp, settings, collective)
    compression.meter.sample_every = 0
    register(compression, ddp)
    compression.stepped_by([optimizer])
    return compression


def device_of(name: str) -> torch.device:
    """The current device of this kind."""
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
