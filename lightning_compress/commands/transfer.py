"""Send and receive data over TCP connections, and measure what arrives and what TCP sent again."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

SETTLED = 0.4
"""Part of a transfer after which it is measured: connections have found their speed, and a burst has passed."""
FEW = 100
"""Packets below which one that is sent again proves nothing."""
LATE = 3.0
"""Seconds that data may come after the sender should have ended."""
CHUNK = 1 << 18
_INFO = "<100xI52xI8xQQQ"
"""Of Linux's struct tcp_info: total_retrans, data_segs_out, busy_time, rwnd_limited, sndbuf_limited."""


@dataclass(frozen=True)
class Flow:
    """What a transfer measured.

    Args:
        bits_per_s: that arrived.
        resent: part of the packets that TCP sent again.
        held: part of the time in which a socket buffer or the receiver's window kept TCP from sending.
        arrived: bytes, for each connection.
    """

    bits_per_s: float
    resent: float
    held: float
    arrived: tuple[int, ...]

    @property
    def stalled(self) -> bool:
        """True if nothing arrived."""
        return not any(self.arrived)


def send(sockets: Sequence[socket.socket], seconds: float) -> dict[str, Any]:
    """Send as much as possible for some seconds, and return what TCP counted after ``SETTLED``.

    It ends early where the other host has closed all of them. Queued data is discarded at the end, because a slow link
    would take long for it.
    """
    data = memoryview(bytes(CHUNK))
    start = time.monotonic()
    before, measured = [[0] * 5] * len(sockets), False
    with _watching(sockets, selectors.EVENT_WRITE) as watched:
        while watched.get_map() and (passed := time.monotonic() - start) < seconds:
            if passed > SETTLED * seconds and not measured:
                before, measured = [_counted(each) for each in sockets], True
            for ready, _ in watched.select(seconds - passed if measured else SETTLED * seconds - passed):
                try:
                    ready.fileobj.send(data)  # type: ignore[union-attr]
                except BlockingIOError:  # full
                    continue
                except OSError:  # closed by the other host: it would be ready for ever
                    watched.unregister(ready.fileobj)
    after = [_counted(each) for each in sockets]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        each.close()
    again, packets, busy, window, buffer = (
        sum(last) - sum(first) for first, last in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)
    )
    return {"resent": again / max(FEW, packets), "held": (window + buffer) / max(1, busy)}


def receive(sockets: Sequence[socket.socket], seconds: float) -> dict[str, Any]:
    """Receive until the other host ends, and return the rate after ``SETTLED`` and the bytes of each connection."""
    buffer = bytearray(CHUNK)
    arrived = dict.fromkeys(sockets, 0)
    events: list[tuple[float, int]] = []
    total, end = 0, time.monotonic() + seconds + LATE
    with _watching(sockets, selectors.EVENT_READ) as watched:
        while watched.get_map() and (left := end - time.monotonic()) > 0:
            for ready, _ in watched.select(left):
                each: socket.socket = ready.fileobj  # type: ignore[assignment]
                count = 0
                with suppress(OSError):  # the other host discards what it has not sent
                    count = each.recv_into(buffer)
                if not count:
                    watched.unregister(each)
                    continue
                arrived[each] += count
                total += count
                events.append((time.monotonic(), total))
    return {"bits_per_s": _rate(events, seconds), "arrived": list(arrived.values())}


def _rate(events: Sequence[tuple[float, int]], seconds: float) -> float:
    """Return the bits per second from times and totals, after ``SETTLED``; 0 if nothing arrived."""
    if not events:
        return 0.0
    begin = events[0][0]
    late = [event for event in events if event[0] >= begin + SETTLED * seconds]
    if not late:  # it stalled
        return 8 * events[-1][1] / seconds
    (first, before), (_, after) = late[0], late[-1]
    # also the time in which nothing arrived any more
    return 8 * (after - before) / max(late[-1][0] - first, begin + 0.9 * seconds - first)


def _counted(connected: socket.socket) -> list[int]:
    """Return TCP's counters of a connection, in the order of ``_INFO``; zeros if the kernel has them not."""
    size = struct.calcsize(_INFO)
    with suppress(OSError):
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) == size:
            return list(struct.unpack(_INFO, info))
    return [0] * 5


@contextmanager
def _watching(sockets: Sequence[socket.socket], event: int) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as watched:
        for each in sockets:
            each.setblocking(False)
            watched.register(each, event)
        yield watched
