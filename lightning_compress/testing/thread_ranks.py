"""Average vectors over ranks that are threads, and compute what the laws ask about the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense, Method
from lightning_compress.collectives import Collective, CountingCollective, LocalCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.exchanges import ExchangePlan, Pattern, composite
from lightning_compress.exchanges.message import Section
from lightning_compress.testing.vectors import CPU, DENSE, LARGE, vector


def make_plan(
    method: Method,
    exchange: Pattern,
    collective: Collective,
    meter: Meter,
    dense: Layout = DENSE,
    large: Layout = LARGE,
) -> tuple[ExchangePlan, States]:
    """Return the plan of a group as the rules build it, a dense section and the method's section, and its states."""
    sections = [Section(Dense(), dense, 0), Section(method, large, dense.numel)]
    whole = Layout.of((segment.name, segment.shape) for part in (dense, large) for segment in part.segments)
    return composite.plan_with_states(sections, exchange, whole, World(collective, CPU, meter))


class Average(NamedTuple):
    """One mean on one rank: the vector before and after, the mean, the flag, and bytes counted and by the formula."""

    before: Tensor
    after: Tensor
    mean: Tensor
    flag: Tensor
    counted: int
    promised: int


def average(collective: Collective, method: Method, exchange: Pattern, flag_rank: int | None = None) -> Average:
    """Run one mean on this rank. The gradient of ``flag_rank`` is flagged as not finite."""
    meter = Meter(CPU)
    plan, _ = make_plan(method, exchange, CountingCollective(collective, meter), meter)
    before = vector(collective.rank)
    after, mean = before.clone(), torch.full_like(before, 7.0)
    flag = torch.tensor(math.nan if collective.rank == flag_rank else 0.0, dtype=torch.float32)
    plan.mean(after, mean, 5, flag)
    return Average(before, after, mean, flag, meter.bytes_sent, plan.cost.bytes_sent)


def average_on_ranks(method: Method, exchange: Pattern, size: int, flag_rank: int | None = None) -> list[Average]:
    """Run one mean on every rank."""
    if size == 1:
        return [average(LocalCollective(), method, exchange, flag_rank)]
    return run_threads(size, lambda collective: average(collective, method, exchange, flag_rank))


class Outcome(NamedTuple):
    """What the laws ask about one mean on all ranks.

    Attributes:
        agree: law 4: all ranks have the same bits.
        finite: the mean is finite.
        error: law 1: the largest error of mean plus residuals, relative to the largest element of the sum over the
            ranks.
        zero_flags: law 7: no rank got a flag, because all gradients are finite.
        counted: law 2: bytes on the transport, by rank.
        promised: law 2: bytes by the formula, by rank.
    """

    agree: bool
    finite: bool
    error: float
    zero_flags: bool
    counted: list[int]
    promised: list[int]


def outcome_of(ranks: Sequence[Average]) -> Outcome:
    """Evaluate one mean on all ranks."""
    total = torch.stack([each.before.double() for each in ranks]).sum(0)
    kept = torch.stack([each.after.double() for each in ranks]).sum(0)
    mean = ranks[0].mean
    return Outcome(
        agree=all(other.mean.equal(mean) for other in ranks),
        finite=bool(mean.isfinite().all()),
        error=float((len(ranks) * mean.double() + kept - total).abs().max() / total.abs().max()),
        zero_flags=all(float(each.flag) == 0.0 for each in ranks),
        counted=[each.counted for each in ranks],
        promised=[each.promised for each in ranks],
    )


def lost(ranks: Sequence[Average]) -> float:
    """Law 3: return the largest deviation from the exact mean; infinite if a rank kept a residual."""
    mean = torch.stack([each.before.double() for each in ranks]).mean(0)
    stays = any(bool(each.after.any()) for each in ranks)
    return math.inf if stays else float((ranks[0].mean.double() - mean).abs().max())


def flags_arrive(method: Method, exchange: Pattern, size: int) -> bool:
    """Law 7: return whether a non-finite gradient on the first or the last rank reaches all ranks."""
    return all(
        bool(each.flag.isnan())
        for bad in {0, size - 1}
        for each in average_on_ranks(method, exchange, size, flag_rank=bad)
    )


