"""What is wrong with two hosts and the network between them, from facts and measurements, and the setting to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_compress.commands.host import Host, Route
from lightning_compress.commands.transfer import Flow

RESENT = 0.01
"""Part of packets sent again above which loss slows training."""
MORE = 1.5
"""Four connections carry this many times what one carries, where something limits each of them."""
HELD = 0.3
"""Part of the time that a buffer held one connection back, above which it is the limit."""
DELIVERED = 0.7
"""Part of the expected speed that must arrive. TCP over Ethernet reaches 0.94."""
FASTEST = 10.0
"""Gbit/s above which this command itself may be the limit."""
SLOWER = 1.6
"""A codec takes this many times as long beside those of the other ranks, where cores are missing."""
BUFFER = 16 << 20
"""Bytes of a socket buffer that carry 1 Gbit/s over a round trip of 0.1 s."""


@dataclass(frozen=True)
class Finding:
    """A problem.

    Args:
        host: where to change something.
        what: is wrong, with the measured value.
        do: the setting to change.
    """

    host: str
    what: str
    do: str


@dataclass(frozen=True)
class End:
    """One of the two hosts.

    Args:
        host: its facts.
        route: how it reaches the other one.
    """

    host: Host
    route: Route

    @property
    def name(self) -> str:
        """The host's name."""
        return self.host.name


@dataclass(frozen=True)
class Direction:
    """What was measured from one host to the other.

    Args:
        sender: the host that sends.
        receiver: the other one.
        one: over one connection.
        four: over four at once.
        largest: bytes of the largest packet that arrives, if full ones do not; 0 if none does.
    """

    sender: End
    receiver: End
    one: Flow
    four: Flow
    largest: int = 0

    @property
    def gbit(self) -> float:
        """What arrived, in Gbit/s."""
        return max(self.one.bits_per_s, self.four.bits_per_s) / 1e9

    def __str__(self) -> str:
        one, four = rate(self.one.bits_per_s), rate(self.four.bits_per_s)
        resent = 100 * max(self.one.resent, self.four.resent)
        path = f"{self.sender.name} to {self.receiver.name}"
        return f"{path}: {one} over one connection, {four} over four, {resent:.2f} % of packets sent again"


def rate(bits_per_s: float) -> str:
    """Return a speed with its unit."""
    return f"{bits_per_s / 1e9:.3g} Gbit/s" if bits_per_s >= 999.5e6 else f"{bits_per_s / 1e6:.3g} Mbit/s"


def of_host(host: Host, route: Route | None, peer: str = "") -> Iterator[Finding]:
    """Yield what is wrong with a host, whatever the network.

    Args:
        host: its facts.
        route: to the other host, or else to other networks; None if there is none.
        peer: the other host's name.
    """
    if route is None or not route.loopback:
        yield from _interface(host, route, peer)
    if host.kernels == "missing":
        name, why = ("Triton", "GPU") if host.cuda else ("numba", "CPU")
        yield Finding(
            host.name, f"{name} is missing, so codecs run on the {why} without compiled kernels.",
            f"pip install {name.lower()}",
        )  # fmt: skip
    elif host.kernels.startswith("LIGHTNING_COMPRESS_KERNELS="):
        what = f"{host.kernels.split(',')[0]} keeps codecs from using compiled kernels."
        yield Finding(host.name, what, "unset LIGHTNING_COMPRESS_KERNELS")
    elif host.kernels:
        yield Finding(host.name, f"{host.kernels.split(', so')[0]}.", "pip install -U numba")
    crowd = host.crowd
    if crowd.alone_ms and crowd.together_ms > SLOWER * crowd.alone_ms:
        yield Finding(
            host.name,
            f"{crowd.ranks} ranks at once need {crowd.together_ms:.0f} ms to encode and decode 4 M elements; one alone "
            f"needs {crowd.alone_ms:.0f} ms. They share {counted(crowd.cores, 'core')}, with "
            f"{counted(crowd.threads, 'thread')} each.",
            f"export OMP_NUM_THREADS={max(1, crowd.cores // crowd.ranks)}"
            if crowd.threads > 1
            else f"torchrun --nproc-per-node {min(crowd.cores, crowd.ranks - 1)}, or give this job {crowd.ranks} cores "
            "(--cpus-per-task in SLURM, --cpus in Docker)",
        )


