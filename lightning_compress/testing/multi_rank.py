"""Checks of the laws for a method on several ranks, which are threads."""

from __future__ import annotations

import torch

from lightning_compress.codecs import Codec, Method
from lightning_compress.codecs.codec import aligned
from lightning_compress.collectives import Collective, LocalCollective, run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather, Pattern, TwoShot
from lightning_compress.testing.bias import ADVICE, KEYS, Measure, T, check_sent
from lightning_compress.testing.laws import law
from lightning_compress.testing.thread_ranks import (
    Average,
    StepsRun,
    average_on_ranks,
    flags_arrive,
    mean_sender,
    outcome_of,
    run_steps,
    variance_and_bias,
)
from lightning_compress.testing.vectors import CPU, DENSE, LARGE, make


def check_multi_rank(method: Method, exchange: Pattern, count: int, where: str, rounding: float) -> None:
    """Check one mean over the ranks."""
    result = outcome_of(average_on_ranks(method, exchange, count))
    law(4, result.agree, f"{where}: ranks have different means")
    law(4, result.finite, f"{where}: the mean of finite gradients is not finite")
    room = count * max(1e-6, rounding)
    conserved = not method.conserves or result.error <= room
    law(
        1,
        conserved,
        f"{where}: mean and residuals differ from the sum by {result.error:.3g}, more than {room:.3g}",
    )
    law(7, result.zero_flags, f"{where}: finite gradients are flagged")
    law(7, flags_arrive(method, exchange, count), f"{where}: a gradient that is not finite does not reach all ranks")
    counted, promised = result.counted, result.promised
    if not isinstance(method, Codec):  # a reducer's first step may differ: see check_steps
        return
    plan = method.plan(LARGE, CPU)
    if plan.variable:  # lengths travel too
        most = (count - 1) * (64 + aligned(4 * DENSE.numel) + aligned(plan.message_size))
        if isinstance(exchange, AllGather):
            law(2, max(counted) <= most, f"{where} sent {counted} bytes, but messages take at most {most}")
    elif not method.sparse or isinstance(exchange, AllGather | TwoShot):
        law(2, counted == promised, f"{where} sent {counted} bytes, but the plan says {promised}")


def check_steps(method: Method, exchange: Pattern, count: int, where: str, rounding: float) -> None:
    """Check several means in a row: the states that a method keeps, and whether everything arrives."""
    ranks = run_threads(count, lambda collective: run_steps(collective, method, exchange))
    for rank, run in enumerate(ranks):
        _check_states(run, ranks[0], f"{where}: rank {rank}")
    for number, step in enumerate(zip(*(rank.steps for rank in ranks), strict=True)):
        result, at = outcome_of(step), f"{where}, step {number + 1}"
        law(4, result.agree and result.finite, f"{at}: ranks have different means, or numbers that are not finite")
        law(7, result.zero_flags, f"{at}: finite gradients are flagged")
        conserved = not method.conserves or result.error <= count * max(1e-6, rounding)
        law(1, conserved, f"{at}: mean and residuals differ from the sum by {result.error:.3g}")
        zeros = torch.stack([each.before == 0 for each in step]).all(0)
        zeros_kept = not method.keeps_zeros or not step[0].mean[zeros].any()
        law(8, zeros_kept, f"{at} is declared keeps_zeros, but the mean is not zero where all ranks have zeros")
    if not isinstance(method, Codec):
        counted, promised = result.counted, result.promised
        law(2, counted == promised, f"{at} sent {counted} bytes, but the plan says {promised}")
    for rank, run in enumerate(ranks):
        goes_on = f"{where}: rank {rank} continues differently"
        figures = "after a step that was rolled back; read state from state.base(), and write it to state.pending"
        law(6, _equal(run.rolled, run.steps[1]), f"{goes_on} {figures}")
        figures = "with a new plan and the saved states; declare in state() everything that is kept between steps"
        law(6, _equal(run.restored, run.steps[-1]), f"{goes_on} {figures}")
    check_sent(method, where, lambda whole, measure: _measured(method, exchange, count, whole, measure))


def _check_states(run: StepsRun, first: StepsRun, where: str) -> None:
    for name in run.unwritten:
        figures = f"the state {name.partition('.')[2]!r} is not written, or not finite, after a step"
        law(6, False, f"{where}: {figures}; read state.base(), write all of state.pending in every mean")
    for name, numbers in run.shared.items():
        figures = f"the state {name.partition('.')[2]!r} is declared 'shared', but differs from rank 0's"
        law(6, numbers.equal(first.shared[name]), f"{where}: {figures}; declare it 'rank'")


def _equal(one: Average, other: Average) -> bool:
    return one.mean.equal(other.mean) and one.after.equal(other.after)


def _measured(method: Method, exchange: Pattern, count: int, whole: Layout, measure: Measure[T]) -> T:
    vectors = [make("normal", whole.numel, 3 + rank) for rank in range(count)]
    right = torch.stack(vectors).mean(0)

    def on(collective: Collective) -> T:
        return measure(mean_sender(method, exchange, collective, whole), vectors[collective.rank], right)

    return run_threads(count, on)[0]


def check_noise(codec: Codec, count: int) -> None:
    """Check that an unbiased codec's noise differs between ranks and averages out over them."""
    single, bias = variance_and_bias(AllGather(), codec, LocalCollective(), KEYS)
    figures = f"the mean over {KEYS} keys is off by {bias:.3g} of the square, where noise would be {single / KEYS:.3g}"
    law(8, bias <= max(2 * single / KEYS, 1e-12), f"{codec} is not declared contractive, but {figures}; {ADVICE}")
    left = run_threads(count, lambda collective: variance_and_bias(AllGather(), codec, collective, KEYS // 4))[0][0]
    figures = f"of noise {single:.3g} of one rank, {count} ranks with equal gradients leave {left:.3g}, not 1 / {count}"
    law(8, left <= max(1.4 * single / count, 1e-12), f"{codec}: {figures}; draw from the key that encode is given")