def variance_and_bias(exchange: Pattern, codec: Codec, collective: Collective, keys: int = 3) -> tuple[float, float]:
    """Law 8: return variance and squared bias of the mean of a gradient that is equal on all ranks.

    Both are averaged over ``keys`` keys and relative to the gradient's square. For an unbiased codec, the second is
    about ``1 / keys`` of the first.
    """
    plan, _ = composite.plan_with_states(
        [Section(codec, LARGE, 0)], exchange, LARGE, World(collective, CPU, Meter(CPU))
    )
    same = torch.randn(LARGE.numel, dtype=torch.float32, generator=torch.Generator().manual_seed(3))
    spread, total, mean = 0.0, torch.zeros(LARGE.numel, dtype=torch.float64), torch.empty_like(same)
    square = float(same.square().sum())
    for key in range(keys):
        plan.mean(same.clone(), mean, key, torch.tensor(0.0, dtype=torch.float32))
        spread += float((mean - same).square().sum()) / square / keys
        total += mean.double() / keys
    return spread, float((total - same).square().sum()) / square


def mean_sender(
    method: Method, exchange: Pattern, collective: Collective, large: Layout
) -> Callable[[Tensor, int], Tensor]:
    """Return a function that averages vectors ``[large.numel]`` over the ranks and leaves the residual in them."""
    plan, states = make_plan(method, exchange, collective, Meter(CPU), large=large)
    vector = torch.zeros(DENSE.numel + large.numel, dtype=torch.float32)
    mean = torch.zeros_like(vector)

    def send(given: Tensor, key: int) -> Tensor:
        vector[: DENSE.numel] = 0.0
        vector[DENSE.numel :] = given
        plan.mean(vector, mean, key, torch.tensor(0.0, dtype=torch.float32))
        commit(states)
        given.copy_(vector[DENSE.numel :])
        return mean[DENSE.numel :]

    return send


def commit(states: States, rejected: bool = False) -> None:
    """Commit all states after a step, or roll them back if ``rejected``, and poison what the next step must write."""
    for state in states.values():
        state.touch()
        state.commit(torch.tensor(rejected, dtype=torch.bool), state.layout.names)
    poison(states)


def poison(states: States) -> None:
    """Fill pending states with invalid values, so that unwritten ones are found. Owners write only their shards."""
    for state in states.values():
        if state.holder != "owner":
            state.pending.fill_(math.nan if state.pending.is_floating_point() else 0xFF)


class StepsRun(NamedTuple):
    """Several steps on one rank.

    Attributes:
        steps: the averages, one per step.
        rolled: the second step, run by a plan that rolled another step back before.
        restored: the last step, run by a new plan with the committed states.
        unwritten: names of states whose ``pending`` was NaN after a step.
        shared: states that are equal on all ranks, after the last step.
    """

    steps: list[Average]
    rolled: Average
    restored: Average
    unwritten: list[str]
    shared: dict[str, Tensor]


def run_steps(collective: Collective, method: Method, exchange: Pattern, steps: int = 4) -> StepsRun:
    """Laws 4 and 6: run several steps on this rank, with a rollback and with restored states."""

    def start() -> tuple[Callable[[int], Average], States]:
        meter = Meter(CPU)
        plan, states = make_plan(method, exchange, CountingCollective(collective, meter), meter)
        poison(states)
        sent = 0

        def step(number: int) -> Average:
            nonlocal sent
            before = vector(collective.rank, number)
            before[::7] = 0.0
            after, mean, flag = before.clone(), torch.full_like(before, 7.0), torch.tensor(0.0, dtype=torch.float32)
            plan.mean(after, mean, mix(number, 11), flag)
            counted, sent = meter.bytes_sent - sent, meter.bytes_sent
            return Average(before, after, mean, flag, counted, plan.cost.bytes_sent)

        return step, states

    unwritten: set[str] = set()

    def run(step: Callable[[int], Average], states: States, numbers: Sequence[int]) -> list[Average]:
        averages = []
        for number in numbers:
            averages.append(step(number))
            unwritten.update(name for name, state in states.items() if state.pending.isnan().any())
            commit(states)
        return averages

    step, states = start()
    whole = run(step, states, range(steps))
    shared = {name: state.committed for name, state in states.items() if state.holder == "shared"}
    step, states = start()
    run(step, states, [0])
    step(steps)
    commit(states, rejected=True)
    rolled, *_ = run(step, states, range(1, steps - 1))
    last, new = start()
    for name, state in new.items():
        state.committed.copy_(states[name].committed)
    return StepsRun(whole, rolled, last(steps - 1), sorted(unwritten), shared)
