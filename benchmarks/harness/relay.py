"""A delay for the lab: takes frames from TAP devices, and puts each into another one a while later.

    python -m benchmarks.harness.relay 0.005 tap0 tap1    # in a namespace; makes the devices, which go when it ends

Frames are as large as the kernel hands them over, up to 64 KiB of TCP to be segmented later, so that a gigabit takes
two thousand of them a second. The first one from an address tells where it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PACKET_INFO, VNET_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUMS, TCP4, TCP6 = 0x01, 0x02, 0x04
HEADER = 10
"""Bytes before a frame: what is to be done about its checksum and segments, which is handed on as it is."""
LARGEST = HEADER + 14 + 65536
BATCH = 32
"""Frames taken from a device before the others' turn."""
READY = "ready"


def device(name: str) -> int:
    """Make a TAP device; returns what to read it from."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_PACKET_INFO | VNET_HEADER))
    fcntl.ioctl(tap, TUNSETOFFLOAD, CHECKSUMS | TCP4 | TCP6)
    return tap


class Relay:
    """Forwards between devices.

    Args:
        taps: what they are read from.
        delay: seconds from taking a frame to handing it on.
    """

    def __init__(self, taps: list[int], delay: float) -> None:
        self._taps, self._delay = taps, delay
        self._places: dict[bytes, int] = {}
        self._waiting: deque[tuple[float, int, bytes]] = deque()

    def run(self) -> None:
        """For ever."""
        while True:
            left = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for tap in select.select(self._taps, (), (), left)[0]:
                self._take(tap)
            self._hand_on()

    def _take(self, tap: int) -> None:
        for _ in range(BATCH):
            try:
                frame = os.read(tap, LARGEST)
            except BlockingIOError:
                return
            self._places[frame[HEADER + 6 : HEADER + 12]] = tap
            self._waiting.append((time.monotonic() + self._delay, tap, frame))

    def _hand_on(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, source, frame = self._waiting.popleft()
            known = self._places.get(frame[HEADER : HEADER + 6])
            for tap in self._taps if known is None else (known,):
                if tap != source:
                    with contextlib.suppress(OSError):  # a link that is full, or not up yet, loses the frame
                        os.write(tap, frame)


def main(delay: float, names: list[str]) -> None:
    """Make the devices, say so, and forward."""
    relay = Relay([device(name) for name in names], delay)
    with contextlib.suppress(PermissionError):  # before the ranks, which compute on all cores
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print(READY, flush=True)
    relay.run()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
