"""Compressors that are made known by a name: by a call, or by an installed package."""

import dataclasses
import re
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

import lightning_compress
from lightning_compress import CompressedDDPStrategy, compare, register
from lightning_compress.codecs import CODECS, Codec, TopK
from lightning_compress.contrib.codecs import TernGrad
from lightning_compress.contrib.reducers.signsgd import SignSGD
from lightning_compress.core import registry
from lightning_compress.corrections import DGC
from lightning_compress.exchanges import EXCHANGES, AllGather
from lightning_compress.exchanges.hierarchical import PLAIN
from lightning_compress.gossip import ALGORITHMS, DPSGD
from lightning_compress.gossip.build import build_algorithm
from lightning_compress.reducers import REDUCERS
from lightning_compress.settings.parsing import COMPRESSORS, build_compressor, build_exchange
from lightning_compress.settings.run_state import RunState
from tests.core.test_outside import running

TABLES = (CODECS, REDUCERS, COMPRESSORS, EXCHANGES, PLAIN, ALGORITHMS)


@dataclasses.dataclass(frozen=True)
class Mine(TopK):
    """A codec of one's own."""

    density: float = 0.05


@dataclasses.dataclass(frozen=True)
class Votes(SignSGD):
    """A reducer of one's own."""


@pytest.fixture(autouse=True)
def _clean():
    before = [dict(table) for table in TABLES]
    registry._offered.cache_clear()
    yield
    registry._offered.cache_clear()
    for table, names in zip(TABLES, before, strict=True):
        table.clear()
        table.update(names)


@pytest.fixture
def offered(monkeypatch):
    """Let packages offer compressors; returns how often that was read."""
    reads = []

    def offer(**points):
        found = [
            EntryPoint(name, value, registry.COMPRESSORS)
            for name, values in points.items()
            for value in ([values] if isinstance(values, str) else values)
        ]
        registry._offered.cache_clear()
        monkeypatch.setattr(registry, "entry_points", lambda group: reads.append(group) or found)
        return reads

    return offer


def test_a_name_is_as_good_as_one_of_ours():
    register("mine", Mine)
    assert build_compressor("mine") == Mine()
    assert build_compressor({"name": "mine", "density": 0.3}) == Mine(0.3)
    assert CompressedDDPStrategy(compressor="mine", rules=[{"kind": "conv", "compressor": "mine"}])
    assert DGC(sparsifier="mine").codec == Mine()
    gradients = {"weight": torch.randn(64, 64)}
    assert [row.compressor for row in compare(gradients, ["mine", {"name": "mine", "density": 0.2}]).rows] == [
        "mine",
        "mine density=0.2",
    ]
    assert "mine" in [row.compressor for row in compare(gradients).rows]
    with pytest.raises(ValueError, match="'mine' has no setting 'levels'; it has: density"):
        build_compressor({"name": "mine", "levels": 3})


def test_a_reducer_too():
    register("votes", Votes)
    assert build_compressor("votes") == Votes()
    assert "votes" in REDUCERS
    assert "votes" not in CODECS


def test_retuned_and_resumed_by_name():
    register("mine", Mine)
    settings = RunState.of("topk").retuned("mine", {}).retuned(None, {"density": 0.2})
    assert settings.compressor == Mine(0.2)
    state = running(Mine(0.2))
    assert state["compressor"]["name"] == "mine"
    assert RunState.of("topk").resumed(state).compressor == Mine(0.2)
    assert RunState.of("mine").resumed(state).compressor == Mine(0.2)


def test_a_state_from_before_it_was_registered():
    state = running(Mine(0.2))
    assert state["compressor"]["class"] == "tests.core.test_registered.Mine"
    register("mine", Mine)
    assert RunState.of("mine").resumed(state).compressor == Mine(0.2)


def test_a_state_whose_name_is_not_registered_any_more(offered):
    register("mine", Mine)
    state = running(Mine(0.2))
    for table in TABLES:
        table.pop("mine", None)
    offered(mine="antigravity:Codec")
    for given in ("topk", Mine(0.3)):
        with pytest.raises(ValueError, match=re.escape("lightning_compress.register('mine', its class) first")):
            RunState.of(given).resumed(state)
    assert "antigravity" not in sys.modules  # a file's word imports nothing, though a package offers it


def test_a_state_by_name_where_the_class_itself_is_given(offered):
    """As by ``_target_``: a package offers the class under the name, and it is imported already."""
    register("mine", Mine)
    state = running(Mine(0.2))
    for table in TABLES:
        table.pop("mine", None)
    offered(mine=f"{__name__}:Mine")
    assert RunState.of(Mine(0.3)).resumed(state).compressor == Mine(0.2)


def without(*bases, **attributes):
    return dataclasses.dataclass(frozen=True)(type("Odd", bases, {"__annotations__": {}, **attributes}))


