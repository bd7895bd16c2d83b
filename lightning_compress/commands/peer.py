"""Talk to another host over plain TCP, and measure the network between the two.

One host serves: it accepts a control connection and obeys its requests, which are lines of JSON. The other host asks.
Both can send and receive data, over connections that the asking host opens to the same port.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from lightning_compress.commands.host import plain
from lightning_compress.commands.transfer import Flow, receive, send

PROTOCOL = 1
"""Both hosts must have the same."""
ANSWER = 10.0
"""Seconds that a host may take to answer."""
CONNECT = 3.0
"""Seconds that a connection to a port may take."""
SMALLEST = 576
"""Bytes of an IPv4 packet that every network carries. Control messages are no larger."""
SIZES = (SMALLEST, 1200, 1280, 1350, 1400, 1420, 1440, 1450, 1460, 1472, 1480, 1492, 1500, 2000, 4000, 8000, 8950, 9000)
"""Sizes of packets that are tried where full ones do not arrive."""
_TOKEN = 16
"""Bytes that begin each data connection, before its number."""


class PeerError(Exception):
    """The other host cannot be reached, went away, or answers something else."""


class Control:
    """The connection for requests and answers.

    Args:
        connected: a TCP socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(ANSWER)
        self._lines = connected.makefile("rb")
        self.here, self.there = (plain(name()[0]) for name in (connected.getsockname, connected.getpeername))

    def close(self) -> None:
        """Close it."""
        self._lines.close()
        self._socket.close()

    def say(self, **message: Any) -> None:
        """Send a message."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise PeerError(f"{self.there} closed the connection ({reason(error)})") from error

    def hear(self, limit: float = ANSWER) -> dict[str, Any]:
        """Return the next message."""
        self._socket.settimeout(limit)
        try:
            line = self._lines.readline(1 << 20)
        except TimeoutError as error:
            raise PeerError(f"{self.there} did not answer within {limit:g} s") from error
        except OSError as error:
            raise PeerError(f"{self.there} closed the connection ({reason(error)})") from error
        if not line:
            raise PeerError(f"{self.there} closed the connection")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise PeerError(f"{self.there} does not run lightning-compress doctor on this port") from error
        if not isinstance(message, dict):
            raise PeerError(f"{self.there} does not run lightning-compress doctor on this port")
        return message

    def ask(self, what: str, limit: float = ANSWER, **more: Any) -> dict[str, Any]:
        """Send a request, and return its answer."""
        self.say(do=what, **more)
        return self.hear(limit)


class Asking:
    """The host that decides what is measured.

    Args:
        address: of the other host.
        port: where it serves.
        limit: seconds to wait for the other host to serve.

    Raises:
        PeerError: it cannot be reached.
    """

    def __init__(self, address: str, port: int, limit: float) -> None:
        self._address, self._port = address, port
        end = time.monotonic() + limit
        while True:
            try:
                self.control = Control(_connected(address, port, ANSWER, SMALLEST))
                return
            except PeerError as error:  # the other command may be started later
                if not isinstance(error.__cause__, ConnectionRefusedError) or time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def facts(self) -> dict[str, Any]:
        """Return what the other host tells about itself."""
        told = self.control.ask("hello", protocol=PROTOCOL)
        if told.get("protocol") != PROTOCOL:
            raise PeerError(f"{self.control.there} has another version of lightning_compress")
        return told

    def close(self) -> None:
        """Close the connection."""
        self.control.close()

    def round_trip(self, times: int = 20) -> float:
        """Return the seconds of a small message and its answer; the median."""
        took = []
        for _ in range(times):
            start = time.perf_counter()
            self.control.ask("pong")
            took.append(time.perf_counter() - start)
        return sorted(took)[times // 2]

    def connects(self) -> tuple[str, str]:
        """Return why a port that the system chose cannot be reached: from here, and from there; empty if it can."""
        port = self.control.ask("listen")["port"]
        from_here = _tried(self._address, port)
        with _listener(0) as listener:
            answer = self.control.ask("connect", port=listener.getsockname()[1])
        return from_here, answer["error"]

    def transfer(self, outwards: bool, seconds: float, packets: Sequence[int] = (0,)) -> Flow:
        """Send data for some seconds.

        Args:
            outwards: from this host to the other one; else from there to here.
            seconds: how long.
            packets: for each connection, the largest size of its packets in bytes; 0: the interface's MTU.
        """
        token = secrets.token_hex(_TOKEN // 2)
        limit = seconds + ANSWER
        with ExitStack() as opened:
            sockets = []
            for number, size in enumerate(packets):
                each = _connected(self._address, self._port, CONNECT, size)
                sockets.append(opened.enter_context(each))
                each.sendall(f"{token}{number:04}".encode())
            self.control.say(do="transfer", token=token, count=len(packets), seconds=seconds, sends=not outwards)
            if outwards:
                sent = send(sockets, seconds)
                received = self.control.hear(limit)
            else:
                received = receive(sockets, seconds)
                sent = self.control.hear(limit)
        return Flow(received["bits_per_s"], sent["resent"], sent["held"], tuple(received["arrived"]))

    def largest_packet(self, outwards: bool, seconds: float, below: int) -> int:
        """Return the bytes of the largest packet that arrives, among ``SIZES``; 0 if none does.

        Args:
            outwards: from this host to the other one.
            seconds: how long each size is tried, all at once.
            below: bytes of packets that do not arrive.
        """
        sizes = [size for size in SIZES if size < below]
        arrived = self.transfer(outwards, seconds, sizes).arrived
        return max((size for size, count in zip(sizes, arrived, strict=True) if count), default=0)


class Serving:
    """The host that waits for the other one and obeys it.

    Args:
        port: where it listens.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int) -> None:
        self._listener = _listener(port)
        self._spare: socket.socket | None = None
        self.control: Control

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
        if self._spare:
            self._spare.close()
        if hasattr(self, "control"):
            self.control.close()

    def wait(self, limit: float) -> None:
        """Accept the control connection; others, such as of a port scanner, are closed.

        Raises:
            PeerError: nobody came within ``limit`` seconds.
        """
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0:
            self._listener.settimeout(left)
            with suppress(TimeoutError):
                control = Control(self._listener.accept()[0])
                with suppress(PeerError):
                    if control.hear(min(left, CONNECT)).get("protocol") == PROTOCOL:
                        self.control = control
                        return
                    control.say(protocol=PROTOCOL)
                control.close()
        raise PeerError(f"no other host came within {limit:g} s")

    def obey(self, facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Answer requests until the other host sends its report, and return that.

        Args:
            facts: returns what this host tells about itself.
        """
        work: dict[str, Callable[..., dict[str, Any]]] = {
            "listen": self._listen, "connect": self._connect, "transfer": self._transfer
        }  # fmt: skip
        self.control.say(protocol=PROTOCOL, **facts())
        while True:
            asked = self.control.hear(3 * ANSWER)
            kind = asked.pop("do", "")
            if kind == "report":
                self.control.say()
                return asked
            self.control.say(**(work[kind](**asked) if kind in work else {}))

    def _listen(self) -> dict[str, Any]:
        self._spare = self._spare or _listener(0)  # connections need no accept() to be made
        return {"port": self._spare.getsockname()[1]}

    def _connect(self, port: int) -> dict[str, Any]:
        return {"error": _tried(self.control.there, port)}

    def _transfer(self, token: str, count: int, seconds: float, sends: bool) -> dict[str, Any]:
        found: dict[int, socket.socket] = {}
        with ExitStack() as opened:
            self._listener.settimeout(CONNECT)
            try:
                while len(found) < count:
                    each = opened.enter_context(self._listener.accept()[0])
                    each.settimeout(CONNECT)
                    said = each.recv(_TOKEN + 4, socket.MSG_WAITALL).decode(errors="replace")
                    if said[:_TOKEN] == token:
                        found[int(said[_TOKEN:])] = each
            except OSError as error:
                raise PeerError(f"the data connections of {self.control.there} did not arrive") from error
            return (send if sends else receive)([found[number] for number in range(count)], seconds)


def _connected(address: str, port: int, limit: float, packet: int = 0) -> socket.socket:
    """Return a socket that is connected to a port, and sends and receives no packets above a size.

    Raises:
        PeerError: it cannot be.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(*found[:3])
        try:
            made.settimeout(limit)
            if packet:
                header = 60 if found[0] == socket.AF_INET6 else 40
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packet - header)
            made.connect(found[4])
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise PeerError(f"{address} cannot be reached at port {port}: {reason(error)}") from error
    return made


def _tried(address: str, port: int) -> str:
    """Return why a port cannot be connected to, empty if it can."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT):
            return ""
    except OSError as error:
        return reason(error)


def _listener(port: int) -> socket.socket:
    """Return a socket that listens on a port, for IPv6 too if this host has it."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
    return socket.create_server(("", port), backlog=64)


def reason(error: OSError) -> str:
    """Return what went wrong in a few words."""
    if isinstance(error, TimeoutError):
        return "it did not answer"
    return (error.strerror or str(error)).lower()
