"""The network lab: real sockets, links of a set speed, nothing left behind."""

import os
import shutil
import subprocess

import pytest

from benchmarks import network
from benchmarks._network import lab

root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2 for network namespaces"
)


def namespaces():
    return {each for each in lab._namespaces() if each.startswith(lab.PREFIX)}


@root
def test_bytes_on_the_wire_are_those_of_the_formula():
    wanted = ["onebit", '{"compressor": "topk", "exchange": "split_gather"}', '{"compressor": "bf16"}']
    found = network.measure(2, "1gbit", "mlp", ["DDP", "no communication", *wanted], 2, 1)
    for name in wanted:
        assert found["wire_bytes"][name] == pytest.approx(found["formula_bytes"][name], rel=0.03)
    assert found["wire_bytes"]["DDP"] > 40e6 > 1e5 > found["wire_bytes"]["no communication"]
    assert not namespaces()


@root
def test_links_are_as_slow_as_asked():
    with lab.Lab(2, "10mbit") as built:
        said = subprocess.run(
            ["tc", "-n", built.namespace(1), "qdisc", "show", "dev", "eth0"], check=True, capture_output=True, text=True
        ).stdout
        assert "rate 10Mbit" in said


@root
def test_nothing_is_left_after_an_error():
    with pytest.raises(RuntimeError, match=r"rank .* failed"):
        network.measure(2, None, "mlp", ['{"compressor": "no such thing"}'], 1, 1)
    assert not namespaces()


@root
def test_what_a_killed_lab_left_is_swept():
    subprocess.run(["ip", "netns", "add", f"{lab.PREFIX}999999999r0"], check=True)
    with lab.Lab(2, None):
        assert len(namespaces()) == 3
    assert not namespaces()


@pytest.mark.parametrize("rate", ["fast", "0gbit", "1GBps", "-1mbit"])
def test_bad_rates_are_refused(rate):
    with pytest.raises(ValueError, match="must be a speed above 0"):
        lab.Lab(2, rate)


def test_names_and_json():
    given = 'DDP, dgc 0.1 %,{"compressor": {"name": "topk", "density": 0.1}, "exchange": "auto"},onebit'
    assert network.names(given) == [
        "DDP",
        "dgc 0.1 %",
        '{"compressor": {"name": "topk", "density": 0.1}, "exchange": "auto"}',
        "onebit",
    ]
    with pytest.raises(ValueError, match="unknown method 'dgx'"):
        network.make("dgx")
