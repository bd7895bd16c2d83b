"""Faults in facts and measurements are found; so are faults that are put into a network of namespaces."""

import json
import os
import shutil
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness.lab import Lab
from lightning_compress import kernels
from lightning_compress.__main__ import command
from lightning_compress.commands import crowd, diagnosis, host, peer, transfer
from lightning_compress.commands.diagnosis import Direction, End, Finding, nccl_takes
from lightning_compress.commands.doctor import Report, doctor
from lightning_compress.commands.host import Crowd, Host, Route
from lightning_compress.commands.peer import Asking, PeerError, Serving
from lightning_compress.commands.transfer import Flow
from lightning_compress.commands.words import spelled
from tests.helpers import forked
from tests.helpers.labs import root
from tests.helpers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
NODE1 = Host(
    name="node1",
    resolves_to="10.77.0.1",
    interfaces={"127.0.0.1": "lo", "10.77.0.1": "eth0", "172.17.0.1": "docker0"},
    gloo="",
    nccl="",
    congestion="cubic",
    cuda=False,
    kernels="",
    instructions="AVX2",
    versions={"Python": "3.11.7", "torch": "2.9.1+cpu", "numba": "0.61.0"},
    crowd=Crowd(),
)
NODE2 = replace(NODE1, name="node2", resolves_to="10.77.0.2", interfaces={"127.0.0.1": "lo", "10.77.0.2": "eth0"})
ROUTE1, ROUTE2 = Route("10.77.0.1", "eth0", 1500), Route("10.77.0.2", "eth0", 1500)
ENDS = End(NODE1, ROUTE1), End(NODE2, ROUTE2)
GOOD = Flow(95e6, 0.0, 0.0, (10_000_000,))
EXPORT = "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"


def of_host(route=ROUTE1, peer="node2", **changes):
    return list(diagnosis.of_host(replace(NODE1, **changes), route, peer))


def only(findings):
    (finding,) = findings
    return finding


def test_nothing_is_wrong_with_a_healthy_host():
    assert of_host() == []
    assert of_host(gloo="eth0", resolves_to="127.0.1.1") == []
    assert of_host(route=replace(ROUTE1, address="127.0.0.1", interface="lo"), resolves_to="127.0.1.1") == []
    assert of_host(route=None, peer="") == []
    assert of_host(cuda=True, nccl="eth") == []
    assert of_host(crowd=Crowd(2, 2, 1, 50.0, 60.0)) == []


@pytest.mark.parametrize(
    ("changes", "what", "do"),
    [
        ({"resolves_to": "127.0.1.1"}, "node1 resolves to 127.0.1.1 here. Gloo gives 127.0.1.1", EXPORT),
        ({"resolves_to": ""}, "does not resolve to an address of this host here. Gloo gives 127.0.0.1", EXPORT),
        ({"resolves_to": "172.17.0.1"}, "Gloo takes docker0 (172.17.0.1), because", EXPORT),
        ({"gloo": "docker0"}, "GLOO_SOCKET_IFNAME is docker0, but node2 is reached through eth0 (10.77.0.1)", EXPORT),
        ({"gloo": "=eth0"}, "GLOO_SOCKET_IFNAME is =eth0. No interface", EXPORT),
        ({"cuda": True, "nccl": "docker"}, "NCCL takes docker0, but node2 is reached through eth0", EXPORT),
        ({"kernels": "missing"}, "numba is missing", "pip install numba"),
        ({"kernels": "missing", "cuda": True}, "Triton is missing", "pip install triton"),
        ({"kernels": "LIGHTNING_COMPRESS_KERNELS=torch"}, "KERNELS=torch keeps", "unset LIGHTNING_COMPRESS_KERNELS"),
        ({"kernels": "numba cannot be imported (Numpy), so slower"}, "imported (Numpy).", "pip install -U numba"),
        ({"crowd": Crowd(4, 2, 1, 50, 99)}, "4 ranks at once need 99 ms", "torchrun --nproc-per-node 2"),
        ({"crowd": Crowd(4, 8, 8, 50, 99)}, "8 cores, with 8 threads each", "export OMP_NUM_THREADS=2"),
    ],
)
def test_a_fault_of_a_host_is_found(changes, what, do):
    finding = only(of_host(**changes))
    assert finding.host == "node1"
    assert what in finding.what
    assert do in finding.do