def counted(number: int, thing: str) -> str:
    """Return a number of things."""
    return f"{number} {thing}{'s' * (number != 1)}"


def _interface(host: Host, route: Route | None, peer: str) -> Iterator[Finding]:
    """Yield what is wrong with the interface that training would use."""
    right = route.interface if route else ""
    do = f"export GLOO_SOCKET_IFNAME={right or 'eth0'} NCCL_SOCKET_IFNAME={right or 'eth0'}"
    if not right:
        do += ", with the name after `dev` in `ip route get` and the other host's address, in place of eth0"
    reached = f"{peer} is reached through {right} ({route.address})." if route and peer else ""
    if what := _gloo(host, right, reached):
        yield Finding(host.name, what, do)
    if host.cuda and reached and (nccl := nccl_takes(host.nccl, host.interfaces)) != right:
        yield Finding(host.name, f"NCCL takes {nccl or 'no interface'}, but {reached}", do)
    if reached and route and route.wireless:
        what = f"{reached} This is Wi-Fi."
        do = "connect both hosts by cable, and use the addresses of the cable's interfaces, also for --master-addr"
        yield Finding(host.name, what, do)


def _gloo(host: Host, right: str, reached: str) -> str:
    """Return what is wrong with the interface that Gloo would take, or nothing.

    Args:
        host: its facts.
        right: the interface to the other host; empty: unknown.
        reached: says that the other host is reached through it; empty: there is none.
    """
    names = sorted(set(host.interfaces.values()))
    if host.gloo and host.gloo not in names:
        what = f"GLOO_SOCKET_IFNAME is {host.gloo}. No interface of this host with an address has exactly this name."
        return f"{what} It has {', '.join(names)}."
    if host.gloo:
        return f"GLOO_SOCKET_IFNAME is {host.gloo}, but {reached}" if reached and host.gloo != right else ""
    name, address = host.name, host.resolves_to
    if host.resolves_to_loopback:
        stands = f"resolves to {address}" if address else "does not resolve to an address of this host"
        gives = f"Gloo gives {address or '127.0.0.1'} to the other hosts, which cannot reach it."
        return f"The host name {name} {stands} here. {gives}"
    taken = host.interfaces.get(address, "")
    if reached and taken != right:
        return f"Gloo takes {taken} ({address}), because the host name {name} resolves to it, but {reached}"
    return ""


