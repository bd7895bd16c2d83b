"""What a host has: its interfaces, the address that its name stands for, kernels, and versions."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import socket
import struct
import threading
import warnings
from array import array
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

INTERFACES = Path("/sys/class/net")
PACKAGES = ("torch", "lightning", "lightning-compress", "numba", "numpy", "triton")
LOOKUP = 10.0
"""Seconds after which a host that cannot resolve its own name counts as having none."""
_SIOCGIFCONF, _IFREQ, _MOST = 0x8912, 40, 256
"""The call that lists IPv4 addresses, the bytes of each entry, and the most entries."""


@dataclass(frozen=True)
class Route:
    """How a host reaches its peer.

    Args:
        address: of this host, as the peer sees it.
        interface: that has this address; empty if it was not found.
        mtu: of the interface, in bytes; 0 if unknown.
        gbit: speed that the network card negotiated, in Gbit/s; 0 for virtual interfaces, which have none.
        wireless: the interface is Wi-Fi.
    """

    address: str
    interface: str
    mtu: int = 0
    gbit: float = 0.0
    wireless: bool = False

    @classmethod
    def of(cls, address: str, interfaces: dict[str, str]) -> Route:
        """Return the route that starts at one of this host's addresses."""
        interface = interfaces.get(address, "")
        folder = INTERFACES / interface
        if not interface or not folder.exists():
            return cls(address, interface)
        real = (folder / "device").exists()  # a veth claims 10 Gbit/s
        megabits = max(0.0, _number(folder / "speed")) if real else 0.0
        wireless = (folder / "wireless").exists() or (folder / "phy80211").exists()
        return cls(address, interface, int(_number(folder / "mtu")), megabits / 1e3, wireless)

    @property
    def loopback(self) -> bool:
        """True if the peer is on the same host."""
        return _is_loopback(self.address)


@dataclass(frozen=True)
class Crowd:
    """How long a codec takes in one process, and in several at once.

    Args:
        ranks: processes at once; 1: not measured.
        cores: CPU cores that this host allows them.
        threads: of each process.
        alone_ms: milliseconds to encode and decode in one process while the others wait.
        together_ms: the same for the slowest process when all of them run.
    """

    ranks: int = 1
    cores: int = 1
    threads: int = 1
    alone_ms: float = 0.0
    together_ms: float = 0.0


@dataclass(frozen=True)
class Host:
    """Facts about a host.

    Args:
        name: its host name.
        resolves_to: the address that Gloo takes for this name; empty if there is none.
        interfaces: the interface of each of its addresses.
        gloo: the value of GLOO_SOCKET_IFNAME, empty if it is not set.
        nccl: the value of NCCL_SOCKET_IFNAME, empty if it is not set.
        congestion: TCP's congestion control.
        cuda: it has a GPU.
        kernels: why codecs run without compiled kernels; empty if they have them.
        instructions: the CPU instructions that torch uses.
        versions: of Python and of the packages that are installed.
        crowd: codec times.
    """

    name: str
    resolves_to: str
    interfaces: dict[str, str]
    gloo: str
    nccl: str
    congestion: str
    cuda: bool
    kernels: str
    instructions: str
    versions: dict[str, str]
    crowd: Crowd

    @classmethod
    def here(cls, crowd: Crowd) -> Host:
        """Return the facts of this host."""
        import torch  # takes a second, and help must come at once

        name = socket.gethostname()
        return cls(
            name=name,
            resolves_to=_looked_up(name),
            interfaces=_interfaces(),
            gloo=os.environ.get("GLOO_SOCKET_IFNAME", ""),
            nccl=os.environ.get("NCCL_SOCKET_IFNAME", ""),
            congestion=_text(Path("/proc/sys/net/ipv4/tcp_congestion_control")),
            cuda=torch.cuda.is_available(),
            kernels=_without_kernels(),
            instructions=torch.backends.cpu.get_cpu_capability(),
            versions=_versions(),
            crowd=crowd,
        )

    @classmethod
    def of(cls, told: dict[str, Any]) -> Host:
        """Return the facts that another host sent as JSON.

        Raises:
            TypeError: it runs another version of this command.
        """
        return cls(**{**told, "crowd": Crowd(**told["crowd"])})

    def told(self) -> dict[str, Any]:
        """Return the facts for JSON."""
        return asdict(self)

    @property
    def resolves_to_loopback(self) -> bool:
        """True if no other host can reach the address that Gloo takes; without any, it takes 127.0.0.1."""
        return not self.resolves_to or _is_loopback(self.resolves_to)

    def default_route(self) -> Route | None:
        """Return the route to other networks, or None if there is none."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect(("198.51.100.1", 9))  # an address for documentation; connecting sends nothing
            return Route.of(probe.getsockname()[0], self.interfaces)
        return None


def plain(address: str) -> str:
    """Return an address without the prefix that IPv4 has on a socket for both families, and without IPv6's zone."""
    return address.removeprefix("::ffff:").partition("%")[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _looked_up(name: str) -> str:
    """Return the first address of a name to which a socket can be bound, as Gloo does."""
    found: list[str] = []

    def look() -> None:
        with suppress(OSError):
            for family, _, _, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
                with socket.socket(family, socket.SOCK_STREAM) as bound, suppress(OSError):
                    bound.bind(address)
                    found.append(plain(str(address[0])))
                    return

    looking = threading.Thread(target=look, daemon=True)  # a resolver may wait long for an answer
    looking.start()
    looking.join(LOOKUP)
    return found[0] if found else ""


def _interfaces() -> dict[str, str]:
    """Return the interface of each address."""
    entries = array("B", bytes(_IFREQ * _MOST))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", len(entries), entries.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, asked))[0]
    found = {}
    for start in range(0, size, _IFREQ):
        entry = entries[start : start + _IFREQ].tobytes()
        label = entry[:16].split(b"\0")[0].decode()
        found[socket.inet_ntoa(entry[20:24])] = label.partition(":")[0]  # eth0:1 is a second address of eth0
    for line in _text(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, interface = line.split()
        found[str(ipaddress.IPv6Address(int(digits, 16)))] = interface
    return found


def _without_kernels() -> str:
    import torch

    from lightning_compress import kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = kernels.compiler(device)
        except ValueError as error:
            return str(error)
    if found:
        return ""
    chosen = os.environ.get(kernels.VARIABLE, "auto")
    if chosen != "auto":
        return f"{kernels.VARIABLE}={chosen}"
    return str(said[0].message) if said else "missing"


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # also for the speed of an interface that is down
        return ""


def _number(path: Path) -> float:
    text = _text(path)
    return float(text) if text.lstrip("-").isdigit() else 0.0