def test_wifi_is_found():
    finding = only(of_host(route=replace(ROUTE1, wireless=True)))
    assert "node2 is reached through eth0 (10.77.0.1). This is Wi-Fi." in finding.what


def test_without_a_route_the_interface_is_asked_for():
    finding = only(of_host(route=None, peer="", resolves_to="127.0.1.1"))
    assert "`ip route get`" in finding.do


@pytest.mark.parametrize(
    ("variable", "taken"),
    [("", "eth0"), ("eth", "eth0"), ("=eth", ""), ("^docker,eth", "lo"), ("^=docker", "lo"), ("ib,docker", "docker0")],
)
def test_nccl_takes(variable, taken):
    assert nccl_takes(variable, NODE1.interfaces) == taken


def test_other_versions_are_found():
    assert list(diagnosis.of_versions(NODE1, NODE2)) == []
    other = replace(NODE2, versions=NODE2.versions | {"torch": "2.10.0+cpu"}, instructions="AVX512")
    torch, instructions = diagnosis.of_versions(NODE1, other)
    assert torch == Finding(
        "node1", "torch is 2.9.1+cpu on node1 and 2.10.0+cpu on node2.", "pip install torch==2.10.0"
    )
    assert instructions.do == "export ATEN_CPU_CAPABILITY=avx2"
    less = {name: version for name, version in NODE2.versions.items() if name != "numba"}
    assert list(diagnosis.of_versions(NODE1, replace(NODE2, versions=less))) == []
    python = only(diagnosis.of_versions(NODE1, replace(NODE2, versions=NODE2.versions | {"Python": "3.12.1"})))
    assert python.do == "use Python 3.12.1 on both hosts"


def test_closed_ports_are_found():
    assert list(diagnosis.of_ports(*ENDS, ("", ""))) == []
    finding = only(diagnosis.of_ports(*ENDS, ("it did not answer", "")))
    assert finding.host == "node2"
    assert finding.do == "sudo iptables -I INPUT -p tcp -s 10.77.0.1 -j ACCEPT"
    assert "node2 can connect to node1" in finding.what
    assert len(list(diagnosis.of_ports(*ENDS, ("it did not answer", "connection refused")))) == 2


def of_direction(one=GOOD, four=GOOD, largest=0, round_trip=1e-4, expected=0.0, gbit=0.0):
    ends = [replace(end, route=replace(end.route, gbit=gbit)) for end in ENDS]
    return list(diagnosis.of_direction(Direction(*ends, one, four, largest), round_trip, expected))


def test_nothing_is_wrong_with_a_healthy_direction():
    assert of_direction() == []
    assert of_direction(expected=0.1) == []
    assert of_direction(gbit=0.1) == []
    fast = replace(GOOD, bits_per_s=12e9)
    assert of_direction(fast, replace(fast, bits_per_s=30e9), gbit=100.0) == []  # Python is not faster


NOTHING = Flow(0.0, 0.0, 0.0, (0,))
HALF = replace(GOOD, bits_per_s=45e6)


@pytest.mark.parametrize(
    ("measured", "what", "do"),
    [
        ({"one": NOTHING, "four": NOTHING, "largest": 1400}, "Packets of 1400 bytes arrive", "set dev eth0 mtu 1400"),
        ({"one": NOTHING, "four": NOTHING}, "nor in smaller ones", "tc -s qdisc show dev eth0"),
        ({"four": replace(GOOD, resent=0.031)}, "sent 3.1 % of the packets again", "tcp_congestion_control=bbr"),
        ({"one": HALF}, "one connection carries 45 Mbit/s, and four carry 95 Mbit/s", "NCCL_NSOCKS_PERTHREAD=4"),
        (
            {"one": replace(HALF, held=0.9), "round_trip": 2.0},
            "a round trip takes 2e+03 ms",
            'net.ipv4.tcp_rmem="4096 131072 47500000"',
        ),
        ({"expected": 1.0}, "95 Mbit/s arrive, of 1 Gbit/s that you expect", "advise --gbit 0.095"),
        ({"gbit": 1.0}, "95 Mbit/s arrive, of 1 Gbit/s that the network cards negotiated", "ethtool eth0"),
    ],
)
def test_a_fault_of_a_direction_is_found(measured, what, do):
    finding = only(of_direction(**measured))
    assert what in finding.what
    assert do in finding.do