def nccl_takes(variable: str, interfaces: dict[str, str]) -> str:
    """Return the interface that NCCL takes without InfiniBand, empty if there is none.

    Args:
        variable: the value of NCCL_SOCKET_IFNAME: prefixes, after ``=`` whole names, after ``^`` those to leave out.
        interfaces: by address, in the system's order.
    """
    names = list(dict.fromkeys(interfaces.values()))
    if not variable:
        return next((name for name in names if not name.startswith(("lo", "docker"))), names[0] if names else "")
    left_out, exact = variable.startswith("^"), variable.lstrip("^").startswith("=")
    words = variable.lstrip("^=").split(",")

    def listed(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return next((name for name in names if listed(name) != left_out), "")


def of_versions(first: Host, second: Host) -> Iterator[Finding]:
    """Yield packages that both hosts have in different versions, and CPUs that round differently."""
    for package in first.versions.keys() & second.versions.keys():
        one, other = first.versions[package], second.versions[package]
        if one == other:
            continue
        older, newest = (first, other) if _order(one) < _order(other) else (second, one)
        what = f"{package} is {one} on {first.name} and {other} on {second.name}."
        do = f"pip install {package}=={newest.partition('+')[0]}"
        yield Finding(older.name, what, f"use Python {newest} on both hosts" if package == "Python" else do)
    if first.instructions != second.instructions and not (first.cuda or second.cuda):
        what = (
            f"torch uses {first.instructions} on {first.name} and {second.instructions} on {second.name}. "
            "The optimizer rounds differently, and the replicas drift apart."
        )
        least = "default" if "DEFAULT" in (first.instructions, second.instructions) else "avx2"
        yield Finding(f"{first.name} and {second.name}", what, f"export ATEN_CPU_CAPABILITY={least}")


def _order(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]


def of_ports(first: End, second: End, why_not: tuple[str, str]) -> Iterator[Finding]:
    """Yield a port that the system chose and that cannot be reached.

    Args:
        first: the host of the first reason.
        second: the other one.
        why_not: the first host cannot connect to the second, and the second not to the first; empty if it can.
    """
    for source, target, why in ((first, second, why_not[0]), (second, first, why_not[1])):
        if why:
            back = "Neither can the other way." if all(why_not) else f"{target.name} can connect to {source.name}."
            yield Finding(
                target.name,
                f"{source.name} cannot connect to a port of {target.name} that the system chose: {why}. {back} "
                "Gloo and NCCL listen on such ports.",
                f"sudo iptables -I INPUT -p tcp -s {source.route.address} -j ACCEPT",
            )


def of_direction(measured: Direction, round_trip: float, expected_gbit: float = 0.0) -> Iterator[Finding]:
    """Yield what is wrong with the network in one direction.

    Args:
        measured: in this direction.
        round_trip: seconds.
        expected_gbit: that should arrive; 0: what the cards negotiated.
    """
    sender, receiver, one, four = measured.sender, measured.receiver, measured.one, measured.four
    path = f"{sender.name} to {receiver.name}"
    if one.stalled:
        yield _stalled(measured, path)
        return
    if (resent := max(one.resent, four.resent)) > RESENT:
        yield _lossy(measured, path, resent)
    elif four.bits_per_s > MORE * one.bits_per_s and one.bits_per_s < FASTEST * 1e9:
        what = f"{path}: one connection carries {rate(one.bits_per_s)}, and four carry {rate(four.bits_per_s)}."
        if one.held > HELD:
            what += f" Socket buffers hold one back: a round trip takes {1e3 * round_trip:.3g} ms."
            size = max(BUFFER, int(four.bits_per_s / 4 * round_trip))  # twice what is under way
            do = f'sudo sysctl -w net.ipv4.tcp_rmem="4096 131072 {size}" net.ipv4.tcp_wmem="4096 65536 {size}"'
            yield Finding(f"{sender.name} and {receiver.name}", what, do)
        else:
            do = "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4; Gloo has no such setting"
            yield Finding(f"{sender.name} and {receiver.name}", f"{what} Something limits each connection.", do)
    yield from _slow(measured, path, expected_gbit)


def _stalled(measured: Direction, path: str) -> Finding:
    route = measured.sender.route
    start = f"{path}: small messages arrive, but no data in packets of {route.mtu or 1500} bytes"
    if not measured.largest:
        return Finding(
            measured.sender.name, f"{start}, nor in smaller ones.",
            f"tc -s qdisc show dev {route.interface}; a firewall or a shaper drops what is longer than a few bytes",
        )  # fmt: skip
    what = f"{start}, the MTU of {route.interface}. Packets of {measured.largest} bytes arrive."
    both = f"{measured.sender.name} and {measured.receiver.name}"
    return Finding(both, what, f"sudo ip link set dev {route.interface} mtu {measured.largest}")


def _lossy(measured: Direction, path: str, resent: float) -> Finding:
    sender = measured.sender
    what = f"{path}: TCP sent {100 * resent:.1f} % of the packets again, because the network lost them."
    what += f" {rate(measured.one.bits_per_s)} arrive over one connection."
    do = f"look for the place that drops packets: tc -s qdisc show dev {sender.route.interface}; ethtool -S "
    do += f"{sender.route.interface} | grep -iE 'drop|err' (a short queue, a bad cable)"
    if sender.host.congestion != "bbr":
        do += ". Until then, on both hosts: sudo modprobe tcp_bbr; sudo sysctl -w net.ipv4.tcp_congestion_control=bbr"
    return Finding(sender.name, what, do)


def _slow(measured: Direction, path: str, expected_gbit: float) -> Iterator[Finding]:
    sender, receiver = measured.sender, measured.receiver
    cards = [each.route.gbit for each in (sender, receiver) if each.route.gbit]
    expected = expected_gbit or min(cards, default=0.0)
    if measured.gbit < DELIVERED * min(expected, FASTEST):
        source = "you expect" if expected_gbit else "the network cards negotiated"
        yield Finding(
            f"{sender.name} and {receiver.name}",
            f"{path}: {rate(1e9 * measured.gbit)} arrive, of {rate(1e9 * expected)} that {source}.",
            f"ethtool {sender.route.interface} and ip -s link show {sender.route.interface} say whether a cable, a "
            f"switch or other traffic is the cause; if it stays, plan with lightning-compress advise --gbit "
            f"{measured.gbit:.2g}",
        )
