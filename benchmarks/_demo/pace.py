"""A link that is played: who sends waits for as long as the bytes would have taken."""

# No `from __future__ import annotations` here: DistributedDataParallel looks at the hook's annotations.

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.lab import bits_per_second
from lightning_compress import Compression
from lightning_compress.collectives import Collective, CountingCollective, TorchCollective
from lightning_compress.collectives.collective import Operation, Overlapping, Wait
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.collectives.turns import TurnCollective
from lightning_compress.engine.hook import Background


class Wire:
    """A rank's own link, which carries one thing after the other.

    Attributes:
        bytes_per_s: its speed; None: as fast as it is.
        counted: bytes by the meter of the compression whose messages it carries, when it last began to carry.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._free = 0.0
        self.counted = 0

    def limit(self, rate: str | None) -> None:
        """Carry as ``set_rate`` has a real link send."""
        self.bytes_per_s = bits_per_second(rate) / 8 if rate else None

    def carry(self, size: int) -> Callable[[], None]:
        """Begin to carry so many bytes; return a function that waits until they have arrived."""
        if not self.bytes_per_s:
            return lambda: None
        arrival = self._free = max(self._free, time.perf_counter()) + size / self.bytes_per_s
        return lambda: time.sleep(max(0.0, arrival - time.perf_counter()))


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
    wire.counted = compression.meter.bytes_sent
    for lane in compression.lanes.all:
        counting = lane.world.collective
        assert isinstance(counting, CountingCollective)
        within = counting.uncounted
        outer = within if isinstance(within, TurnCollective) else counting  # others compute while it waits for the wire
        outer._inner = _PacedCollective(outer._inner, wire, compression.meter)


class _PacedCollective(Collective):
    """Another one, each call of which takes as long as the bytes that were counted before it take on a wire."""

    def __init__(self, inner: Collective, wire: Wire, meter: Meter) -> None:
        self._inner, self._wire, self._meter = inner, wire, meter
        self.rank, self.size = inner.rank, inner.size

    def begin(self, name: Overlapping, *arguments: Any) -> Wait:
        last, self._wire.counted = self._wire.counted, self._meter.bytes_sent  # by any lane
        arrive, wait = self._wire.carry(self._wire.counted - last), self._inner.begin(name, *arguments)
        return lambda: (wait(), arrive())

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        self.begin("all_reduce", tensor, operation)()

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        self.begin("all_gather", tensor, out)()

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        self.begin("all_to_all", send, receive)()

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        self.begin("swap", sends, receives)()

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
        arrive = self._wire.carry(all_reduce_bytes(buffer.nbytes, self._ranks.size))
        buffer.div_(self._ranks.size)
        dist.all_reduce(buffer, group=self._ranks.group)
        arrive()