def test_route_reads_what_the_system_says(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "INTERFACES", tmp_path)
    for name, speed in (("eth0", "1000"), ("wlan0", "-1"), ("veth0", "10000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mtu").write_text("9000\n")
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    (tmp_path / "eth0" / "device").mkdir()
    (tmp_path / "wlan0" / "device").mkdir()
    (tmp_path / "wlan0" / "wireless").mkdir()
    interfaces = {"10.0.0.1": "eth0", "10.0.0.2": "wlan0", "10.0.0.3": "veth0"}
    assert Route.of("10.0.0.1", interfaces) == Route("10.0.0.1", "eth0", 9000, 1.0)
    assert Route.of("10.0.0.2", interfaces) == Route("10.0.0.2", "wlan0", 9000, 0.0, True)
    assert Route.of("10.0.0.3", interfaces) == Route("10.0.0.3", "veth0", 9000)
    assert Route.of("10.0.0.4", interfaces) == Route("10.0.0.4", "")


def test_facts_of_this_host_survive_json():
    here = Host.here(Crowd(2, 2, 1, 3.0, 4.0))
    assert here.interfaces["127.0.0.1"] == "lo" or not here.interfaces
    assert {"Python", "torch", "lightning-compress"} <= here.versions.keys()
    assert Host.of(json.loads(json.dumps(here.told()))) == here


def test_kernels_that_are_turned_off_are_a_fact(monkeypatch):
    monkeypatch.setattr(kernels, "_asked", "torch")
    monkeypatch.setenv("LIGHTNING_COMPRESS_KERNELS", "torch")
    assert Host.here(Crowd()).kernels == "LIGHTNING_COMPRESS_KERNELS=torch"


def test_an_own_name_that_nobody_answers_for(monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(host, "LOOKUP", 0.05)
    monkeypatch.setattr(host.socket, "getaddrinfo", lambda *_, **__: asked.wait(30) and [])
    assert host._looked_up("node1") == ""
    asked.set()


def test_an_ipv6_address_counts_as_loopback():
    assert replace(NODE1, resolves_to="::1").resolves_to_loopback
    assert host.plain("::ffff:10.77.0.1") == "10.77.0.1"
    assert host.plain("fe80::1%eth0") == "fe80::1"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"serve": True, "peer": "10.77.0.1"}, "not both"),
        ({"port": 0}, "--port 0: it must be 1 to 65535"),
        ({"seconds": 0.0}, "--seconds 0: it must be 0.1 to 60"),
        ({"expect_gbit": 0.0}, "--expect_gbit 0"),
        ({"ranks_per_host": 0}, "--ranks_per_host 0"),
        ({"wait_s": 0.0}, "--wait_s 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        doctor(**arguments)


def test_options_are_spelled_as_people_do():
    for words, meant in (
        ("doctor --serve --expect-gbit 1", "doctor --serve true --expect_gbit 1"),
        ("doctor --serve false --peer=a-b", "doctor --serve false --peer=a-b"),
        ("doctor --json=true --help", "doctor --json=true --help"),
        ("advise --json", "advise --json true"),
        ("advise --script a.py --json -- --lr 1", 'advise --script a.py --json true --args=["--lr", "1"]'),
        ("compare a.pt --compressors qsgd,onebit --json", 'compare a.pt --compressors=["qsgd", "onebit"] --json true'),
        ("compare --compressors=[qsgd] a.pt", "compare --compressors=[qsgd] a.pt"),
    ):
        assert " ".join(spelled(words.split(), command(words.split()[0]))) == meant


def test_a_report_shows_what_to_do(capsys):
    report = Report(
        "node1: torch 2.9", 0.11, ["node1 to node2: 95 Mbit/s"], [Finding("node1", "It is slow.", "ethtool")]
    )
    report.show()
    assert capsys.readouterr().out == (
        "node1: torch 2.9\nround trip: 0.11 ms\nnode1 to node2: 95 Mbit/s\n\n1. It is slow.\n   on node1: ethtool\n\n"
        "1 problem found\n"
    )
    replace(report, findings=[]).show()
    assert capsys.readouterr().out.endswith("\nno problem found\n")


def served(port, act):
    """Run ``act`` on a serving host in a thread, and return the asking host and what ends the thread."""
    serving, outcome = Serving(port), []

    def run():
        try:
            serving.wait(10)
            outcome.append(act(serving))
        except PeerError as error:
            outcome.append(error)
        finally:
            serving.close()

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        thread.join()
        return outcome[0]

    return Asking("127.0.0.1", port, 10), end


def facts():
    return {"host": NODE2.told(), "route": vars(ROUTE2)}


def test_two_hosts_measure_together():
    asking, end = served(int(free_port()), lambda serving: serving.obey(facts))
    assert Host.of(asking.facts()["host"]) == NODE2
    assert 0 < asking.round_trip() < 1
    assert asking.connects() == ("", "")
    for outwards in (True, False):
        flow = asking.transfer(outwards, 0.1, (0, 1400))
        assert flow.bits_per_s > 0
        assert all(flow.arrived)
        assert asking.largest_packet(outwards, 0.1, 1500) == 1492
    asking.control.ask("report", title="all")
    asking.close()
    assert end() == {"title": "all"}


def test_a_host_that_goes_away_is_told():
    asking, end = served(int(free_port()), lambda serving: serving.obey(facts))
    asking.facts()
    asking.close()
    assert "127.0.0.1 closed the connection" in str(end())
    asking, end = served(int(free_port()), lambda serving: None)
    with pytest.raises(PeerError, match=r"127\.0\.0\.1 closed the connection"):
        asking.facts()
    asking.close()
    end()


def test_a_transfer_ends_with_the_other_host():
    """A socket whose other end is gone is always ready: sending would turn without a pause until its time is up."""
    pairs = [socket.socketpair() for _ in range(2)]
    for _, theirs in pairs:
        theirs.close()
    assert transfer.send([ours for ours, _ in pairs], 3600.0) == {"resent": 0.0, "held": 0.0}


def test_a_host_that_is_silent_is_told():
    silence = threading.Event()
    asking, end = served(int(free_port()), lambda serving: silence.wait(30))
    with pytest.raises(PeerError, match=r"did not answer within 0.1 s"):
        asking.control.ask("hello", limit=0.1, protocol=peer.PROTOCOL)
    silence.set()
    end()
    asking.close()


def test_other_programs_do_not_disturb_a_serving_host():
    port = int(free_port())
    serving = Serving(port)
    with socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(PeerError, match="no other host came"):
            serving.wait(0.5)
    serving.close()


def _awaited(serving):
    with pytest.raises(PeerError, match="no other host came"):
        serving.wait(1)


def test_another_version_is_refused():
    port = int(free_port())
    serving = Serving(port)
    thread = threading.Thread(target=_awaited, args=(serving,))
    thread.start()
    asking = Asking("127.0.0.1", port, 10)
    assert asking.control.ask("hello", protocol=0) == {"protocol": peer.PROTOCOL}  # and is not served
    asking.close()
    thread.join()
    serving.close()


def test_a_host_of_another_version_is_told():
    asking, end = served(int(free_port()), lambda serving: serving.control.say(protocol=0))
    with pytest.raises(PeerError, match="another version"):
        asking.facts()
    asking.close()
    end()


def test_a_port_where_nobody_serves(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor(peer="127.0.0.1", port=int(free_port()), wait_s=1)
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "connection refused" in said
    assert "start lightning-compress doctor --serve there first" in said


def test_a_name_that_nobody_knows(capsys):
    with pytest.raises(SystemExit):
        doctor(peer="node7.invalid", wait_s=1)
    assert "Node7.invalid cannot be reached at port 29511: " in capsys.readouterr().out


def test_nobody_comes(capsys):
    with pytest.raises(SystemExit):
        doctor(serve=True, port=int(free_port()), wait_s=1, json=True)
    said = json.loads(capsys.readouterr().out)["findings"][-1]
    assert said["what"] == "No other host came within 1 s."
    assert "run there: lightning-compress doctor --peer" in said["do"]


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken, pytest.raises(ValueError, match="is taken on this host"):
        doctor(serve=True, port=taken.getsockname()[1])


def test_a_codec_is_timed_alone_and_in_all_ranks(monkeypatch):
    counts, milliseconds = [], crowd._milliseconds
    monkeypatch.setattr(crowd, "_milliseconds", lambda each: (counts.append(len(each)), milliseconds(each))[1])
    timed = crowd.measured(2)
    assert counts == [1] * crowd.TRIES + [2] * crowd.TRIES
    assert (timed.ranks, timed.cores, timed.threads) == (2, len(os.sched_getaffinity(0)), 1)
    assert timed.alone_ms > 0
    assert timed.together_ms > 0


def test_a_process_that_ends_early(monkeypatch):
    monkeypatch.setattr(crowd, "sys", SimpleNamespace(executable=shutil.which("true")))
    with pytest.raises(RuntimeError, match="ended early"):
        crowd.measured(2)


# What follows puts faults into networks of two namespaces.
SECONDS = "0.5"
CLOSED = (
    "qdisc add dev eth0 ingress",
    "filter add dev eth0 parent ffff: protocol ip u32 match ip protocol 6 0xff match u8 0x02 0x12 at 33 "
    "action mirred egress redirect dev ifb0",
)
"""Drops packets that open connections (SYN without ACK): ifb0 is down."""


def system(*words):
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(words)}: {done.stderr}"


class Nodes:
    """Two hosts of a lab, node1 and node2; the first one serves."""

    def __init__(self, lab, folder):
        self.lab, self._folder = lab, folder
        self._hosts = [{f"node{rank + 1}": lab.address(rank) for rank in (0, 1)} for _ in (0, 1)]

    def ip(self, rank, words):
        system("ip", "-n", self.lab.namespace(rank), *words.split())

    def tc(self, rank, words):
        system("tc", "-n", self.lab.namespace(rank), *words.split())

    def sysctl(self, rank, name, value):
        system(*self.lab.command(rank, "sh", "-c", f"echo '{value}' > /proc/sys/net/ipv4/{name}"))

    def switch(self, words):
        system("ip", "-n", self.lab.namespace(0).replace("r0", "sw"), *words.split())

    def resolve(self, rank, address):
        """Have a host's own name stand for an address."""
        self._hosts[rank][f"node{rank + 1}"] = address

    def start(self, rank, *words, **environment):
        hosts = self._folder / f"hosts{rank}"
        lines = {"localhost": "127.0.0.1"} | self._hosts[rank]
        hosts.write_text("".join(f"{address} {name}\n" for name, address in lines.items()))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO", "NCCL"))}
        kept |= {"PYTHONPATH": str(ROOT), "LIGHTNING_COMPRESS_KERNELS": "auto"} | environment
        return forked.start(
            ["-m", "tests.commands.node", f"node{rank + 1}", hosts, "doctor", *words],
            cwd=self._folder,
            env=kept,
            stdout=self._folder / f"out{rank}",
            stderr=self._folder / f"err{rank}",
            network=self.lab.namespace(rank),
        )

    def said(self, rank):
        return (self._folder / f"out{rank}").read_text()

    def diagnose(self, *words, **environment):
        """Run the command on both, and return the findings, the same on both."""
        for rank in (0, 1):  # what an earlier one has said
            (self._folder / f"out{rank}").unlink(missing_ok=True)
        common = ("--wait-s", "60", "--json")
        started = [
            self.start(0, "--serve", *common, **environment),
            self.start(1, "--peer", self.lab.address(0), "--seconds", SECONDS, *common, *words),
        ]
        for process in started:
            process.join(120)
        reports = [json.loads(self.said(rank)) for rank in (0, 1)]
        assert reports[0] == reports[1]
        findings = [Finding(**each) for each in reports[0]["findings"]]
        assert [process.exitcode for process in started] == [int(bool(findings))] * 2
        self.figures = reports[0]["figures"]
        return findings


@pytest.fixture
def nodes(request, tmp_path):
    rate, delay = getattr(request, "param", ("100mbit", 0.0))
    with Lab(2, rate, delay) as lab:
        yield Nodes(lab, tmp_path)


@root
@pytest.mark.parametrize("congestion", ["reno", "bbr"])
@pytest.mark.parametrize("nodes", [("100mbit", 0.0), ("1gbit", 0.0), ("100mbit", 10.0)], indirect=True)
def test_a_healthy_network_gives_no_alarm(nodes, congestion):
    for rank in (0, 1):
        nodes.sysctl(rank, "tcp_congestion_control", congestion)
    assert nodes.diagnose() == []


def own_name(nodes):
    nodes.resolve(0, "127.0.1.1")


def docker(nodes):
    for words in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"):
        nodes.ip(0, words)
    nodes.resolve(0, "172.17.0.1")


def closed(nodes):
    nodes.ip(1, "link add ifb0 type ifb")
    for words in CLOSED:
        nodes.tc(1, words)


def mtu(nodes):
    for rank in (0, 1):
        nodes.ip(rank, "link set eth0 gso_max_segs 1")  # larger segments than a packet pass any bridge
        nodes.switch(f"link set p{rank} mtu 1400")


def loss(nodes):
    nodes.tc(1, "qdisc replace dev eth0 root tbf rate 100mbit burst 3200 limit 6400")


FAULTS = {
    own_name: ("node1", "The host name node1 resolves to 127.0.1.1 here.", EXPORT),
    docker: ("node1", "Gloo takes docker0 (172.17.0.1)", EXPORT),
    closed: ("node2", "node1 cannot connect to a port of node2", "iptables -I INPUT -p tcp -s 10.77.0.1 -j ACCEPT"),
    mtu: ("node2 and node1", "Packets of 1400 bytes arrive.", "ip link set dev eth0 mtu 1400"),
    loss: ("node2", "of the packets again", "tc -s qdisc show dev eth0"),
}


@root
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_a_network_is_found(nodes, fault):
    name, what, do = FAULTS[fault]
    fault(nodes)
    findings = nodes.diagnose()
    if fault is mtu:  # in both directions
        assert [each.host for each in findings] == [name, "node1 and node2"]
        findings = findings[:1]
    finding = only(findings)
    assert finding.host == name
    assert what in finding.what
    assert do in finding.do


@root
def test_a_slow_network_is_found(nodes):
    slow = nodes.diagnose("--expect-gbit", "1")
    assert [each.what.partition(":")[0] for each in slow] == ["node2 to node1", "node1 to node2"]
    assert all("of 1 Gbit/s that you expect" in each.what for each in slow)


@root
@pytest.mark.parametrize("nodes", [("100mbit", 20.0)], indirect=True)
def test_small_buffers_are_found(nodes):
    nodes.sysctl(0, "tcp_rmem", "4096 65536 65536")
    for _ in range(3):  # on a busy machine, the sender may be what is waited for
        # of the other direction, such a machine may find something too
        finding = only(each for each in nodes.diagnose() if "node2 to node1" in each.what)
        assert finding.what.startswith("node2 to node1: one connection carries ")
        if "Socket buffers hold one back" in finding.what:
            break
    assert "Socket buffers hold one back" in finding.what
    assert "net.ipv4.tcp_rmem" in finding.do


@root
def test_a_dead_peer_is_told(nodes):
    serving = nodes.start(0, "--serve", "--wait-s", "60")
    asking = nodes.start(1, "--peer", nodes.lab.address(0), "--seconds", "60")
    serving.join(3)  # until they measure
    serving.kill()
    asking.join(45)  # it does not send for the rest of the 60 s
    assert asking.exitcode == 1
    assert "10.77.0.1 closed the connection" in nodes.said(1)
