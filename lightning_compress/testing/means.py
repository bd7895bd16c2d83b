"""Means of several ranks, which are threads, and what the laws ask of them."""

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


def group(
    method: Method,
    exchange: Pattern,
    collective: Collective,
    meter: Meter,
    dense: Layout = DENSE,
    large: Layout = LARGE,
) -> tuple[ExchangePlan, States]:
    """The plan of a group as the rules make it, a dense stretch, then the method's; and what it keeps."""
    sections = [Section(Dense(), dense, 0), Section(method, large, dense.numel)]
    whole = Layout.of((segment.name, segment.shape) for part in (dense, large) for segment in part.segments)
    return composite.plan_alone(sections, exchange, whole, World(collective, CPU, meter))


class Mean(NamedTuple):
    """One mean on one rank: the vector before and after, bytes counted on the transport and by the formula."""

    before: Tensor
    after: Tensor
    mean: Tensor
    flag: Tensor
    counted: int
    promised: int


def mean_on(collective: Collective, method: Method, exchange: Pattern, flag_rank: int | None = None) -> Mean:
    """One mean on this rank; that of ``flag_rank`` has a gradient that is not finite."""
    meter = Meter(CPU)
    plan, _ = group(method, exchange, CountingCollective(collective, meter), meter)
    before = vector(collective.rank)
    after, mean = before.clone(), torch.full_like(before, 7.0)
    flag = torch.tensor(math.nan if collective.rank == flag_rank else 0.0)
    plan.mean(after, mean, 5, flag)
    return Mean(before, after, mean, flag, meter.bytes_sent, plan.cost.bytes_sent)


def means(method: Method, exchange: Pattern, size: int, flag_rank: int | None = None) -> list[Mean]:
    """One mean on every rank."""
    if size == 1:
        return [mean_on(LocalCollective(), method, exchange, flag_rank)]
    return run_threads(size, lambda collective: mean_on(collective, method, exchange, flag_rank))


class Outcome(NamedTuple):
    """What the laws ask of one mean on every rank.

    Attributes:
        agree: law 4: all ranks have the same bits.
        error: law 1: the largest part of the sum over the ranks that is neither in the mean nor left on a rank, over
            the largest of the sum.
        zero_flags: law 7: where all is finite, no rank is told otherwise.
        counted: law 2: bytes on the transport, by rank.
        promised: law 2: bytes by the formula, by rank.
    """

    agree: bool
    finite: bool
    error: float
    zero_flags: bool
    counted: list[int]
    promised: list[int]


def outcome_of(ranks: Sequence[Mean]) -> Outcome:
    """Look at one mean on every rank."""
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


def lost(ranks: Sequence[Mean]) -> float:
    """Law 3: by how much, at most, this is not the mean itself; infinite where anything stays behind."""
    mean = torch.stack([each.before.double() for each in ranks]).mean(0)
    stays = any(bool(each.after.any()) for each in ranks)
    return math.inf if stays else float((ranks[0].mean.double() - mean).abs().max())


def flags_arrive(method: Method, exchange: Pattern, size: int) -> bool:
    """Law 7: a gradient that is not finite, on the first rank or the last, reaches every rank."""
    return all(
        bool(each.flag.isnan()) for bad in {0, size - 1} for each in means(method, exchange, size, flag_rank=bad)
    )


def noise(exchange: Pattern, codec: Codec, collective: Collective, keys: int = 3) -> tuple[float, float]:
    """Law 8, of a gradient that is equal on all ranks: variance of the mean, and its squared error averaged over keys.

    Both are over the square of the gradient. The second one is ``1 / keys`` of the first where the codec is unbiased.
    """
    plan, _ = composite.plan_alone([Section(codec, LARGE, 0)], exchange, LARGE, World(collective, CPU, Meter(CPU)))
    same = torch.randn(LARGE.numel, generator=torch.Generator().manual_seed(3))
    spread, total, mean = 0.0, torch.zeros(LARGE.numel, dtype=torch.float64), torch.empty_like(same)
    square = float(same.square().sum())
    for key in range(keys):
        plan.mean(same.clone(), mean, key, torch.tensor(0.0))
        spread += float((mean - same).square().sum()) / square / keys
        total += mean.double() / keys
    return spread, float((total - same).square().sum()) / square


def mean_sender(
    method: Method, exchange: Pattern, collective: Collective, large: Layout
) -> Callable[[Tensor, int], Tensor]:
    """The mean over the ranks of vectors ``[large.numel]``, step by step, in which what is not sent is left."""
    plan, states = group(method, exchange, collective, Meter(CPU), large=large)
    vector, mean = torch.zeros(DENSE.numel + large.numel), torch.zeros(DENSE.numel + large.numel)

    def send(given: Tensor, key: int) -> Tensor:
        vector[: DENSE.numel] = 0.0
        vector[DENSE.numel :] = given
        plan.mean(vector, mean, key, torch.tensor(0.0))
        commit(states)
        given.copy_(vector[DENSE.numel :])
        return mean[DENSE.numel :]

    return send


def commit(states: States, rejected: bool = False) -> None:
    """After a step: all states were written, and are committed, or rolled back; what comes next is not written yet."""
    for state in states.values():
        state.touch()
        state.commit(torch.tensor(rejected), state.layout.names)
    spoil(states)


def spoil(states: States) -> None:
    """Fill what is to be written with numbers that nobody wrote; owners write only what is theirs."""
    for state in states.values():
        if state.holder != "owner":
            state.pending.fill_(math.nan if state.pending.is_floating_point() else 0xFF)


class Walk(NamedTuple):
    """Steps on one rank.

    Attributes:
        steps: one after the other.
        rolled: the second one again, by a plan that rolled another one back before it.
        restored: the last one again, by a new plan that was given the committed states.
        spoilt: names of states whose ``pending`` was not a number after a step.
        shared: states that all ranks have in common, after the last step.
    """

    steps: list[Mean]
    rolled: Mean
    restored: Mean
    spoilt: list[str]
    shared: dict[str, Tensor]


def walk_on(collective: Collective, method: Method, exchange: Pattern, steps: int = 4) -> Walk:
    """Laws 4 and 6: what a rank's steps depend on."""

    def begun() -> tuple[Callable[[int], Mean], States]:
        meter = Meter(CPU)
        plan, states = group(method, exchange, CountingCollective(collective, meter), meter)
        spoil(states)
        sent = 0

        def step(number: int) -> Mean:
            nonlocal sent
            before = vector(collective.rank, number)
            before[::7] = 0.0
            after, mean, flag = before.clone(), torch.full_like(before, 7.0), torch.tensor(0.0)
            plan.mean(after, mean, mix(number, 11), flag)
            counted, sent = meter.bytes_sent - sent, meter.bytes_sent
            return Mean(before, after, mean, flag, counted, plan.cost.bytes_sent)

        return step, states

    spoilt: set[str] = set()

    def walked(step: Callable[[int], Mean], states: States, numbers: Sequence[int]) -> list[Mean]:
        found = []
        for number in numbers:
            found.append(step(number))
            spoilt.update(name for name, state in states.items() if state.pending.isnan().any())
            commit(states)
        return found

    step, states = begun()
    whole = walked(step, states, range(steps))
    shared = {name: state.committed for name, state in states.items() if state.holder == "shared"}
    step, states = begun()
    walked(step, states, [0])
    step(steps)
    commit(states, rejected=True)
    rolled, *_ = walked(step, states, range(1, steps - 1))
    last, new = begun()
    for name, state in new.items():
        state.committed.copy_(states[name].committed)
    return Walk(whole, rolled, last(steps - 1), sorted(spoilt), shared)
