"""Combine plans of sections whose methods use different exchanges into one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.core.state import State, States, StateSpec
from lightning_compress.exchanges.exchange import Cost, ExchangePlan, Pattern, gather, scatter
from lightning_compress.exchanges.message import Section, zero_nonfinite
from lightning_compress.reducers import Reducer, ReducerPlan

EXCHANGE = "exchange"
"""The prefix of an exchange's state names."""


def state_specs(sections: Sequence[Section], exchange: Pattern, layout: Layout) -> dict[str, StateSpec]:
    """Return what reducers and the exchange keep for vectors of this layout, by the states' names.

    A reducer's state name contains the index of its rule, so that it stays valid when other settings change.
    """
    kept = exchange.keeper.state(layout) if exchange.keeper else {}
    return {
        f"{_keeper(section)}.{name}": each
        for section in sections
        if isinstance(section.method, Reducer)
        for name, each in section.method.state(section.layout).items()
    } | {f"{EXCHANGE}.{name}": each for name, each in kept.items()}


def new_states(specs: Mapping[str, StateSpec], device: torch.device) -> States:
    """Return new states for these specs, at their initial values."""
    return {name: State(each.layout, device, each.initial, each.holder, each.dtype) for name, each in specs.items()}


def plan_with_states(
    sections: Sequence[Section], exchange: Pattern, layout: Layout, world: World
) -> tuple[ExchangePlan, States]:
    """Return a plan for vectors of this layout with new states, and these states; see ``plan_group``."""
    states = new_states(state_specs(sections, exchange, layout), world.device)
    return plan_group(sections, exchange, world, states), states


def codec_sections(sections: Sequence[Section]) -> list[Section]:
    """Return the sections whose methods are codecs. An exchange averages them."""
    return [each for each in sections if isinstance(each.method, Codec)]


def plan_group(sections: Sequence[Section], exchange: Pattern, world: World, states: States) -> ExchangePlan:
    """Return the plan for vectors that consist of these sections.

    Args:
        sections: what the vectors consist of.
        exchange: averages the sections of codecs.
        world: the ranks.
        states: the states that ``state_specs`` names.
    """
    messages = codec_sections(sections)
    if len(messages) == len(sections):
        return exchange.plan(messages, world, states_of(EXCHANGE, states))
    messages = [replace(each, marks=None) for each in messages]  # reducers send none
    carries = all(isinstance(section.codec, Dense) for section in messages)
    carried = 1 + sum(section.layout.numel for section in messages) if carries else 0
    plans: list[tuple[slice, ReducerPlan]] = []
    for section in sections:
        if isinstance(section.method, Reducer):
            kept = states_of(_keeper(section), states)
            plans.append((section.span, section.method.plan(section.layout, 0 if plans else carried, world, kept)))
    if carries:
        return _ReducersPlan(plans, [section.span for section in messages], carried, world)
    both = exchange.plan(messages, world), _ReducersPlan(plans, [], 0, world)
    return CompositePlan(both, (1.0, 1.0), "exchange and reducer", one_key=True)


def _keeper(section: Section) -> str:
    return f"{type(section.method).__name__}{section.number}"


def states_of(keeper: str, states: States) -> States:
    """Return the states of one method, or of the exchange, without their prefix."""
    prefix = f"{keeper}."
    return {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}


class CompositePlan(ExchangePlan):
    """Runs plans one after the other, each for other sections of the same vector.

    Args:
        plans: the plans; their flags are added.
        shares: each plan's share of the vector, which scales its cost; 1.0 if the other plans' costs have no multiples
            of the vector.
        description: for the log; empty: the plans' descriptions.
        one_key: the plans already draw from different random streams.
    """

    def __init__(
        self, plans: Sequence[ExchangePlan], shares: Sequence[float], description: str = "", one_key: bool = False
    ) -> None:
        self._plans = plans
        self._one_key = one_key
        self._shares = shares
        self.cost = sum((plan.cost.scaled(share) for plan, share in zip(plans, shares, strict=True)), Cost())
        self.description = description or ", ".join(plan.description for plan in plans)
        self.dense_spans = [span for plan in plans for span in plan.dense_spans]
        self.marked = all(plan.marked for plan in plans)

    @property
    def compared(self) -> Cost:
        """See ``ExchangePlan.compared``."""
        costs = (plan.compared.scaled(share) for plan, share in zip(self._plans, self._shares, strict=True))
        return sum(costs, Cost())

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        """See ``ExchangePlan.average``."""
        for number, plan in enumerate(self._plans):
            plan.mean(vector, out, key if self._one_key else mix(key, number), flag)


class _ReducersPlan(ExchangePlan):
    """Averages sections by reducers. The flag and the dense elements travel with the first reducer's values.

    Args:
        plans: each with the slice of the vector that it averages.
        dense: slices that stay dense.
        carried: one, for the flag, plus the number of dense elements; 0: another plan averages both.
        world: the ranks.
    """

    description = "reducer"

    def __init__(
        self, plans: Sequence[tuple[slice, ReducerPlan]], dense: Sequence[slice], carried: int, world: World
    ) -> None:
        self._plans, self._dense = plans, dense
        self._carried = torch.zeros(carried, dtype=torch.float32, device=world.device)
        self._nothing = self._carried[:0]
        self._weight, self._device = 1 / world.collective.size, world.device
        self._fused = kernels.backend(__name__, world.device, "triton")
        sent, rounds = (sum(each) for each in zip(*((plan.bytes_sent, plan.rounds) for _, plan in plans), strict=True))
        self.cost = Cost(bytes_sent=sent, rounds=rounds)

    @cached_property
    def _tiles(self) -> tuple[Tensor, Tensor]:
        """What the kernels are told of the dense elements, and of all."""
        assert self._fused
        dense = self._fused.table(self._dense, 1, self._device)
        others = self._fused.table([span for span, _ in self._plans], -1, self._device)
        return dense, torch.cat([dense, others])

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        carried = self._carried
        if len(carried):
            self._carry(vector, flag)
        for number, (span, plan) in enumerate(self._plans):
            plan.mean(vector[span], out[span], self._nothing if number else carried, mix(key, number))
        if self._fused:
            self._fused.finish(carried, self._weight, self._tiles[1], out, flag)
            return
        if len(carried):
            torch.mul(carried[0], 0.0, out=flag)  # 0.0 or NaN, for any bytes
            means = carried[1:].mul_(self._weight)
            zero_nonfinite(means, flag)  # sums may overflow, then on all ranks
            scatter(means, self._dense, out)
        for span, _ in self._plans:
            zero_nonfinite(out[span], flag)

    def _carry(self, vector: Tensor, flag: Tensor) -> None:
        """Move the dense elements to where they are summed, after the flag."""
        if self._fused:
            self._fused.carry(vector, flag, self._tiles[0], self._carried)
            return
        self._carried[0] = flag
        gather(vector, self._dense, self._carried[1:])
        for span in self._dense:
            vector[span] = 0.0
