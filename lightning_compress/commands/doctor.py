"""Find what makes a network slow or dead before any compression, and say which setting to change."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict, dataclass, field
from json import dumps
from typing import Any

from lightning_compress.commands import crowd, diagnosis
from lightning_compress.commands.diagnosis import Direction, End, Finding
from lightning_compress.commands.host import Crowd, Host, Route
from lightning_compress.commands.peer import Asking, PeerError, Serving

PORT = 29511
CONNECTIONS = 4
"""At once, beside one alone."""
TRIES = 2
"""A problem counts if it is there each time: other work on a host may cause one once."""
AGAIN = "see what the command said there, and start both again"


@dataclass
class Report:
    """What was found.

    Args:
        title: the hosts.
        round_trip_ms: milliseconds of a small message and its answer; 0: not measured.
        measured: a line for each direction.
        findings: problems.
        figures: all measurements.
    """

    title: str
    round_trip_ms: float = 0.0
    measured: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, told: dict[str, Any]) -> Report:
        """Return the report that another host sent."""
        return cls(**{**told, "findings": [Finding(**each) for each in told["findings"]]})

    def show(self) -> None:
        """Print it."""
        print(self.title)
        if self.round_trip_ms:
            print(f"round trip: {self.round_trip_ms:.3g} ms")
        for line in self.measured:
            print(line)
        for number, each in enumerate(self.findings, 1):
            print(f"\n{number}. {each.what}\n   on {each.host}: {each.do}")
        count = len(self.findings)
        print(f"\n{diagnosis.counted(count, 'problem')} found" if count else "no problem found")


def doctor(
    serve: bool = False,
    peer: str | None = None,
    port: int = PORT,
    expect_gbit: float | None = None,
    ranks_per_host: int = 1,
    seconds: float = 1.0,
    wait_s: float = 300.0,
    json: bool = False,
) -> None:
    """Check this host and the network to another one, and say which setting to change.

    Without --serve and --peer, it checks this host alone. It needs no torchrun, and one free TCP port. The exit status
    is 1 if there are problems.

    Args:
        serve: wait for the other host, where this command runs with ``--peer``.
        peer: address of the host that runs this command with ``--serve``.
        port: TCP port of the host that serves.
        expect_gbit: speed that the link should have, in Gbit/s; by default what the network cards negotiated.
        ranks_per_host: processes that are to train on this host; 2 or more time a codec in one and in all of them.
        seconds: of each of the four transfers.
        wait_s: seconds to wait for the other host.
        json: print JSON.
    """
    _check(serve, peer, port, expect_gbit, ranks_per_host, seconds, wait_s)
    host, problems = _here(ranks_per_host)
    if serve:
        report = _serve(host, port, wait_s)
    elif peer is not None:
        report = _ask(host, peer, port, wait_s, _Plan(seconds, expect_gbit or 0.0))
    else:
        report = _alone(host)
    report.findings += problems
    if json:
        print(dumps(asdict(report), indent=2))
    else:
        report.show()
    if report.findings:
        sys.exit(1)


@dataclass(frozen=True)
class _Plan:
    """How long each transfer is, and the Gbit/s that should arrive (0: what the cards negotiated)."""

    seconds: float
    expected_gbit: float


def _check(
    serve: bool, peer: str | None, port: int, gbit: float | None, ranks: int, seconds: float, wait_s: float
) -> None:
    """Raise ValueError for arguments out of range."""
    if sys.platform != "linux":
        raise ValueError(f"doctor reads Linux's network settings; this is {sys.platform}")
    if serve and peer is not None:
        raise ValueError("give --serve on one host and --peer on the other one, not both on the same")
    for name, value, least, most in (
        ("port", port, 1, 65535),
        ("ranks_per_host", ranks, 1, 1024),
        ("seconds", seconds, 0.1, 60),
        ("wait_s", wait_s, 1, 86400),
        ("expect_gbit", 1.0 if gbit is None else gbit, 1e-6, 1e4),
    ):
        if not least <= value <= most:
            raise ValueError(f"--{name} {value:g}: it must be {least:g} to {most:g}")


def _here(ranks: int) -> tuple[Host, list[Finding]]:
    """Return this host's facts, and what kept its codec times from being measured."""
    if ranks > 1:
        print(f"timing a codec in {ranks} processes", file=sys.stderr, flush=True)
    try:
        timed = crowd.measured(ranks) if ranks > 1 else Crowd()
    except RuntimeError as error:
        host = Host.here(Crowd())
        do = f"start fewer ranks on this host, or free memory; then again with --ranks_per_host {ranks}"
        return host, [Finding(host.name, f"Codecs could not be timed: {error}.", do)]
    return Host.here(timed), []


