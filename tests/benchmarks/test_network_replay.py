"""Steps that were recorded are played again: as long at least, and with the bytes that they sent."""

import copy

import pytest

from benchmarks._network import cells, models, trace
from tests.benchmarks.test_network import namespaces, root

METHODS = ["no communication", "DDP", "bf16", "onebit", "powersgd 1"]


@pytest.fixture(scope="module")
def recorded():
    return cells.record(2, None, "resnet20", METHODS, 2, 1, one_by_one=True, warm=2)


def computed(steps):
    """Seconds of each step that are not spent talking."""
    for step in steps:
        chunks = sum(sum(each) for each in step["chunks"])
        yield step["forward"] + sum(step["gaps"]) + step["tail"] + step["optimizer"] + chunks


@root
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
        "bf16": {3},  # before the all-reduce has begun, until it is waited for, and after it
        "onebit": {2},  # around an all-gather
        "powersgd 1": {3},  # around two all-reduces
    }


@root
@pytest.mark.thorough
@pytest.mark.parametrize("methods", [["DDP", "onebit"], METHODS])
def test_a_replay_takes_as_long_and_sends_as_much(recorded, methods):
    found = cells.replay(recorded, "10gbit", 2.0, 1.0, ["hook", "beside"], 1, methods)
    assert not namespaces()
    plain = [name for name in methods if name in METHODS[:2]]
    ours = [f"{name}, {schedule}" for name in methods if name not in plain for schedule in ("hook", "beside")]
    assert list(found["ms"]) == [*plain, *ours]
    for name, value in found["ms"].items():
        base, _, schedule = name.partition(", ")
        steps = recorded["traces"][base][0]["steps"]
        if schedule == "beside":  # what is computed beside backward adds nothing
            steps = [each | {"chunks": []} for each in steps]
        assert value >= 1e3 * min(computed(steps))
        assert found["wire_bytes"][name] == pytest.approx(recorded["wire_bytes"][base], rel=0.1, abs=1e4)


@root
@pytest.mark.thorough
def test_a_trace_of_other_collectives_is_refused(recorded):
    other = copy.deepcopy(recorded)
    for found in other["traces"]["onebit"]:
        for step in found["steps"]:
            step["chunks"] = [each[:1] for each in step["chunks"]]
    with pytest.raises(RuntimeError, match="the trace has fewer collectives"):
        cells.replay(other, "10gbit", 1.0, 1.0, ["beside"], 1, ["onebit"])


def test_a_faster_machine():
    step = {"forward": 8.0, "gaps": [4.0], "chunks": [[2.0, 6.0]], "tail": 0.0, "optimizer": 1.0}
    found = trace.quicker({"buckets": [["a"]], "steps": [step]}, 2.0)
    quick = {"forward": 4.0, "gaps": [2.0], "chunks": [[1.0, 3.0]], "tail": 0.0, "optimizer": 0.5}
    assert found == {"buckets": [["a"]], "steps": [quick]}
