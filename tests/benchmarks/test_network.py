"""The network lab: real sockets, links of a set speed, nothing left behind."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import network
from benchmarks._gossip.network import METHODS as OVER_LINKS
from benchmarks._network import methods, plot, show
from benchmarks._network.arguments import names
from benchmarks._network.rank import counting_bits
from benchmarks.harness import lab, relay
from benchmarks.harness.launch import run_ranks
from lightning_compress.collectives import run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.settings.run_state import RunState
from tests.helpers.labs import forked_ranks, root


@pytest.fixture(autouse=True)
def _forks():
    with forked_ranks():
        yield


def namespaces(pid=None):
    """Of the lab of a process, this one if not given."""
    return {each for each in lab._namespaces() if lab.owner(each) == (pid or os.getpid())}


@root
def test_bytes_on_the_wire_are_those_of_the_formula():
    wanted = ["onebit", '{"compressor": "topk", "exchange": "split_gather"}', '{"compressor": "bf16"}']
    every = ["DDP", "no communication", *wanted]
    found = network.measure(2, "1gbit", model="mlp", methods=every, steps=1, rounds=1, warm=2)
    for name in wanted:
        assert found["wire_bytes"][name] == pytest.approx(found["formula_bytes"][name], rel=0.03)
    assert found["wire_bytes"]["DDP"] > 40e6 > 1e5 > found["wire_bytes"]["no communication"]
    assert not namespaces()


def _pytorch_means():
    """Of equal gradients on a rank, by PyTorch's hooks under DDP, and under gossip's stand-in for a bucket."""
    found = []
    for name in ("PyTorch fp16", "PyTorch bf16", "PyTorch PowerSGD 1"):
        model, _ = methods.make(name)(torch.nn.Linear(40, 40, bias=False))
        for _ in range(4):  # the first two of PowerSGD are not compressed
            model.zero_grad()
            model(torch.full((1, 40), 1.0 + torch.distributed.get_rank())).sum().backward()
        found.append(model.module.weight.grad.mean().item())
    for name in ("PyTorch bf16", "PyTorch PowerSGD 1"):
        step = OVER_LINKS[name](1010)
        for number in range(4):
            vector = torch.full((1010,), 1.0 + torch.distributed.get_rank())
            step(vector, number)
        found.append(vector.mean().item())
    return found


def test_pytorchs_hooks_run_over_gloo(pools):
    for found in pools[2].run(_pytorch_means):
        assert found == pytest.approx([1.5] * 5, rel=1e-3)


@root
@pytest.mark.thorough
def test_local_steps_are_whole_rounds():
    name = "local_sgd 16"
    told = {"model": "resnet20", "methods": ["no communication", name], "steps": 1, "rounds": 1, "warm": 1}
    found = network.measure(2, "1gbit", **told)
    assert found["wire_bytes"][name] == pytest.approx(found["formula_bytes"][name], rel=0.1)
    assert found["formula_bytes"][name] == pytest.approx(4 * 0.272e6 / 16, rel=0.02)
    assert found["step_bits"][name] == pytest.approx(8 * found["wire_bytes"][name] / 0.272e6, rel=0.02)


@root
@pytest.mark.thorough
def test_steps_with_a_delay_send_what_those_without_one_do():
    names = ["rotated", "rotated delay 1"]
    found = network.measure(2, "1gbit", model="resnet20", methods=names, steps=4, rounds=1, warm=2)
    now, late = (found["formula_bytes"][name] for name in names)
    assert now == late
    assert found["wire_bytes"]["rotated delay 1"] == pytest.approx(late, rel=0.1)
    assert found["bits"]["rotated"] == found["bits"]["rotated delay 1"]
    assert found["ms"]["rotated delay 1"] > 0


@root
def test_links_are_as_slow_as_asked():
    with lab.Lab(2, "10mbit") as built:
        said = subprocess.run(
            ["tc", "-n", built.namespace(1), "qdisc", "show", "dev", "eth0"], check=True, capture_output=True, text=True
        ).stdout
        assert "rate 10Mbit" in said


@root
def test_a_round_trip_takes_as_long_as_asked():
    before = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    with lab.Lab(2, "100mbit", 8.0) as built:
        found = run_ranks(built, {}, "tests.benchmarks.tasks")
        assert found[1] == {"ping_ms": None}
        assert 8 <= found[0]["ping_ms"] < 8 + 6  # on a machine that does other things, too
    assert not namespaces()
    assert subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout == before


@root
def test_a_relay_that_does_not_start_says_so(monkeypatch):
    monkeypatch.setattr(lab, "READY", "another word")
    with pytest.raises(RuntimeError, match="did not start: ready"), lab.Lab(2, None, 1.0):
        pass
    assert not namespaces()


class Devices:
    """In place of /dev/net/tun: what was written to each device."""

    def __init__(self, monkeypatch, frames):
        self.written, self._frames = [], dict(frames)
        monkeypatch.setattr(relay.os, "read", self._read)
        monkeypatch.setattr(relay.os, "write", lambda tap, frame: self.written.append((tap, frame)))

    def _read(self, tap, size):
        if tap not in self._frames:
            raise BlockingIOError
        return self._frames.pop(tap)


def frame(to, by):
    return bytes(relay.HEADER) + bytes([to] * 6) + bytes([by] * 6) + b"data"


def test_the_relay_floods_what_it_does_not_know_and_holds_the_rest(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(relay.time, "monotonic", lambda: now[0])
    carrier = relay.Relay([3, 4, 5], delay=0.5)
    asked = Devices(monkeypatch, {3: frame(255, 1)})
    carrier._take(3)
    now[0] = 0.4
    carrier._hand_on()
    assert not asked.written
    now[0] = 0.5
    carrier._hand_on()
    assert [tap for tap, _ in asked.written] == [4, 5]
    answered = Devices(monkeypatch, {4: frame(1, 2)})
    carrier._take(4)
    now[0] = 1.0
    carrier._hand_on()
    assert answered.written == [(3, frame(1, 2))]


@pytest.mark.parametrize("delay", [-1.0, 1e4, float("nan")])
def test_bad_delays_are_refused(delay):
    with pytest.raises(ValueError, match="must be a round trip in milliseconds"):
        lab.Lab(2, None, delay)


@root
def test_nothing_is_left_after_an_error():
    with pytest.raises(RuntimeError, match=r"rank .* failed"), lab.Lab(2, None) as built:
        run_ranks(built, {}, "benchmarks._network.no_such_module")
    assert not namespaces()


@root
def test_what_a_killed_lab_left_is_swept():
    subprocess.run(["ip", "netns", "add", f"{lab.PREFIX}999999999r0"], check=True)
    with lab.Lab(2, None):
        assert len(namespaces()) == 3
        assert not namespaces(999999999)
    assert not namespaces()


@pytest.mark.parametrize("rate", ["fast", "0gbit", "1GBps", "-1mbit"])
def test_bad_rates_are_refused(rate):
    with pytest.raises(ValueError, match="must be a speed above 0"):
        lab.Lab(2, rate)


def parse(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["network", *words])
    return network.parse()


def test_lists_of_rates_and_ranks(monkeypatch):
    given = parse(monkeypatch, "--ranks", "2,4", "--rates", "100mbit,none", "--methods", "DDP,onebit")
    assert (given.ranks, given.rates, given.methods) == ([2, 4], ["100mbit", "none"], ["DDP", "onebit"])
    assert parse(monkeypatch, "--ranks", "8", "--rate", "2.5gbit").rates == ["2.5gbit"]
    assert "PyTorch PowerSGD 4" in parse(monkeypatch).methods
    for name in ("terngrad, 2 bits", "PyTorch bf16", "PyTorch PowerSGD 1"):
        assert name in parse(monkeypatch, "--set", "2_bits,papers,local").methods
    assert "PyTorch bf16" in parse(monkeypatch, "--validate").methods
    assert {"rotated", "rotated delay 1", "DDP"} < {*parse(monkeypatch, "--set", "delay").methods}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rates", "1gbit,fast"], "must be a speed above 0"),
        (["--set", "3_bits"], "3_bits is none of 2_bits"),
        (["--methods", "dgx"], "unknown method 'dgx'"),
        (["--record", "x.json", "--validate"], "different tasks"),
        (["--validate", "--methods", "PyTorch PowerSGD 1"], "cannot be recorded"),
        (["--validate", "--rates", "none"], "links of a set speed"),
        (["--validate", "--methods", "rotated delay 1"], "travel beside the next step"),
        (["--delay-ms", "-3"], "must be a round trip"),
        (["--replay", "/no/such/file"], "No such file"),
        (["--replay", __file__], "it holds no recorded steps"),
        (["--plot", "x.png"], "needs two rates or two numbers of ranks"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
        (["--record", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
        (["--record", "x.json", "--ranks", "2,4"], "--record keeps one cell"),
        (["--record", "x.json", "--rates", "1gbit,10gbit"], "--record keeps one cell"),
        (["--methods", "DDP", "--set", "2_bits"], "--methods changes nothing beside --set"),
        (["--contended"], "--contended changes nothing without --record"),
        (["--slow", "3"], "--slow changes nothing without --replay or --validate"),
        (["--faster", "8"], "--faster changes nothing without --replay or --validate"),
        (["--replay", "x", "--rounds", "3"], "--rounds changes nothing beside --replay"),
        (["--replay", "x", "--model", "lstm"], "--model changes nothing beside --replay"),
        (["--ranks", "0"], "'0' must be a whole number from 1 on"),
        (["--ranks", "two"], "'two' must be a whole number from 1 on"),
        (["--rounds", "0"], "'0' must be a whole number from 1 on"),
        (["--warm", "-1"], "'-1' must be a whole number from 0 on"),
        (["--warm", "1", "--record", "x.json"], "give 2 or more"),
        (["--validate", "--faster", "0"], "'0' must be a number above 0"),
        (["--methods", '{"compressor": "tpk"}'], "tpk"),
        (["--methods", '{"compresor": "topk"}'], "compresor"),
        (["--methods", '{"compressor": "topk", "exchange": "nothing"}'], "nothing"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(monkeypatch, capsys, words, said):
    with pytest.raises(SystemExit):
        parse(monkeypatch, *words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("family", "bits"), [("2_bits", 2.0), ("4_bits", 4.0)])
def test_sets_send_equal_bits(family, bits):
    layout = Layout.of([("fc", (1000, 4096))])
    for name, arguments in methods.SETS[family].items():
        method = RunState.of(**arguments).method
        found = 8 * method.plan(layout, torch.device("cpu")).message_size / layout.numel
        assert found == pytest.approx(bits, rel=0.03), name


def test_titles_say_how_long_messages_take_beside_computing():
    named = {"model": "mlp", "ranks": 2, "rate": "1gbit"}
    given = named | {"ms": {"DDP": 600.0, "no communication": 200.0}, "wire_bytes": {"DDP": 75e6}}
    assert show.title(given) == "mlp, 2 ranks, 1gbit, kappa 3"
    assert show.title(given | {"wire_bytes": {"onebit": 1.0}}) == "mlp, 2 ranks, 1gbit, kappa 2"  # of 12.5 M parameters
    assert show.title(given | {"ms": {"DDP": 600.0}}) == "mlp, 2 ranks, 1gbit"
    assert show.title(given | {"rate": "none"}) == "mlp, 2 ranks, none"


def cell(ranks, rate, methods=("DDP", "onebit")):
    return {"model": "mlp", "ranks": ranks, "rate": rate, "ms": dict.fromkeys(methods, 10.0 * ranks)}


def test_plots_have_a_panel_against_rates_and_one_against_ranks(tmp_path):
    cells = [cell(ranks, rate) for ranks in (2, 4) for rate in ("1gbit", "10gbit")] + [cell(4, "none")]
    said = [(label, against, len(points)) for label, against, points in plot.panels(cells)]
    assert said == [("4 ranks", "rate", 2), ("10 Gbit/s", "ranks", 2)]
    plot.draw(cells, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="needs two rates or two numbers of ranks"):
        plot.draw([cell(4, "none")], tmp_path / "y.png")


def test_plots_have_few_lines():
    many = [*methods.PYTORCH, *methods.OURS]
    assert len(many) > plot.LINES == len(plot.shown(many))
    assert plot.shown(["x", "dgc 0.1 %", "DDP"]) == ["DDP", "dgc 0.1 %", "x"]


def test_a_lab_takes_down_what_is_its_own_alone(monkeypatch):
    other = os.getpid() * 10 + 3
    own = [f"{lab.PREFIX}{os.getpid()}{each}" for each in ("sw", "r0", "r12")]
    others = [f"{lab.PREFIX}{other}sw", f"{lab.PREFIX}{other}r0", f"{own[0]}x", "lan"]
    taken = []
    monkeypatch.setattr(lab, "_namespaces", lambda: [*own, *others])
    monkeypatch.setattr(lab, "_remove", taken.append)
    monkeypatch.setattr(lab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab.shutil, "which", lambda name: name)
    lab.Lab(1, None)._tear_down()
    assert taken == own


def test_cells_are_written_one_by_one(tmp_path, monkeypatch):
    path, seen = tmp_path / "x.json", []

    def measure(ranks, rate, *_, **__):
        seen.append(len(json.loads(path.read_text())["cells"]) if path.exists() else 0)
        return {"ms": {"DDP": 1.0}, "wire_bytes": {"DDP": 1.0}}

    monkeypatch.setattr(network, "measure", measure)
    network.run(parse(monkeypatch, "--ranks", "2,4", "--rates", "1gbit", "--methods", "DDP", "--json", str(path)))
    assert seen == [0, 1]


def test_figures_of_a_file_are_shown(tmp_path, monkeypatch, capsys):
    ms = {"DDP": 300.0, "qsgd, 2 bits": 50.0}
    cell = {"model": "mlp", "ranks": 2, "rate": "1gbit", "ms": ms, "wire_bytes": dict.fromkeys(ms, 1e6)}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"cells": [cell]}))
    monkeypatch.setattr(sys, "argv", ["network", "--measured", str(path)])
    network.main()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["qsgd, 2 bits", "50.0", "6.00 x", "1.000"] in rows


def test_a_file_that_is_no_recording_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "cells.json").write_text('{"cells": []}')
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--replay", str(tmp_path / "cells.json"))
    assert "it holds no recorded steps" in capsys.readouterr().err


def test_who_is_not_root_is_told_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(lab.shutil, "which", lambda name: name)
    monkeypatch.setattr("sys.argv", ["network"])
    with pytest.raises(SystemExit) as ended:
        network.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith("which only root may do\n")


def test_names_and_json():
    given = 'DDP, dgc 0.1 %,{"compressor": {"name": "topk", "density": 0.1}, "exchange": "auto"},onebit'
    assert names(given) == [
        "DDP",
        "dgc 0.1 %",
        '{"compressor": {"name": "topk", "density": 0.1}, "exchange": "auto"}',
        "onebit",
    ]
    with pytest.raises(ValueError, match="unknown method 'dgx'"):
        methods.make("dgx")


def test_bits_of_shards_are_counted():
    """Also of the part of a message that travels as it is, and which is not encoded with the others."""

    def rank(collective):
        layer = torch.nn.Linear(64, 64)
        settings = RunState.of("qsgd", "two_shot")
        compression = Compression(trained(layer), settings, collective, unused=False)
        compression.reduce(("weight", "bias"), [torch.randn(4096), torch.randn(64)])
        compression.close()

    with counting_bits() as counted:
        run_threads(4, rank)
    size, elements = counted
    assert elements == pytest.approx(4 * 4160 * 5 / 4, rel=0.3)  # each rank's own shard need not be encoded
    assert 4 < 8 * size / elements < 5.5
