"""What a step would take if a bucket's whole average were a single launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import StreamHook
from lightning_compress.engine.optimizers import unwatch


class Replayed:
    """Stands for a compression: captures the average of each bucket in a CUDA graph, and then launches only the graph.

    Every replay draws the random numbers of the captured step again, and adds the same residual: **for measuring
    alone**. Nothing may travel, because the host would have to start it in the middle; see ``EchoCollective``.

    Args:
        compression: averages.
        ddp: the model for which it averages from now on.
    """

    def __init__(self, compression: Compression, ddp: DistributedDataParallel) -> None:
        self._compression, self.device, self.names = compression, compression.device, compression.names
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
        self._replays, compression.active = False, True
        compression.closing.callback(ddp.register_forward_pre_hook(self._before).remove)
        ddp.register_comm_hook(None, StreamHook(cast(Compression, self)).reduce)

    def _before(self, *_: object) -> None:
        if not self._replays:
            self._compression.before_backward()
            self._compression.compare_ranks()

    def replay(self) -> None:
        """Capture the next backward pass, and replay it in all later ones; optimizers are not seen any more."""
        self._replays = True
        unwatch(self._compression)

    def reduce(self, names: tuple[str, ...], gradients: Sequence[Tensor]) -> None:
        """Replace a bucket's gradients by their mean.

        Raises:
            RuntimeError: the bucket's memory is not that of the captured step.
        """
        if not self._replays:
            self._compression.reduce(names, gradients)
            return
        bucket, address = names[0], gradients[0].data_ptr()
        if bucket not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self.device)
            graph.capture_begin(capture_error_mode="thread_local")
            self._compression.reduce(names, gradients)
            graph.capture_end()
            self._graphs[bucket] = graph, address
        graph, captured = self._graphs[bucket]
        if captured != address:
            raise RuntimeError("a bucket has moved since it was captured")
        graph.replay()