@pytest.mark.parametrize(
    ("name", "cls", "words"),
    [
        ("topk", Mine, "'topk' is already the name of lightning_compress.codecs.sparse.topk.TopK"),
        ("auto", Mine, "'auto' is already the name of lightning_compress.settings.automatic.Automatic"),
        ("mine", dict, "pass a class derived from lightning_compress.Codec, lightning_compress.Reducer, Corrected"),
        ("mine", int, "Reducer, Corrected, Exchange or Algorithm"),
        ("mine", Mine(), "pass a class derived from"),
        ("my codec", Mine, "letters, digits and underscores"),
        (7, Mine, "letters, digits and underscores"),
        ("mine", without(Codec), "the class lacks plan"),
        ("mine", type("Odd", (Codec,), {"plan": None}), "decorate it with @dataclass(frozen=True)"),
        ("mine", without(Codec, plan=None, __annotations__={"bits": int}), "'bits' needs a default"),
        ("mine", without(Codec, plan=None, __annotations__={"name": str}, name=""), "cannot be called 'name'"),
    ],
)
def test_what_cannot_be_registered(name, cls, words):
    before = [dict(table) for table in TABLES]
    with pytest.raises(ValueError, match=re.escape(words)):
        register(name, cls)
    assert [dict(table) for table in TABLES] == before


def test_registered_twice():
    register("mine", Mine)
    register("mine", Mine)
    again = dataclasses.dataclass(frozen=True)(type("Mine", (TopK,), {"__module__": __name__}))
    register("mine", again)  # as a cell of a notebook that is run again
    assert build_compressor("mine") == again()
    with pytest.raises(ValueError, match="is already the name of"):
        register("mine", Votes)


def test_a_package_offers_one(offered):
    reads = offered(mine=f"{__name__}:Mine", broken="nosuch.module:Codec")
    assert build_compressor("topk") == TopK()
    assert not reads  # what is known is not looked for
    assert build_compressor({"name": "mine", "density": 0.3}) == Mine(0.3)
    assert CODECS["mine"] is Mine
    with pytest.raises(ValueError, match=r"unknown compressor 'other'; there are: auto, .*, mine, broken"):
        build_compressor("other")
    assert reads == [registry.COMPRESSORS]  # once
    assert "broken" not in COMPRESSORS


def test_a_sparsifier_that_a_package_offers(offered):
    offered(mine=f"{__name__}:Mine")
    assert DGC(sparsifier="mine").codec == Mine()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nosuch.module:Codec", "which cannot be imported (ModuleNotFoundError: No module named 'nosuch'); repair or"),
        (f"{__name__}:Nosuch", "which cannot be imported (AttributeError"),
        (f"{__name__}:TABLES", "which cannot be registered: register('mine', "),
        ([f"{__name__}:Mine", f"{__name__}:Votes"], "both offer the compressor 'mine'; uninstall one of them"),
    ],
)
def test_a_bad_offer_is_refused_where_it_is_named(offered, value, words):
    offered(mine=value)
    assert build_compressor("onebit")
    with pytest.raises(ValueError, match=re.escape(words)):
        build_compressor("mine")


def test_a_registered_name_is_stronger_than_an_offer(offered):
    offered(mine="nosuch.module:Codec", topk="nosuch.module:Codec")
    register("mine", Mine)
    assert build_compressor("mine") == Mine()
    assert build_compressor("topk") == TopK()


def test_what_we_offer_is_stronger_than_what_others_do(monkeypatch):
    theirs = EntryPoint("terngrad", f"{__name__}:Mine", registry.COMPRESSORS)
    ours = EntryPoint("terngrad", "lightning_compress.contrib.codecs.terngrad:TernGrad", registry.COMPRESSORS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [theirs, ours])
    for table in TABLES:
        table.pop("terngrad", None)
    registry._offered.cache_clear()
    with pytest.raises(ValueError, match=r"is already the name of lightning_compress.contrib.codecs.terngrad.TernGrad"):
        register("terngrad", Mine)
    assert type(build_compressor("terngrad")).__name__ == "TernGrad"


def test_names_of_ours_without_an_installation_say_so(offered):
    offered()
    with pytest.raises(ValueError, match=r"here are: .*; lightning_compress is not installed, or in another version"):
        build_exchange("butterfly_of_mine")


def test_a_state_of_what_we_offer_needs_nothing_from_the_user():
    state = running({"name": "terngrad", "clip": 1.5})
    for table in TABLES:
        table.pop("terngrad", None)
    assert state["compressor"]["name"] == "terngrad"
    assert RunState.of("topk").resumed(state).compressor.clip == 1.5
    direct = running(TernGrad(1.5))  # by its class, as Hydra does
    assert direct["compressor"] == state["compressor"]


@dataclasses.dataclass(frozen=True)
class Ring(AllGather):
    """An exchange of one's own."""


@dataclasses.dataclass(frozen=True)
class Alone(DPSGD):
    """An algorithm of one's own."""


def test_exchanges_and_algorithms_too(offered):
    offered(ring=f"{__name__}:Ring", alone=f"{__name__}:Alone")
    assert build_exchange("ring") == Ring()
    assert build_exchange({"name": "hierarchical", "outer": "ring"}).outer == Ring()
    assert build_algorithm("alone") == Alone()
    with pytest.raises(ValueError, match="unknown exchange 'alone'"):
        build_exchange("alone")


def test_what_one_derives_from_is_public():
    names = {"Codec", "Plan", "Reducer", "ReducerPlan", "Exchange", "ExchangePlan", "register"}
    assert names <= set(lightning_compress.__all__)
