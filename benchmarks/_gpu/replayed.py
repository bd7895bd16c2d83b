"""What a step would take if a bucket's whole average were a single launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.engine.compression import Compression
from lightning_compress.engine.optimizers import unwatch


class Replayed:
    """A communication hook that captures the average of each bucket in a CUDA graph, and then launches only the graph.

    Every replay draws the random numbers of the captured step again, and adds the same residual: **for measuring
    alone**. Nothing may travel, because the host would have to start it in the middle; see ``EchoCollective``.

    Args:
        compression: averages.
        ddp: the model for which it averages from now on.
    """

    def __init__(self, compression: Compression, ddp: DistributedDataParallel) -> None:
        self._compression, self._device = compression, compression.device
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, int]] = {}
        self._replays, compression.active = False, True
        compression.at_close(ddp.register_forward_pre_hook(self._before).remove)
        ddp.register_comm_hook(None, self.reduce)

    def _before(self, *_: object) -> None:
        if not self._replays:
            self._compression.before_backward()
            self._compression.before_forward()

    def replay(self) -> None:
        """Capture the next backward pass, and replay it in all later ones; optimizers are not seen any more."""
        self._replays = True
        unwatch(self._compression)

    # DistributedDataParallel inspects the annotations, and rejects strings
    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """Replace a bucket's gradients by their mean.

        Raises:
            RuntimeError: the bucket's memory is not that of the captured step.
        """
        buffer = bucket.buffer()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            if self._replays:
                self._launch(bucket, buffer)
            else:
                self._compression.reduce(bucket.parameters(), bucket.gradients())
            buffer.record_stream(self._stream)
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(buffer)
        return future

    def _launch(self, bucket: Any, buffer: Tensor) -> None:
        number = bucket.index()
        if number not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self._device)
            graph.capture_begin(capture_error_mode="thread_local")
            self._compression.reduce(bucket.parameters(), bucket.gradients())
            graph.capture_end()
            self._graphs[number] = graph, buffer.data_ptr()
        graph, address = self._graphs[number]
        if address != buffer.data_ptr():
            raise RuntimeError("a bucket has moved since it was captured")
        graph.replay()
