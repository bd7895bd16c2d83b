"""Sharded models on two hosts, whose interfaces count what the replicas send."""

import pytest

from benchmarks import hsdp
from benchmarks.harness.lab import Lab
from benchmarks.harness.launch import run_ranks
from tests.helpers.labs import root

METHODS = ["HSDP", "HSDP each batch", "fp16 mean", "none", "qsgd"]


@root
@pytest.mark.thorough
def test_hosts_send_what_formulas_say(capsys):
    told = {"model": "mnist", "methods": METHODS, "steps": 1, "warm": 1, "accumulate": 2}
    with Lab(2, "1gbit") as built:
        found = run_ranks(built, told, "benchmarks._hsdp", each=2)[0]
    wire = found["wire_bytes"]
    assert wire["none"] == pytest.approx(found["formula_bytes"]["none"], rel=0.03)
    assert wire["qsgd"] == pytest.approx(found["formula_bytes"]["qsgd"], rel=0.05)
    assert wire["HSDP"] == pytest.approx(wire["none"], rel=0.03)
    assert wire["HSDP each batch"] == pytest.approx(2 * wire["HSDP"], rel=0.03)
    assert wire["fp16 mean"] == pytest.approx(wire["HSDP"], rel=0.03)  # half of it, twice
    hsdp.show(found, "mnist", "HSDP")
    rows = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows == METHODS
