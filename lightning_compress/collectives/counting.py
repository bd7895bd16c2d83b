"""Counts what a rank sends; methods never report their own traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from lightning_compress.collectives.base import Collective
from lightning_compress.core.meter import Meter


class CountingCollective(Collective):
    """Another collective, with its bytes and time in a meter.

    Sent by a rank of W for n bytes: all-reduce ``2 (W - 1) n / W``, all-gather ``(W - 1) n``, all-to-all the rows that
    go to others, swap what it sends.
    """

    def __init__(self, inner: Collective, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self.rank = inner.rank
        self.size = inner.size

    @property
    def uncounted(self) -> Collective:
        """What is inside."""
        return self._inner

    def all_reduce(self, tensor: Tensor) -> None:
        """Count a bandwidth-optimal all-reduce."""
        self._meter.bytes_sent += all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size)
        with self._meter.span("exchange"):
            self._inner.all_reduce(tensor)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], object]:
        """Count the bytes when it begins; its time is the time spent waiting for it."""
        return self._begin(tensor, self._inner.begin_all_reduce)

    def begin_all_reduce_max(self, tensor: Tensor) -> Callable[[], object]:
        """Likewise."""
        return self._begin(tensor, self._inner.begin_all_reduce_max)

    def _begin(self, tensor: Tensor, begin: Callable[[Tensor], Callable[[], object]]) -> Callable[[], None]:
        self._meter.bytes_sent += all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size)
        wait = begin(tensor)

        def timed() -> None:
            with self._meter.span("exchange"):
                wait()

        return timed

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Count it as an all-reduce."""
        self._meter.bytes_sent += all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size)
        with self._meter.span("exchange"):
            self._inner.all_reduce_max(tensor)

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Count a message to every other rank."""
        self._meter.bytes_sent += (self.size - 1) * tensor.numel() * tensor.element_size()
        with self._meter.span("exchange"):
            self._inner.all_gather(tensor, out)

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """Count the rows for other ranks."""
        self._meter.bytes_sent += (self.size - 1) * send[0].numel() * send.element_size()
        with self._meter.span("exchange"):
            self._inner.all_to_all(send, receive)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Count what goes out."""
        self._meter.bytes_sent += sum(tensor.numel() * tensor.element_size() for tensor in sends.values())
        with self._meter.span("exchange"):
            self._inner.swap(sends, receives)

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """Count in the same meter."""
        return CountingCollective(self._inner.part(ranks), self._meter)


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that one of ``ranks`` sends in an all-reduce of ``size`` bytes."""
    return round(2 * (ranks - 1) / ranks * size)


def all_reduce_rounds(ranks: int) -> int:
    """Messages that wait for one another in an all-reduce that halves distances, then doubles them."""
    return 2 * all_gather_rounds(ranks)


def all_gather_rounds(ranks: int) -> int:
    """Messages that wait for one another in an all-gather that doubles what every rank has."""
    return (ranks - 1).bit_length()


def all_to_all_rounds(ranks: int) -> int:
    """Messages that a rank sends one after the other in an all-to-all, one to each peer."""
    return ranks - 1