def _alone(host: Host) -> Report:
    return Report(_described(host), findings=list(diagnosis.of_host(host, host.default_route())))


def _described(host: Host) -> str:
    """Return a line about a host."""
    versions = ", ".join(f"{name} {version}" for name, version in host.versions.items())
    timed = host.crowd
    text = f"{host.name}: {versions}"
    if timed.alone_ms:
        text += f"\n{host.name}: 4 M elements take {timed.alone_ms:.0f} ms to encode and decode in one rank, "
        text += f"{timed.together_ms:.0f} ms in {timed.ranks} at once"
    return text


def _serve(host: Host, port: int, wait_s: float) -> Report:
    """Wait for the other host, obey it, and return its report."""
    try:
        serving = Serving(port)
    except OSError as error:
        raise ValueError(f"--port {port} is taken on this host; give another one on both hosts") from error
    found = host.default_route()
    other = f"lightning-compress doctor --peer {found.address if found else 'ADDRESS'}"
    other += f" --port {port}" if port != PORT else ""
    print(f"waiting for the other host; run there: {other}", file=sys.stderr, flush=True)
    do = f"run there: {other}. If it does not get through: sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT"
    with closing(serving):
        try:
            serving.wait(wait_s)
            do = AGAIN
            route = found = Route.of(serving.control.here, host.interfaces)
            return Report.of(serving.obey(lambda: {"host": host.told(), "route": asdict(route)}))
        except PeerError as error:
            lost = Finding(host.name, _sentence(error), do)
            return Report(_described(host), findings=[*diagnosis.of_host(host, found), lost])


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[0].upper()}{text[1:]}."


def _ask(host: Host, peer: str, port: int, wait_s: float, plan: _Plan) -> Report:
    """Run all checks with the host that serves, and send it the report."""
    report = Report(_described(host))
    route: Route | None = None
    print(f"connecting to {peer}, port {port}", file=sys.stderr, flush=True)
    try:
        with closing(Asking(peer, port, wait_s)) as asking:
            route = Route.of(asking.control.here, host.interfaces)
            told = asking.facts()
            here, there = End(host, route), End(Host.of(told["host"]), Route(**told["route"]))
            report.title = f"{_described(here.host)}\n{_described(there.host)}"
            report.findings += diagnosis.of_host(here.host, route, there.name)
            report.findings += diagnosis.of_host(there.host, there.route, here.name)
            report.findings += diagnosis.of_versions(here.host, there.host)
            _measure(asking, here, there, plan, report)
            asking.control.ask("report", **asdict(report))
    except PeerError as error:
        if not report.findings:
            report.findings += diagnosis.of_host(host, route or host.default_route())
        report.findings.append(Finding(host.name, _sentence(error), AGAIN if route else _unmet(peer, port, str(error))))
    return report


def _unmet(peer: str, port: int, why: str) -> str:
    """Return what to do about a host that cannot be connected to."""
    if "refused" in why:
        return f"start lightning-compress doctor --serve there first{f' --port {port}' if port != PORT else ''}"
    return f"check the address; on {peer}, open the port: sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT"


def _measure(asking: Asking, here: End, there: End, plan: _Plan, report: Report) -> None:
    """Measure the network and add what it shows to the report, which is worth something if the other host goes away."""
    round_trip = asking.round_trip()
    report.round_trip_ms = 1e3 * round_trip
    report.findings += diagnosis.of_ports(here, there, asking.connects())
    for sender, receiver in ((here, there), (there, here)):
        tries: list[tuple[Direction, list[Finding]]] = []
        for _ in range(TRIES):
            measured = _direction(asking, sender, receiver, sender is here, plan.seconds)
            tries.append((measured, list(diagnosis.of_direction(measured, round_trip, plan.expected_gbit))))
            if not tries[-1][1]:
                break
        measured, found = min(tries, key=lambda each: len(each[1]))
        report.measured.append(str(measured))
        report.figures += [
            {"from": sender.name, "to": receiver.name, "connections": len(flow.arrived), **asdict(flow)}
            for flow in (measured.one, measured.four)
        ]
        report.findings += found


def _direction(asking: Asking, sender: End, receiver: End, outwards: bool, seconds: float) -> Direction:
    """Measure one direction."""
    one = asking.transfer(outwards, seconds)
    if one.stalled:
        mtu = sender.route.mtu or 1500
        return Direction(sender, receiver, one, one, asking.largest_packet(outwards, seconds, mtu))
    return Direction(sender, receiver, one, asking.transfer(outwards, seconds, [0] * CONNECTIONS))
