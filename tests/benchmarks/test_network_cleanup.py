"""A lab that is interrupted in the middle of training leaves nothing: no namespace, no process, no link, no relay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness import lab
from tests.benchmarks.test_network import namespaces
from tests.helpers.labs import root

PATIENCE = 150
"""Seconds, against hangs: processes that import torch beside other tests take long."""
WORDS = (
    "--ranks",
    "2",
    "--rate",
    "none",
    "--delay-ms",
    "2",
    "--model",
    "resnet20",
    "--methods",
    "DDP",
    "--steps",
    "1000000",
)


def until(true):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def sent(space):
    """Bytes that a rank sent, 0 before there is one."""
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    said = subprocess.run(["ip", "netns", "exec", space, "cat", counter], check=False, capture_output=True, text=True)
    return int(said.stdout or 0)


def processes(spaces):
    words = [["ip", "netns", "pids", space] for space in spaces]
    return [int(each) for word in words for each in subprocess.run(word, capture_output=True, text=True).stdout.split()]


def links():
    """The host's own interfaces, addresses and disciplines."""
    words = (["ip", "-o", "link"], ["ip", "-o", "address"], ["tc", "qdisc", "show"])
    return [subprocess.run(word, check=True, capture_output=True, text=True).stdout for word in words]


def gone(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"  # of which nobody may have taken notice yet
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def training():
    """A lab in the middle of training, and its ranks; it leads a process group, as if started in a terminal."""
    before = links()
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.network", *WORDS]
    with subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: any(sent(space) > 3e6 for space in namespaces(process.pid)))  # some steps of 2.2 MB
            members = processes(namespaces(process.pid))
            ranks = processes(each for each in namespaces(process.pid) if not each.endswith("sw"))
            assert (len(ranks), len(members)) == (2, 3)  # and what carries frames
            yield process, ranks
            until(lambda: all(map(gone, members)))
            assert links() == before
        finally:
            process.kill()
            for rank in processes(namespaces(process.pid)):
                os.kill(rank, signal.SIGKILL)
    lab.sweep()


@root
@pytest.mark.thorough
def test_control_c(training):
    process, _ = training
    os.killpg(process.pid, signal.SIGINT)
    for _ in range(5):  # out of impatience, while it cleans up
        time.sleep(0.03)
        os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) in (130, -signal.SIGINT)
    assert not namespaces(process.pid)


@root
@pytest.mark.thorough  # another signal, the same handler
def test_terminated(training):
    process, _ = training
    process.terminate()
    assert process.wait(PATIENCE) == 130
    assert not namespaces(process.pid)


@root
@pytest.mark.thorough
def test_killed(training):
    process, ranks = training
    process.kill()
    process.wait(PATIENCE)
    until(lambda: all(map(gone, ranks)))  # by themselves
    assert len(namespaces(process.pid)) == 3
    with lab.Lab(2, None):
        assert not namespaces(process.pid)


@root
@pytest.mark.thorough  # the lab's ranks are started once more
def test_a_rank_dies(training):
    process, ranks = training
    os.kill(ranks[1], signal.SIGKILL)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert "failed with -9" in said
    assert not namespaces(process.pid)
