"""What plans say of their cost, and that asking for it costs nothing."""

import gc
import weakref
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_compress.codecs import BF16, Codec, Dense, OneBit, Rotated, TopK
from lightning_compress.collectives import LocalCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.atomo import ATOMO
from lightning_compress.contrib.exchanges.ok_topk import OkTopK
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.exchanges import AllReduce, Hierarchical, TwoShot
from lightning_compress.exchanges.composite import CompositePlan, plan_group
from lightning_compress.exchanges.exchange import Cost
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import Link, Speeds, device_seconds, wire_seconds
from lightning_compress.reducers import PowerSGD
from tests.cases import CASES
from tests.turns import by_turns

CPU = torch.device("cpu")
SLOW = Link(1e-6, 1e7)
NUMEL = 1 << 22
CODECS = {case.name: case.codec for case in CASES if isinstance(case.codec, Codec)}


class Ranks(LocalCollective):
    """One of many, which nobody talks to."""

    def __init__(self, size):
        self.rank, self.size = 1, size

    def part(self, ranks):
        return Ranks(len(next(each for each in ranks if self.rank in each)))


class Largest(TorchDispatchMode):
    """The most bytes of a new tensor in memory."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:  # no view
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return made


def sections(*codecs, numel=NUMEL):
    layouts = [Layout.of([(f"p{number}", (numel // 256, 256))]) for number in range(len(codecs))]
    return [Section(codec, layouts[number], numel * number) for number, codec in enumerate(codecs)]


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if not isinstance(codec, ATOMO)])
def test_prices_take_no_memory(name, size):
    exchange = Auto("never", SLOW, node_size=4)
    parts = sections(CODECS[name], OneBit())
    exchange.plan(parts, World(Ranks(size), CPU, Meter(CPU)))  # which compiles, and makes what all plans share
    with Largest() as largest:
        plan = exchange.plan(parts, World(Ranks(size), CPU, Meter(CPU)))
    assert plan.cost.bytes_sent > 0
    assert largest.bytes <= NUMEL / 2  # randomk keeps the places that it drew


@pytest.mark.parametrize(
    ("codecs", "size"),
    by_turns([(Rotated(),), (OneBit(), TopK(0.01)), (BF16(), OneBit(), Dense())], (2, 4, 8, 64), 2, repr),
)
def test_only_the_winner_lives_on(codecs, size, monkeypatch):
    made, price = [], Auto._offer

    def watched(*given):
        offer = price(*given)
        made.append(weakref.ref(offer.plan))
        return offer

    monkeypatch.setattr(Auto, "_offer", watched)
    gc.collect()
    gc.disable()
    try:
        plan = Auto("never", SLOW, node_size=4).plan(sections(*codecs), World(Ranks(size), CPU, Meter(CPU)))
        assert len(made) > 1
        assert plan.cost.bytes_sent > 0
        alive = [offered() for offered in made if offered()]
        assert all(each is plan or each in getattr(plan, "_plans", ()) for each in alive)
    finally:
        gc.enable()


FIELDS = get_type_hints(Cost)


def numbered(plan, factor):
    """The same with another number in each field, so that none is left out by chance."""
    plan.cost = Cost(*(kind(factor * (number + 1)) for number, kind in enumerate(FIELDS.values())))
    return plan


def test_several_plans_cost_the_sum_of_their_parts():
    parts = [numbered(AllReduce().plan(sections(Dense()), World(Ranks(4), CPU, Meter(CPU))), each) for each in (3, 70)]
    both = CompositePlan(parts, [0.25, 0.75])
    for name, kind in FIELDS.items():
        one, other = (getattr(part.cost, name) for part in parts)
        whole = max(one, other) if name == "parts" else one + other
        assert getattr(both.cost, name) == (0.25 * one + 0.75 * other if kind is float else whole), name
    assert wire_seconds(both.cost, SLOW) == pytest.approx(sum(wire_seconds(part.cost, SLOW) for part in parts))
    speeds = Speeds(1e-9, 2e-9)  # calls that take no time: they are counted by section
    apart = [device_seconds(part.cost, [(share, speeds)], 1e-9) for part, share in zip(parts, (100, 300), strict=True)]
    assert device_seconds(both.cost, [(100, speeds), (300, speeds)], 1e-9) == pytest.approx(sum(apart))


@pytest.mark.parametrize("codecs", [(TopK(0.01), Rotated()), (TopK(0.01), OneBit(), BF16())], ids=repr)
def test_auto_drops_nothing_of_what_goes_apart(codecs):
    plan = Auto("never", SLOW).plan(sections(*codecs), World(Ranks(8), CPU, Meter(CPU)))
    parts = plan._plans
    assert plan.cost.calls == sum(part.cost.calls for part in parts)
    assert plan.cost.decodes == pytest.approx(sum(part.cost.decodes for part in parts) / len(parts))
    assert plan.cost.copies == pytest.approx(sum(part.cost.copies for part in parts) / len(parts))
    assert plan.cost.encodes == pytest.approx(sum(part.cost.encodes for part in parts) / len(parts))


def test_a_step_that_is_remembered_costs_what_it_is():
    exchange, given = OkTopK(), sections(TopK(0.01))
    states = {
        name: State(each.layout, CPU, each.initial, each.holder)
        for name, each in exchange.keeper.state(given[0].layout).items()
    }
    world = World(Ranks(4), CPU, Meter(CPU))
    plan = exchange.keeper.plan_dense(exchange, given, world, states)
    inner = AllReduce().plan([replace(each, method=Dense()) for each in given], world)
    assert plan.cost == inner.cost
    assert plan.is_dense(slice(0, NUMEL))


def test_reducers_beside_an_exchange_cost_both():
    def rank(collective):
        layout = Layout.of([("a", (64, 64))])
        method = PowerSGD(rank=2)
        states = {
            f"PowerSGD0.{name}": State(each.layout, CPU, each.initial, each.holder)
            for name, each in method.state(layout).items()
        }
        world = World(collective, CPU, Meter(CPU))
        sections = [Section(OneBit(), layout, 0), Section(method, layout, layout.numel)]
        exchange = Hierarchical(TwoShot(), 2)
        return plan_group(sections, exchange, world, states), exchange.plan([Section(OneBit(), layout, 0)], world)

    for both, alone in run_threads(4, rank):
        changed = {name for name in FIELDS if getattr(both.cost, name) != getattr(alone.cost, name)}
        assert changed == {"bytes_sent", "rounds"}
