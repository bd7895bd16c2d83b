"""From what the rules chose for a group to one plan that leaves the mean of all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense, Method
from lightning_compress.collectives import World
from lightning_compress.core.random import mix
from lightning_compress.core.state import Declared, States
from lightning_compress.exchanges import Exchange, ExchangePlan
from lightning_compress.exchanges.message import Section
from lightning_compress.reducers import Reducer, ReducerPlan
from lightning_compress.settings.rules import Stretch

EXCHANGE = "exchange"
"""Under which name an exchange's state is kept."""


def declared(stretches: Sequence[Stretch]) -> dict[str, Declared]:
    """What the group's reducers keep, by names that say which rule it belongs to, and outlive other settings."""
    return {
        f"{_keeper(stretch)}.{name}": each
        for stretch in stretches
        if isinstance(stretch.method, Reducer)
        for name, each in stretch.method.state(stretch.layout).items()
    }


def everything(method: Method) -> bool:
    """What all methods leave is fed back."""
    return True


def sections_of(stretches: Sequence[Stretch], fed_back: Callable[[Method], bool] = everything) -> list[Section]:
    """What codecs take care of; ``fed_back`` says whether somebody asks for what a method leaves."""
    return [
        Section(each.method, each.layout, each.start, fed_back(each.method))
        for each in stretches
        if isinstance(each.method, Codec)
    ]


def plan_group(
    stretches: Sequence[Stretch],
    exchange: Exchange,
    world: World,
    states: States,
    fed_back: Callable[[Method], bool] = everything,
) -> ExchangePlan:
    """Make ready for vectors that consist of these stretches; ``states`` has what ``declared`` names."""
    sections = sections_of(stretches, fed_back)
    if len(sections) == len(stretches):
        return exchange.plan(sections, world, states_of(EXCHANGE, states))
    dense = all(isinstance(section.codec, Dense) for section in sections)
    carried = 1 + sum(section.layout.numel for section in sections) if dense else 0
    plans: list[tuple[slice, ReducerPlan]] = []
    for stretch in stretches:
        if isinstance(stretch.method, Reducer):
            own = states_of(_keeper(stretch), states)
            weight = 0 if plans else carried
            plans.append((stretch.place, stretch.method.plan(stretch.layout, weight, world, own)))
    if not dense:
        return _Beside(exchange.plan(sections, world), plans)
    return _Carrying([slice(section.start, section.stop) for section in sections], plans, carried, world)


def _keeper(stretch: Stretch) -> str:
    return f"{type(stretch.method).__name__}{stretch.number}"


def states_of(keeper: str, states: States) -> States:
    """What a method, or the exchange, declared."""
    prefix = f"{keeper}."
    return {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}


class _Carrying(ExchangePlan):
    """Everything by reducers; the flag and what stays dense are summed along with the first one's numbers."""

    description = "reducer"

    def __init__(
        self, dense: Sequence[slice], plans: Sequence[tuple[slice, ReducerPlan]], carried: int, world: World
    ) -> None:
        self._dense = dense
        self._plans = plans
        self._carried = torch.zeros(carried, device=world.device)
        self._nothing = torch.zeros(0, device=world.device)
        self._weight = 1 / world.collective.size
        self.bytes_sent = sum(plan.bytes_sent for _, plan in plans)
        self.rounds = sum(plan.rounds for _, plan in plans)

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        self._carried[0] = flag
        end = 1
        for place in self._dense:
            numel = place.stop - place.start
            self._carried[end : end + numel] = vector[place]
            vector[place] = 0.0
            end += numel
        _run(self._plans, vector, out, self._carried, self._nothing, key)
        torch.mul(self._carried[0], 0.0, out=flag)  # 0.0 or NaN, whatever a rank sent
        end = 1
        for place in self._dense:
            numel = place.stop - place.start
            torch.mul(self._carried[end : end + numel], self._weight, out=out[place])
            end += numel


class _Beside(ExchangePlan):
    """Codecs by an exchange, reducers beside it."""

    description = "exchange and reducer"

    def __init__(self, exchange: ExchangePlan, plans: Sequence[tuple[slice, ReducerPlan]]) -> None:
        self._exchange = exchange
        self._plans = plans
        self.dense_places = exchange.dense_places
        self.priced_as([exchange], [1.0])
        self.sum_ranks = exchange.sum_ranks
        self.bytes_sent += sum(plan.bytes_sent for _, plan in plans)
        self.rounds += sum(plan.rounds for _, plan in plans)

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        self._exchange.mean(vector, out, key, flag)
        nothing = vector[:0]
        _run(self._plans, vector, out, nothing, nothing, key)


def _run(
    plans: Sequence[tuple[slice, ReducerPlan]], vector: Tensor, out: Tensor, carried: Tensor, nothing: Tensor, key: int
) -> None:
    for number, (place, plan) in enumerate(plans):
        plan.mean(vector[place], out[place], nothing if number else carried, mix(key, number))
