"""A method on ranks that are threads, held to the laws."""

from __future__ import annotations

import torch

from lightning_compress.codecs import Codec, Method
from lightning_compress.codecs.codec import aligned
from lightning_compress.collectives import Collective, LocalCollective, run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather, Pattern, TwoShot
from lightning_compress.testing.bias import ADVICE, KEYS, Measure, T, check_sent
from lightning_compress.testing.laws import law
from lightning_compress.testing.means import Mean, Walk, flags_arrive, mean_sender, means, noise, outcome_of, walk_on
from lightning_compress.testing.vectors import CPU, DENSE, LARGE, make


def check_together(method: Method, exchange: Pattern, count: int, where: str, rounding: float) -> None:
    """Hold one mean over the ranks to the laws."""
    result = outcome_of(means(method, exchange, count))
    law(4, result.agree, f"{where}: ranks have different means")
    law(4, result.finite, f"{where}: the mean of finite gradients is not finite")
    room = count * max(1e-6, rounding)
    kept = not method.conserves or result.error <= room
    law(1, kept, f"{where}: mean and what stays differ from the sum by {result.error:.3g} of it, over {room:.3g}")
    law(7, result.zero_flags, f"{where}: finite gradients are flagged")
    law(7, flags_arrive(method, exchange, count), f"{where}: a gradient that is not finite does not reach every rank")
    counted, promised = result.counted, result.promised
    if not isinstance(method, Codec):  # the first step may be another one: see check_steps
        return
    plan = method.plan(LARGE, CPU)
    if plan.variable:  # lengths travel too
        most = (count - 1) * (64 + aligned(4 * DENSE.numel) + aligned(plan.message_size))
        if isinstance(exchange, AllGather):
            law(2, max(counted) <= most, f"{where} sent {counted} bytes, and messages take at most {most}")
    elif not method.sparse or isinstance(exchange, AllGather | TwoShot):
        law(2, counted == promised, f"{where} sent {counted} bytes, and the plan says {promised}")


def check_steps(method: Method, exchange: Pattern, count: int, where: str, rounding: float) -> None:
    """Hold several means, one after the other, to the laws: what a method of several steps keeps, and what arrives."""
    ranks = run_threads(count, lambda collective: walk_on(collective, method, exchange))
    for rank, walk in enumerate(ranks):
        _check_states(walk, ranks[0], f"{where}: rank {rank}")
    for number, step in enumerate(zip(*(rank.steps for rank in ranks), strict=True)):
        result, at = outcome_of(step), f"{where}, step {number + 1}"
        law(4, result.agree and result.finite, f"{at}: ranks have different means, or numbers that are not finite")
        law(7, result.zero_flags, f"{at}: finite gradients are flagged")
        kept = not method.conserves or result.error <= count * max(1e-6, rounding)
        law(1, kept, f"{at}: mean and what stays differ from the sum by {result.error:.3g} of it")
        zeros = torch.stack([each.before == 0 for each in step]).all(0)
        kept = not method.keeps_zeros or not step[0].mean[zeros].any()
        law(8, kept, f"{at} is declared keeps_zeros, and what is zero on all ranks is not in the mean")
    if not isinstance(method, Codec):
        counted, promised = result.counted, result.promised
        law(2, counted == promised, f"{at} sent {counted} bytes, and the plan says {promised}")
    for rank, walk in enumerate(ranks):
        goes_on = f"{where}: rank {rank} goes on otherwise"
        figures = "after a step that was rolled back; read what is kept from state.base(), write it to state.pending"
        law(6, _equal(walk.rolled, walk.steps[1]), f"{goes_on} {figures}")
        figures = "by a new plan with the states that were saved; declare in state() all that is kept between steps"
        law(6, _equal(walk.restored, walk.steps[-1]), f"{goes_on} {figures}")
    check_sent(method, where, lambda whole, measure: _measured(method, exchange, count, whole, measure))


def _check_states(walk: Walk, first: Walk, where: str) -> None:
    for name in walk.spoilt:
        figures = f"the state {name.partition('.')[2]!r} is not written, or not finite, after a step"
        law(6, False, f"{where}: {figures}; read state.base(), write all of state.pending in every mean")
    for name, numbers in walk.shared.items():
        figures = f"the state {name.partition('.')[2]!r} is declared 'shared', and is not what rank 0 has"
        law(6, numbers.equal(first.shared[name]), f"{where}: {figures}; declare it 'rank'")


def _equal(one: Mean, other: Mean) -> bool:
    return one.mean.equal(other.mean) and one.after.equal(other.after)


def _measured(method: Method, exchange: Pattern, count: int, whole: Layout, measure: Measure[T]) -> T:
    given = [make("normal", whole.numel, 3 + rank) for rank in range(count)]
    right = torch.stack(given).mean(0)

    def on(collective: Collective) -> T:
        return measure(mean_sender(method, exchange, collective, whole), given[collective.rank], right)

    return run_threads(count, on)[0]


def check_noise(codec: Codec, count: int) -> None:
    """Hold an unbiased codec to noise that is private to each rank, and averages out over the ranks."""
    own, bias = noise(AllGather(), codec, LocalCollective(), KEYS)
    figures = f"the mean over {KEYS} keys is off by {bias:.3g} of the square, where noise would be {own / KEYS:.3g}"
    law(8, bias <= max(2 * own / KEYS, 1e-12), f"{codec} is not declared contractive, but {figures}; {ADVICE}")
    left = run_threads(count, lambda collective: noise(AllGather(), codec, collective, KEYS // 4))[0][0]
    figures = f"of noise {own:.3g} of one rank, {count} ranks with equal gradients leave {left:.3g}, not 1 / {count}"
    law(8, left <= max(1.4 * own / count, 1e-12), f"{codec}: {figures}; draw from the key that encode is given")
