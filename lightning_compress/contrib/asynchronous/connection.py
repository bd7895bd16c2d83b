"""Framed messages over one TCP connection, which two threads of two ranks take turns to use."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROTOCOL = 1
"""Version of what ranks say to each other here."""
HELLO, BYE, FAILED = 1, 2, 3
"""Kinds of messages of the connection itself; a user's kinds begin at ``FIRST_KIND``."""
FIRST_KIND = 16
TOKEN = 16
"""Bytes of the secret that a rank's callers have to know."""
TEXT = 500
"""Largest number of bytes of a word of failure."""

_HEADER = struct.Struct("!4sHHqdQ")
"""Magic, version, kind, clock, number, and bytes of the body."""
_MAGIC = b"lc/a"
_MORE = getattr(socket, "MSG_MORE", 0)
HEADER = _HEADER.size
"""Bytes of a message beside its body."""


class Message(NamedTuple):
    """What a rank says.

    Attributes:
        kind: of the message.
        clock: an integer of the sender's, 64 bits.
        number: a number of the sender's.
        body: uint8; the connection's next message overwrites it.
    """

    kind: int
    clock: int
    number: float
    body: Tensor


class BrokenError(ConnectionError):
    """The connection cannot be used any more; says why, after the rank's name: "died: ..."."""


class Connection:
    """One connection. Whoever writes and then reads holds ``lock`` for both.

    Args:
        sock: connected.
        timeout: seconds that one call waits for the other side, or None.
        kinds: the largest body of each kind that may be sent or arrive, in bytes.
    """

    def __init__(self, sock: socket.socket, timeout: float | None, kinds: Mapping[int, int]) -> None:
        sock.settimeout(None)  # blocking, so that one call receives a whole message: the kernel keeps the time
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # to notice a host that vanished
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        duration = struct.pack("ll", int(timeout or 0), int((timeout or 0) % 1 * 1e6))  # 0 is for ever
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, duration)
        self.lock = threading.Lock()
        self._sock, self._timeout = sock, timeout
        self._kinds = {HELLO: TOKEN, BYE: 0, FAILED: TEXT, **kinds}
        self._head, self._room = bytearray(HEADER), torch.empty(0, dtype=torch.uint8)

    def send(self, kind: int, clock: int = 0, number: float = 0.0, parts: Sequence[Tensor] = ()) -> int:
        """Write a message, and return its bytes.

        Args:
            kind: of the message.
            clock: see ``Message``.
            number: see ``Message``.
            parts: contiguous tensors on the CPU that make up the body.

        Raises:
            BrokenError: the other side is gone, or takes nothing in time.
            ValueError: no such kind of message may be sent, or none so long.
        """
        size = sum(each.nbytes for each in parts)
        if size > self._kinds.get(kind, -1):
            raise ValueError(f"a message of kind {kind} has at most {self._kinds.get(kind, 0)} bytes, not {size}")
        try:
            self._sock.sendall(_HEADER.pack(_MAGIC, PROTOCOL, kind, clock, number, size), _MORE if size else 0)
            for each in parts:
                self._sock.sendall(_view(each))
        except OSError as error:
            raise self._broken(error) from error
        return HEADER + size

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
            BrokenError: the other side is gone, says nothing in time, or says what cannot be meant.
        """
        self._fill(memoryview(self._head))
        magic, version, kind, clock, number, size = _HEADER.unpack(self._head)
        if magic != _MAGIC:
            raise BrokenError("speaks another protocol")
        if version != PROTOCOL:
            raise BrokenError(
                f"speaks version {version} of the protocol, this rank version {PROTOCOL}; install the same version of "
                "lightning_compress on all hosts"
            )
        if size > self._kinds.get(kind, -1):
            raise BrokenError(f"sent a message of kind {kind} with {size} bytes, which is none that ranks send")
        if len(self._room) < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        if size:
            self._fill(_view(self._room)[:size])
        return Message(kind, clock, number, self._room[:size])

    def _fill(self, view: memoryview) -> None:
        got = 0
        while got < len(view):
            try:
                more = self._sock.recv_into(view[got:], len(view) - got, socket.MSG_WAITALL)
            except OSError as error:
                raise self._broken(error) from error
            if not more:
                raise BrokenError("died: it closed its connection without a word")
            got += more

    def _broken(self, error: OSError) -> BrokenError:
        if isinstance(error, BlockingIOError):
            return BrokenError(f"does not answer within {self._timeout:g} s: it hangs, or the network is gone")
        return BrokenError(f"died: {error.strerror or error}")

    def close(self) -> None:
        """Wake who waits on it, and close it."""
        with suppress(OSError):  # the other side was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
