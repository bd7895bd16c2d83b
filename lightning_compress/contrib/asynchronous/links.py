"""Questions between two ranks that wait for nobody else: one asks, and a thread of the other answers.

There is one TCP connection for each ordered pair of neighbours, opened by the one that asks. On it questions and
answers take turns, so that no two threads read one socket, and a question needs no name.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_compress.collectives import consensus
from lightning_compress.collectives.collective import Collective
from lightning_compress.contrib.asynchronous.connection import (
    BYE,
    FAILED,
    FIRST_KIND,
    HEADER,
    HELLO,
    TEXT,
    TOKEN,
    BrokenError,
    Connection,
    Message,
)

__all__ = ["FIRST_KIND", "HEADER", "Answer", "GoneError", "Links", "Message", "Reply"]

START = 30.0
"""Seconds in which all neighbours have to be connected."""
_GOODBYE, _WORD = 5.0, 0.5
"""Seconds to wait for the neighbours' goodbyes, and for the word of one that has closed its connections."""
_ENTRY = struct.Struct("!B16sH16s")
"""Version of the internet protocol, address, port and token."""
_SIOCGIFADDR = 0x8915


class Reply(NamedTuple):
    """An answer; see ``Connection.send``."""

    kind: int
    clock: int = 0
    number: float = 0.0
    parts: Sequence[Tensor] = ()


Answer = Callable[[int, Message], Reply]
"""Gets the rank that asks and its question. Called in a thread for each neighbour, without gradients."""


