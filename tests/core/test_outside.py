"""Codecs from outside: what a run of theirs goes on from, and what no file makes of them."""

import dataclasses
import functools
import json
import re
import sys

import pytest

from lightning_compress.codecs import TopK
from lightning_compress.corrections import DGC, OneBitAdam
from lightning_compress.settings.run_state import RunState
from tests.cases import CASES


@dataclasses.dataclass(frozen=True)
class Mine(TopK):
    """One that the package does not know."""

    name: str = "mine"
    anything: object = dataclasses.field(default_factory=lambda: print)


@dataclasses.dataclass(frozen=True)
class Around(Mine):
    """One that has another inside."""

    inner: object = dataclasses.field(default_factory=lambda: TopK(0.5))


GIVEN = {
    **{case.name: case.codec for case in CASES},
    "dgc": DGC(),
    "dgc of topk": DGC(sparsifier=TopK(0.3, scope="group")),
    "dgc of mine": DGC(sparsifier=Mine(0.3)),
    "onebit_adam": OneBitAdam(quantiser="qsgd"),
    "mine": Mine(0.3),
    "around": Around(0.3, inner=Mine(0.7)),
    "around topk": Around(0.3, inner=TopK(0.7)),
}


def running(compressor, **settings):
    """What a checkpoint has of a run that came to it, whatever it was given; only what a file can hold."""
    said = RunState.of(compressor, **settings).running() | {"named": None}
    return json.loads(json.dumps(said))


@pytest.mark.parametrize("compressor", GIVEN.values(), ids=GIVEN)
def test_what_ran_is_made_again(compressor):
    assert RunState.of(compressor).resumed(running(compressor)).compressor == compressor


@pytest.mark.parametrize(
    ("given", "ran"),
    [
        (Mine(0.3), Mine(0.05, scope="group")),
        (DGC(sparsifier=Mine(0.3)), DGC(sparsifier=Mine(0.05), momentum=0.5)),
        (Around(0.3), Around(0.05, inner=TopK(0.01))),
        (Around(0.3, inner=Mine(0.7)), Around(0.3, inner=Mine(0.1))),
        (DGC(sparsifier=Mine(0.3)), DGC(density=0.02)),
    ],
)
def test_with_the_settings_that_it_had_come_to(given, ran):
    assert RunState.of(given).resumed(running(ran)).compressor == ran


def test_a_class_of_a_schedule_or_a_rule_was_given_too():
    schedule = {"sparsifier": {3: Mine(0.2)}}
    assert RunState.of("dgc", schedule=schedule).resumed(running(DGC(sparsifier=Mine(0.1)))).compressor.codec == Mine(
        0.1
    )


@pytest.mark.parametrize("ran", [Mine(0.3), DGC(sparsifier=Mine(0.3)), Around()])
def test_what_this_run_was_not_given_is_refused(ran):
    with pytest.raises(ValueError, match=r"tests.core.test_outside.\w+', which this run was not given"):
        RunState.of(DGC(density=0.1) if isinstance(ran, DGC) else "topk").resumed(running(ran))


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"class": "antigravity.Codec"}, "'antigravity.Codec', which this run was not given"),
        ({"class": "builtins.type"}, "which this run was not given"),
        ({"class": ["tests.core.test_outside.Mine"]}, "which this run was not given"),
        ({"class": "builtins.float", "x": 1}, "has no setting 'x'"),
        ({"class": "builtins.float"}, "compressor is of float, which is not a compressor"),
        ({"class": "tests.core.test_outside.Mine", "nosuch": 1}, "has no setting 'nosuch'"),
        ({"class": "tests.core.test_outside.Mine", "density": 7}, "density must be in (0, 1]"),
        ({"class": "tests.core.test_outside.Mine", "anything": {"class": "os.system"}}, "'os.system', which this run"),
        ({"name": "nosuch"}, "unknown compressor 'nosuch'"),
        ({"name": "dgc", "sparsifier": {"class": "os.system"}}, "'os.system', which this run"),
        ([], "compressor must be a mapping, not list"),
        ({}, "compressor={'name': None} must be a name"),
        (
            functools.reduce(lambda inner, _: {"name": "dgc", "sparsifier": inner}, range(990), {}),
            "nested too deeply",
        ),
    ],
)
def test_a_file_names_no_class(described, words):
    assert "antigravity" not in sys.modules
    with pytest.raises(ValueError, match=re.escape(words)):
        RunState.of(Mine(0.3)).resumed(running(Mine(0.3)) | {"compressor": described})
    assert "antigravity" not in sys.modules
