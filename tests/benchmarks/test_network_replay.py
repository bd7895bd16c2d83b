"""Steps that were recorded are played again: as long at least, and with the bytes that they sent."""

import copy
import time
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks._network import cells, rank, trace
from benchmarks._network.methods import optimizer
from benchmarks.harness import models
from lightning_compress.collectives import TorchCollective
from tests.benchmarks.test_network import namespaces
from tests.helpers.labs import forked_ranks, only_lab, root

METHODS = ["no communication", "DDP", "PyTorch bf16", "bf16", "onebit", "powersgd 1"]


@pytest.fixture(scope="module")
def recorded():
    with only_lab(), forked_ranks():
        told = {"model": "resnet20", "methods": METHODS, "steps": 2, "rounds": 1, "warm": 2}
        return cells.record(2, None, one_by_one=True, **told)


def computed(steps):
    """Seconds of each step that are not spent talking."""
    for step in steps:
        chunks = sum(sum(each) for each in step["chunks"])
        yield step["forward"] + sum(step["gaps"]) + step["tail"] + step["optimizer"] + chunks


@root
@pytest.mark.thorough
def test_traces_are_of_whole_steps(recorded):
    parameters = len(list(models.MODELS["resnet20"][0]().parameters()))
    for name in METHODS:
        for found in recorded["traces"][name]:
            assert len(found["steps"]) == 2
            assert sum(map(len, found["buckets"])) == parameters
            for step in found["steps"]:
                assert len(step["gaps"]) == len(step["chunks"]) == len(found["buckets"])
                assert min(step["gaps"]) > 0 <= step["tail"]
    chunks = {name: {len(each) for each in recorded["traces"][name][0]["steps"][0]["chunks"]} for name in METHODS}
    assert chunks == {
        "no communication": {0},
        "DDP": {2},  # before the all-reduce, and after it
        "PyTorch bf16": {2},
        "bf16": {3},  # before the all-reduce has begun, until it is waited for, and after it
        "onebit": {3},  # around an all-gather, begun and then waited for, whose heads tell what none uses
        "powersgd 1": {5},  # around the vote and two all-reduces
    }


@root
@pytest.mark.thorough
@pytest.mark.parametrize("methods", [["DDP", "onebit"], METHODS])
def test_a_replay_takes_as_long_and_sends_as_much(recorded, methods):
    found = cells.replay(recorded, "10gbit", 2.0, 1.0, 1, methods)
    assert not namespaces()
    assert list(found["ms"]) == methods
    for name, value in found["ms"].items():
        steps = recorded["traces"][name][0]["steps"]
        if name not in METHODS[:3]:  # what is computed beside backward adds nothing
            steps = [each | {"chunks": []} for each in steps]
        assert value >= 1e3 * min(computed(steps))
        assert found["wire_bytes"][name] == pytest.approx(recorded["wire_bytes"][name], rel=0.1, abs=1e4)


@root
@pytest.mark.thorough
def test_a_trace_of_other_collectives_is_refused(recorded):
    other = copy.deepcopy(recorded)
    for found in other["traces"]["onebit"]:
        for step in found["steps"]:
            step["chunks"] = [each[:1] for each in step["chunks"]]
    with pytest.raises(RuntimeError, match="the trace has fewer collectives"):
        cells.replay(other, "10gbit", 1.0, 1.0, 1, ["onebit"])


class Held(trace.Turn):
    """Knows whether this process has the turn."""

    def take(self):
        super().take()
        self.held = True

    def pass_on(self):
        self.held = False
        super().pass_on()


def _turns(path):
    """Of a step whose messages take long: whether this rank had the turn when each bucket was ready, and at the end."""
    turn, had, begin = Held(path), [], TorchCollective.begin
    module = nn.Sequential(nn.Linear(600, 2400), nn.Linear(2400, 600))  # a bucket each

    def slow(*arguments):
        time.sleep(0.2)
        return begin(*arguments)

    def ready(self, bucket):
        had.append(turn.held)
        inner(self, bucket)

    inner = trace.Recorder._ready
    with mock.patch.object(TorchCollective, "begin", slow), mock.patch.object(trace.Recorder, "_ready", ready):
        recorder = trace.Recorder("onebit", module, turn)
        with recorder.watching():
            for step in range(3):  # buckets are rebuilt in the second
                rank._step(recorder.model, optimizer(module), torch.ones(2, 600), recorder if step > 1 else None)
    recorder.compression.close()
    return [*had, turn.held]


def test_a_rank_that_computes_has_the_turn(pools, tmp_path):
    path = tmp_path / "turn"
    path.touch()
    for had in pools[2].run(_turns, str(path)):
        assert had == [True] * (len(had) - 1) + [False]
        assert len(had) > 2


def test_a_faster_machine():
    step = {"forward": 8.0, "gaps": [4.0], "chunks": [[2.0, 6.0]], "tail": 0.0, "optimizer": 1.0}
    found = trace.quicker({"buckets": [["a"]], "steps": [step]}, 2.0)
    quick = {"forward": 4.0, "gaps": [2.0], "chunks": [[1.0, 3.0]], "tail": 0.0, "optimizer": 0.5}
    assert found == {"buckets": [["a"]], "steps": [quick]}
