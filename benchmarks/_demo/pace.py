"""A link that is played: who sends waits for as long as the bytes would have taken."""

# No `from __future__ import annotations` here: DistributedDataParallel looks at the hook's annotations.

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import Compression
from lightning_compress.collectives import Collective, TorchCollective
from lightning_compress.collectives.collective import Operation
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.engine.hook import Background

__all__ = ["Wire", "pace"]


class Wire:
    """A rank's own link, which carries one thing after the other.

    Attributes:
        bytes_per_s: its speed; None: as fast as it is.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._free = 0.0

    @contextmanager
    def carrying(self, sent: Callable[[], int]) -> Iterator[None]:
        """Make what happens inside last until the bytes that ``sent`` returns in the end have had their time."""
        start = time.perf_counter()
        yield
        if self.bytes_per_s:
            self._free = max(self._free, start) + sent() / self.bytes_per_s
            time.sleep(max(0.0, self._free - time.perf_counter()))


def pace(ddp: DistributedDataParallel, compression: Compression, wire: Wire) -> None:
    """Let all gradients of a model go over ``wire``, whoever averages them; before the first backward.

    Latency is not played, nor are headers: both are small beside the bytes.

    Args:
        ddp: the model.
        compression: of it; where it is off, so that the model averages by itself, a hook does the same on the wire.
        wire: sets the pace.
    """
    if not compression.active:
        ddp.register_comm_hook(None, _PacedMean(wire).reduce)
        return
    counting = compression._collective
    counting._inner = _PacedCollective(counting.uncounted, wire, compression.meter)


class _PacedCollective(Collective):
    """Another one, each call of which takes as long as the bytes that were counted before it take on a wire."""

    def __init__(self, inner: Collective, wire: Wire, meter: Meter) -> None:
        self._inner, self._wire, self._meter, self._seen = inner, wire, meter, meter.bytes_sent
        self.rank, self.size = inner.rank, inner.size

    def _sent(self) -> int:
        last, self._seen = self._seen, self._meter.bytes_sent
        return self._seen - last

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        with self._wire.carrying(self._sent):
            self._inner.all_reduce(tensor, operation)

    def begin_all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Callable[[], object]:
        wait = self._inner.begin_all_reduce(tensor, operation)

        def paced() -> None:
            with self._wire.carrying(self._sent):
                wait()

        return paced

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        with self._wire.carrying(self._sent):
            self._inner.all_gather(tensor, out)

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        with self._wire.carrying(self._sent):
            self._inner.all_to_all(send, receive)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        with self._wire.carrying(self._sent):
            self._inner.swap(sends, receives)

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        return _PacedCollective(self._inner.part(ranks), self._wire, self._meter)


class _PacedMean:
    """DistributedDataParallel's own mean as a hook: in a thread beside backward, as it has several of."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._background = Background()
        self._ranks = TorchCollective().apart()

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """Replace a bucket's gradients by their mean."""
        buffer = bucket.buffer()
        future: Future[Tensor] = Future()
        self._background.submit(lambda: self._mean(buffer), lambda: future.set_result(buffer))
        torch.autograd.Variable._execution_engine.queue_callback(self._background.wait)
        return future

    def _mean(self, buffer: Tensor) -> None:
        with self._wire.carrying(lambda: all_reduce_bytes(buffer.nbytes, self._ranks.size)):
            buffer.div_(self._ranks.size)
            dist.all_reduce(buffer, group=self._ranks.group)