class GoneError(RuntimeError):
    """A rank is not there any more, or has failed.

    Attributes:
        rank: which one.
        why: what became of it, to be read after its name: "died: ...".
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank, self.why = rank, why


class Links:
    """Connections with some ranks. Making them is a collective call.

    A neighbour that dies is noticed when its connections close, and told on to the other neighbours when this rank
    closes its links with the failure.

    Args:
        ranks: all of them.
        peers: this rank's neighbours; each has this rank among its own.
        answer: see ``Answer``; an error that it raises is the end of this rank's links.
        kinds: of messages, from ``FIRST_KIND`` on, and the bytes that a body of each has at most. All else is refused.
        timeout: seconds in which a question has to be answered.
        device: of the tensors that ``ranks`` exchanges.

    Raises:
        ValueError: on every rank, if one of them cannot reach a neighbour.
    """

    def __init__(
        self,
        ranks: Collective,
        peers: Sequence[int],
        answer: Answer,
        kinds: Mapping[int, int],
        timeout: float,
        device: torch.device,
    ) -> None:
        self.rank, self.peers = ranks.rank, sorted(peers)
        self._asked, self._answered = Counter[int](), Counter[int]()  # one thread writes each
        self._answer, self._kinds, self._timeout = answer, dict(kinds), timeout
        self._lost: dict[int, str] = {}
        self._left: set[int] = set()
        self._changed, self._closing = threading.Condition(), False
        self._calls: dict[int, Connection] = {}
        self._served: dict[int, Connection] = {}
        server, token, problem = None, secrets.token_bytes(TOKEN), None
        try:
            server = _listen(ranks.size)
        except OSError as error:
            problem = ValueError(str(error))
        consensus.check({}, problem, ranks, device, "")
        assert server is not None
        entry = torch.tensor(list(_entry(server, token)), dtype=torch.uint8, device=device)
        table = [bytes(row) for row in consensus.gathered(entry, ranks).tolist()]
        try:
            with server:
                self._connect(server, table)
        except BrokenError as error:
            problem = ValueError(str(error))
        try:
            consensus.check({}, problem, ranks, device, "")
        except ValueError:
            self._drop()
            raise
        for peer, connection in self._served.items():
            name = f"lightning_compress answers {peer}"
            threading.Thread(target=self._serve, args=(peer, connection), name=name, daemon=True).start()

    def _connect(self, server: socket.socket, table: Sequence[bytes]) -> None:
        """Call all neighbours, and be called by them."""
        tokens = [row[-TOKEN:] for row in table]
        missing, refused, end = set(self.peers), list[str](), time.monotonic() + START
        accepting = threading.Thread(target=self._accept, args=(server, tokens, missing, refused, end), daemon=True)
        accepting.start()
        for peer in self.peers:
            self._call(peer, *_read_entry(table[peer]), tokens[self.rank])
        accepting.join()
        if missing:
            whom, said = ", ".join(map(str, sorted(missing))), f" ({refused[0]})" if refused else ""
            raise BrokenError(f"rank {self.rank} was not called by rank {whom} within {START:g} s{said}")

    def _call(self, peer: int, host: str, port: int, theirs: bytes, own: bytes) -> None:
        try:
            sock = socket.create_connection((host, port), timeout=START)
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
            raise BrokenError(
                f"rank {self.rank} cannot connect to rank {peer} at {host}, port {port}: {why}; ranks talk directly, "
                "over ports that the system chooses: open them in the firewall between the hosts, and set "
                "GLOO_SOCKET_IFNAME to the network interface between them"
            ) from error
        call = self._calls[peer] = Connection(sock, self._timeout, self._kinds)
        try:
            call.send(HELLO, self.rank, parts=[_bytes(theirs)])
            if (hello := call.receive()).kind != HELLO or _text(hello.body) != own:
                raise BrokenError("is no rank of this run")
        except BrokenError as error:
            raise BrokenError(
                f"what rank {self.rank} found at {host}, port {port}, where rank {peer} listens, {error}"
            ) from error

    def _accept(
        self, server: socket.socket, tokens: Sequence[bytes], missing: set[int], refused: list[str], end: float
    ) -> None:
        """Take the calls of all neighbours, and no others."""
        while missing and (left := end - time.monotonic()) > 0:
            try:
                server.settimeout(left)
                sock, address = server.accept()
            except OSError:  # the time is up, or the server was closed
                return
            connection = Connection(sock, _GOODBYE, {})
            try:
                hello = connection.receive()
                if hello.kind != HELLO or _text(hello.body) != tokens[self.rank] or hello.clock not in missing:
                    raise BrokenError("is no rank of this run")
                connection.send(HELLO, self.rank, parts=[_bytes(tokens[hello.clock])])
            except BrokenError as error:
                refused.append(f"{address[0]} called, which {error}")
                with suppress(BrokenError):  # which tells a caller of another version what is wrong
                    connection.send(HELLO)
                connection.close()
                continue
            self._served[hello.clock] = Connection(sock, None, self._kinds)
            missing.discard(hello.clock)

    def _serve(self, peer: int, connection: Connection) -> None:
        """Answer a neighbour until it leaves."""
        try:
            with torch.no_grad():
                while (message := connection.receive()).kind != BYE:
                    if message.kind == FAILED:
                        raise GoneError(message.clock, _text(message.body).decode(errors="replace"))
                    sent = connection.send(*self._answer(peer, message))
                    self._answered[peer] += sent
            with self._changed:
                self._left.add(peer)
                self._changed.notify_all()
            return
        except GoneError as error:
            gone = error
        except BrokenError as error:
            gone = GoneError(peer, str(error))
        except Exception as error:
            gone = GoneError(self.rank, f"failed: {type(error).__name__}: {error}")
        if gone.rank in self._left:  # which this rank knows, but not that the neighbour cannot go on without it
            gone = GoneError(peer, f"failed: {gone}")
        self._lose(gone.rank, gone.why)
        with suppress(BrokenError):  # in place of the answer, which the neighbour may wait for
            connection.send(FAILED, gone.rank, parts=_word(gone))
        connection.close()

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            if not self._closing and rank not in self._left:
                self._lost.setdefault(rank, why)
            self._changed.notify_all()

    def ask(self, peer: int, kind: int, clock: int = 0, number: float = 0.0, parts: Sequence[Tensor] = ()) -> Message:
        """Send a question, and wait for its answer; see ``Connection.send``.

        Raises:
            GoneError: some rank is gone.
        """
        self.check()
        call = self._calls[peer]
        with call.lock:
            try:
                sent = call.send(kind, clock, number, parts)
                self._asked[peer] += sent
                if (reply := call.receive()).kind != FAILED:
                    return reply
                self._lose(reply.clock, _text(reply.body).decode(errors="replace"))
            except BrokenError as error:
                with self._changed:  # it may have said on its own connection what has failed, or goodbye
                    self._changed.wait_for(lambda: self._lost or peer in self._left, _WORD)
                self._lose(peer, str(error))
        self.check()
        raise GoneError(peer, "has left")

    def check(self) -> None:
        """Do nothing as long as all is well.

        Raises:
            GoneError: a rank is gone: the first one that was noticed.
        """
        for rank, why in list(self._lost.items()):
            raise GoneError(rank, why)

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that were sent to each neighbour, questions and answers."""
        return dict(self._asked + self._answered)

    @property
    def left(self) -> set[int]:
        """Neighbours that have said goodbye."""
        return set(self._left)

    def close(self, failure: Exception | None = None) -> None:
        """Say goodbye to the neighbours and wait for theirs, or tell them what has failed and wait for nobody.

        Args:
            failure: why this rank stops; where it is ``GoneError``, neighbours are told of that rank.
        """
        with self._changed:
            self._closing = True
        gone = failure if isinstance(failure, GoneError) else GoneError(self.rank, f"failed: {failure}")
        for call in self._calls.values():
            # one that is held has written half a question, and a word now would be read as the other half
            if call.lock.acquire(timeout=0.5):
                with suppress(BrokenError):
                    call.send(BYE) if failure is None else call.send(FAILED, gone.rank, parts=_word(gone))
                call.lock.release()
        if failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._left | self._lost.keys() >= set(self.peers), _GOODBYE)
        self._drop()

    def _drop(self) -> None:
        for connection in [*self._calls.values(), *self._served.values()]:
            connection.close()


def _word(gone: GoneError) -> list[Tensor]:
    return [_bytes(gone.why.encode()[:TEXT])]


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _text(body: Tensor) -> bytes:
    return bytes(body.tolist())


def _listen(backlog: int) -> socket.socket:
    """Listen on the address of the interface that the ranks' group uses.

    Raises:
        OSError: GLOO_SOCKET_IFNAME names none, or the master's name is not known here.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    family, kind, _, _, master = socket.getaddrinfo(
        os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(master)  # sends nothing, but chooses the interface
        host = _address_of(name) if name and sys.platform == "linux" else probe.getsockname()[0].partition("%")[0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def _address_of(name: str) -> str:
    """Return the IPv4 address of a network interface."""
    import fcntl  # which Windows lacks

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise OSError(
                f"GLOO_SOCKET_IFNAME={name}: this host has no network interface of that name with an IPv4 address"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _entry(server: socket.socket, token: bytes) -> bytes:
    """Return what the other ranks have to know of this one."""
    address = ipaddress.ip_address(server.getsockname()[0])
    return _ENTRY.pack(address.version, address.packed.ljust(16, b"\0"), server.getsockname()[1], token)


def _read_entry(entry: bytes) -> tuple[str, int, bytes]:
    """Return address, port and token of a rank."""
    version, packed, port, token = _ENTRY.unpack(entry)
    return str(ipaddress.ip_address(packed[: 4 if version == 4 else 16])), port, token
