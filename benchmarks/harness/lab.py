"""A switch and one namespace a rank, made of veth pairs, a bridge and token buckets; all of it gone at the end.

    rank 0 [eth0 10.77.0.1] ---- p0 |                |
    rank 1 [eth0 10.77.0.2] ---- p1 | bridge, in a   |      each end of each link sends at most at the set rate
    ...                             | namespace too  |

With a delay, each link ends in a bridge of its own with a TAP device in it, and ``relay.py`` carries frames from
device to device. netem would do this, but few kernels have it.

Nothing outside of the namespaces is touched: also the links are made inside.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from types import FrameType, TracebackType

from benchmarks.harness.relay import READY

PREFIX = "lclab"
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
MOST_RANKS = 254
LONGEST = 1000.0
"""Milliseconds of a round trip; connections give up in the end."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bits_per_second(rate: str) -> float:
    """``"1gbit"``, ``"100mbit"`` as a number.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if not match or not float(match[1]):
        raise ValueError(f"rate={rate!r} must be a speed above 0 as tc writes it: 100mbit, 1gbit, 2.5gbit")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


class Lab:
    """A context in which ``ranks`` namespaces exist; SIGINT, SIGTERM and SIGHUP end it with KeyboardInterrupt.

    Args:
        ranks: how many, 1 to 254.
        rate: of each link in each direction, such as ``"1gbit"``; None: not limited.
        delay_ms: that a round trip between two ranks takes at least, 0 to 1000 milliseconds; 0: no relay.
        last: the rate of the last rank's link, if it is another one.

    Raises:
        ValueError: there is no such rate or delay, or there are no addresses for so many ranks.
        RuntimeError: this is not Linux with iproute2, or not root.
    """

    interface = "eth0"

    def __init__(self, ranks: int, rate: str | None, delay_ms: float = 0.0, last: str | None = None) -> None:
        self._owner = os.getpid()
        self._name = f"{PREFIX}{self._owner}"
        self._rates, self._delay = [rate] * (ranks - 1) + [last or rate], delay_ms
        self._relay: subprocess.Popen[str] | None = None
        self.ranks = ranks
        self._leaving = False
        self._interrupted = False
        for each in filter(None, (rate, last)):
            bits_per_second(each)
        check_delay(delay_ms)
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"ranks={ranks} must be 1 to {MOST_RANKS}, for which the lab has addresses")
        if not shutil.which("ip") or not shutil.which("tc"):
            raise RuntimeError("the network lab needs iproute2: apt-get install iproute2")
        if os.geteuid() != 0:
            raise RuntimeError("the network lab makes network namespaces, which only root may do")

    def __enter__(self) -> Lab:
        atexit.register(self._tear_down)  # an interrupt may come before the block begins
        nohup = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._old = {number: signal.signal(number, self._interrupt) for number in SIGNALS if number not in nohup}
        try:
            sweep()
            self._build()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self._interrupted and kind is None:  # while it was being taken down
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise once; a second Ctrl-C must not keep anything from being taken down."""
        self._interrupted = True
        if not self._leaving:
            self._leaving = True
            raise KeyboardInterrupt

    def _leave(self) -> None:
        self._leaving = True
        self._tear_down()
        for number, handler in self._old.items():
            signal.signal(number, handler)
        atexit.unregister(self._tear_down)

    def namespace(self, rank: int) -> str:
        """The name of a rank's."""
        return f"{self._name}r{rank}"

    def address(self, rank: int) -> str:
        """Its address."""
        return f"10.77.0.{rank + 1}"

    def command(self, rank: int, *words: str) -> list[str]:
        """A command as it has to be called to run there."""
        return ["ip", "netns", "exec", self.namespace(rank), *words]

    def _build(self) -> None:
        switch = f"{self._name}sw"
        _run("ip", "netns", "add", switch)
        taps = [f"tap{rank}" for rank in range(self.ranks)] if self._delay else []
        bridges = [f"br{rank}" for rank in range(self.ranks)] if self._delay else ["br0"] * self.ranks
        for bridge in dict.fromkeys(bridges):
            _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", switch, "link", "set", bridge, "up")
        for rank, bridge in enumerate(bridges):
            own, port = self.namespace(rank), f"p{rank}"
            _run("ip", "netns", "add", own)
            _run("ip", "-n", own, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", own, "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
            _run("ip", "-n", switch, "link", "set", port, "master", bridge)
            for place, device in ((own, "lo"), (own, "eth0"), (switch, port)):
                _run("ip", "-n", place, "link", "set", device, "up")
            if rate := self._rates[rank]:
                for place, device in ((own, "eth0"), (switch, port)):
                    _run("tc", "-n", place, "qdisc", "add", "dev", device, *bucket(rate))
        if self._delay:
            self._start_relay(switch, taps)
        for tap, bridge in zip(taps, bridges, strict=False):
            _run("ip", "-n", switch, "link", "set", tap, "master", bridge, "up")

    def _start_relay(self, switch: str, taps: list[str]) -> None:
        """A process in the switch's namespace, which makes the devices."""
        words = [sys.executable, "-m", "benchmarks.harness.relay", str(self._delay / 2000), *taps]
        self._relay = subprocess.Popen(
            ["ip", "netns", "exec", switch, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self._relay.stdout is not None
        said = self._relay.stdout.readline().strip()
        if said != READY:
            self._relay.kill()
            raise RuntimeError(f"the relay that delays frames did not start: {said}{self._relay.stdout.read()}")

    def _tear_down(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None
        for name in _namespaces():
            if owner(name) == self._owner:
                _remove(name)


def bucket(rate: str) -> list[str]:
    """What ``tc qdisc add dev ...`` is told of a token bucket of ``rate``, as a device's root.

    Raises:
        ValueError: it is no rate.
    """
    burst = max(65536, int(bits_per_second(rate) / 8 / 1000))  # a millisecond's worth
    return ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "200ms"]


def check_delay(delay_ms: float) -> None:
    """Refuse what is no round trip.

    Raises:
        ValueError: it is none.
    """
    if not 0 <= delay_ms <= LONGEST:
        raise ValueError(f"delay_ms={delay_ms!r} must be a round trip in milliseconds, 0 (none added) to {LONGEST:g}")


def die_with_parent() -> None:
    """In a child on Linux: also where the parent is killed with what it cannot catch."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_rate(rate: str | None) -> None:
    """In a rank of a lab without a rate: it sends at ``rate`` from now on; None: not limited again."""
    words = ["replace", "dev", Lab.interface, *bucket(rate)] if rate else ["del", "dev", Lab.interface, "root"]
    _run("tc", "qdisc", *words)


def sweep() -> None:
    """Take away what a lab left that was killed, its ranks too."""
    for name in _namespaces():
        if (process := owner(name)) is not None and not os.path.exists(f"/proc/{process}"):
            _remove(name)


def owner(name: str) -> int | None:
    """The process whose lab a namespace is of; None: it is of no lab."""
    match = re.fullmatch(rf"{PREFIX}(\d+)(?:r\d+|sw)", name)
    return int(match[1]) if match else None


def _remove(name: str) -> None:
    """A namespace and the processes in it; one that is gone already is none to complain about."""
    for process in _call("ip", "netns", "pids", name).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _call("ip", "netns", "del", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _run(*words: str) -> str:
    done = _call(*words)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    """In a session of its own: a terminal's Ctrl-C is for us, not for what we clean up with."""
    return subprocess.run(words, check=False, capture_output=True, text=True, start_new_session=True)
