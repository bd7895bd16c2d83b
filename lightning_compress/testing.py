"""The laws that every method keeps, as checks for one of your own: ``check_codec(MyCodec())``; ranks are threads.

The package's own methods are held to the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense, Method
from lightning_compress.codecs.base import aligned
from lightning_compress.collectives import Collective, CountingCollective, LocalCollective, World, run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.core.meter import Meter
from lightning_compress.core.state import State
from lightning_compress.exchanges import (
    AllGather,
    AllReduce,
    Auto,
    Exchange,
    ExchangePlan,
    SplitGather,
    TwoShot,
    composite,
)
from lightning_compress.exchanges.message import Section

__all__ = ["check_codec"]

CPU = torch.device("cpu")
DENSE = Layout.of([("bias", (37,)), ("norm", (5,))])
LARGE = Layout.of([("conv", (16, 9, 9, 9)), ("linear", (101, 67)), ("odd", (3, 347))])
LAWS = {1: "conservation", 2: "size", 3: "identity", 4: "one truth", 7: "bad numbers pass", 8: "faithful"}
LENGTHS = (1, 300, 5000)
"""Of vectors that go through a codec alone."""
KEYS = 32
"""Over which an unbiased method is averaged."""
KINDS = (
    "normal",
    "heavy",
    "zeros",
    "constant",
    "negative",
    "one-hot",
    "denormal",
    "minus zero",
    "huge",
    "ties",
    "sparse",
    "lopsided",
)


def make(kind: str, numel: int, seed: int = 0) -> Tensor:
    """A vector of one of ``KINDS``."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal(numel)
    one_hot = np.zeros(numel)
    one_hot[random.integers(numel)] = -3.5
    values = {
        "normal": normal,
        "heavy": random.standard_cauchy(numel),
        "zeros": np.zeros(numel),
        "constant": np.full(numel, 0.7),
        "negative": np.full(numel, -0.7),
        "one-hot": one_hot,
        "denormal": normal * 1e-41,
        "minus zero": np.where(normal > 0.5, 1.0, -0.0),
        "huge": normal * 1e30,
        "ties": random.integers(-2, 3, numel),
        "lopsided": np.where(normal < -1, normal * 10.0 ** random.integers(-30, 0), 1 + np.abs(normal)),
        "sparse": np.where(random.random(numel) < 0.02, normal, 0),
    }[kind]
    return torch.from_numpy(values.astype(np.float32))


def layout(numel: int) -> Layout:
    """Three parameters, of which the last is a part."""
    first, second = numel // 2, numel // 3
    whole = Layout.of([("a", (first,)), ("b", (second,)), ("c", (numel - first - second + 7,))])
    return whole.cut(0, numel)


def vector(rank: int, seed: int = 0) -> Tensor:
    """A group's gradient, float32 ``[DENSE.numel + LARGE.numel]``, another one on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numel = DENSE.numel + LARGE.numel
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).square()


def group_plan(
    method: Method,
    exchange: Exchange,
    collective: Collective,
    meter: Meter,
    dense: Layout = DENSE,
    large: Layout = LARGE,
) -> ExchangePlan:
    """The plan of a group as the rules make it: a dense stretch, then the method's."""
    sections = [Section(Dense(), dense, 0), Section(method, large, dense.numel)]
    whole = Layout.of((segment.name, segment.shape) for part in (dense, large) for segment in part.segments)
    kept = {f"{composite.EXCHANGE}.{name}": each for name, each in exchange.state(whole).items()}
    states = {
        name: State(each.layout, CPU, each.initial, each.holder)
        for name, each in {**composite.declared(sections), **kept}.items()
    }
    return composite.plan_group(sections, exchange, World(collective, CPU, meter), states)


class Mean(NamedTuple):
    """One mean on one rank: the vector before and after, bytes counted on the transport and by the formula."""

    before: Tensor
    after: Tensor
    mean: Tensor
    flag: Tensor
    counted: int
    promised: int


def mean_on(collective: Collective, method: Method, exchange: Exchange, flag_rank: int | None = None) -> Mean:
    """One mean on this rank; that of ``flag_rank`` has a gradient that is not finite."""
    meter = Meter(CPU)
    plan = group_plan(method, exchange, CountingCollective(collective, meter), meter)
    before = vector(collective.rank)
    after, mean = before.clone(), torch.full_like(before, 7.0)
    flag = torch.tensor(math.nan if collective.rank == flag_rank else 0.0)
    plan.mean(after, mean, 5, flag)
    return Mean(before, after, mean, flag, meter.bytes_sent, plan.cost.bytes_sent)


def means(method: Method, exchange: Exchange, size: int, flag_rank: int | None = None) -> list[Mean]:
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


def flags_arrive(method: Method, exchange: Exchange, size: int) -> bool:
    """Law 7: a gradient that is not finite, on the first rank or the last, reaches every rank."""
    return all(
        bool(each.flag.isnan()) for bad in {0, size - 1} for each in means(method, exchange, size, flag_rank=bad)
    )


def noise(exchange: Exchange, codec: Codec, collective: Collective, keys: int = 3) -> tuple[float, float]:
    """Law 8, of a gradient that is equal on all ranks: variance of the mean, and its squared error averaged over keys.

    Both are over the square of the gradient. The second one is ``1 / keys`` of the first where the codec is unbiased.
    """
    plan = exchange.plan([Section(codec, LARGE, 0)], World(collective, CPU, Meter(CPU)))
    same = torch.randn(LARGE.numel, generator=torch.Generator().manual_seed(3))
    spread, total, mean = 0.0, torch.zeros(LARGE.numel, dtype=torch.float64), torch.empty_like(same)
    square = float(same.square().sum())
    for key in range(keys):
        plan.mean(same.clone(), mean, key, torch.tensor(0.0))
        spread += float((mean - same).square().sum()) / square / keys
        total += mean.double() / keys
    return spread, float((total - same).square().sum()) / square


class Trip(NamedTuple):
    """A vector that went through a codec; the message is what was used of it."""

    decoded: Tensor
    residual: Tensor
    message: Tensor


def trip(codec: Codec, given: Tensor, key: int = 1) -> Trip:
    """Encode and decode, on this rank alone."""
    plan = codec.plan(layout(len(given)), CPU)
    residual = given.clone()
    message = torch.full((plan.message_size,), 0xAB, dtype=torch.uint8)
    plan.encode(residual, message, key)
    assert plan.used <= plan.message_size
    message = message[: plan.used]
    decoded = torch.full_like(given, torch.nan)
    plan.decode(message[None], decoded, 1.0, False)
    return Trip(decoded, residual, message)


def written(codec: Codec, given: Tensor, key: int) -> list[Tensor]:
    """Law 2: the message over two fillings, with another step in between, and as ``send`` writes it: all equal."""
    plan = codec.plan(layout(len(given)), CPU)
    found = []
    for fill, write in ((0x00, plan.encode), (0xFF, plan.encode), (0x55, plan.send)):
        message = torch.full((plan.message_size,), fill, dtype=torch.uint8)
        write(given.clone(), message, key)
        found.append(message[: plan.used])
        plan.encode(make("normal", len(given)), message.clone(), key + 1 & 2**64 - 1)
    return found


def rows_added(codec: Codec, numel: int, accumulate: bool, anywhere: bool = False) -> tuple[Tensor, Tensor]:
    """Law 4: three messages decoded at once, and one after the other: nearly equal.

    They are strided rows, as sections of longer messages are; ``anywhere``: at addresses that exchanges never have.
    """
    plan = codec.plan(layout(numel), CPU)
    start, width = (8, plan.message_size + 24) if anywhere else (16, aligned(plan.message_size) + 32)
    rows = torch.zeros(3, width, dtype=torch.uint8)[:, start : start + plan.message_size]
    total = torch.zeros(numel)
    for seed, row in enumerate(rows):
        plan.encode(make("normal", numel, seed), row, seed)
        single = torch.zeros(numel)
        plan.decode(row[None], single, 1.0, False)
        total += single
    out = torch.ones(numel)
    plan.decode(rows, out, 0.25, accumulate)
    return out, 0.25 * total + accumulate


def check_codec(
    codec: Method,
    *,
    ranks: Iterable[int] = (2, 3),
    exchanges: Mapping[str, Exchange] | None = None,
    lossless: Method | None = None,
    size: Callable[[Layout], int] | None = None,
    reference: Callable[[Tensor], Tensor] | None = None,
    rounding: float = 0.0,
) -> None:
    """Hold a method to the laws: alone, and on ranks that are threads, by every exchange that its flags allow.

    1 conservation, 2 size, 3 identity, 4 one truth, 7 bad numbers pass, 8 faithful: unbiased or contractive, as it
    declares (docs/architecture.md). It takes seconds, and neither pytest nor a GPU.

    Args:
        codec: with settings under which a few hundred elements are compressed; a reducer is held to what ranks see.
        ranks: numbers of them.
        exchanges: by a name for messages; None: those that the flags allow.
        lossless: settings under which nothing is lost, if there are any.
        size: the formula of a message's bytes, for a layout; the most that it may take if that varies.
        reference: a slow version: what a float32 vector is decoded to, for a method that draws nothing at random.
        rounding: what sums in the message's own dtype may lose, relative to the largest value; 2^-10 for float16.

    Raises:
        AssertionError: a law is broken; the message says which one, where, and the figures.
    """
    if isinstance(codec, Codec):
        _check_alone(codec, size, reference)
    counts = list(ranks)
    for count in counts:
        for name, exchange in (_allowed(codec) if exchanges is None else exchanges).items():
            where = f"{codec} by {name} on {count} ranks"
            _check_together(codec, exchange, count, where, rounding)
            if lossless is not None:
                error = lost(means(lossless, exchange, count))
                _law(3, error <= 1e-6, f"{lossless} by {name} on {count} ranks is off the mean by {error:.2g}")
    if isinstance(codec, Codec) and not codec.contractive and codec.sum_dtype is None:
        _check_unbiased(codec, max(counts, default=2))


def _law(number: int, holds: bool, figures: str) -> None:
    if not holds:
        raise AssertionError(f"law {number} ({LAWS[number]}): {figures}")


def _allowed(method: Method) -> dict[str, Exchange]:
    """The exchanges that a method's flags allow."""
    if not isinstance(method, Codec):
        return {"auto": Auto()}
    found: dict[str, Exchange] = {"all_gather": AllGather()}
    if method.sum_dtype is not None:
        found["all_reduce"] = AllReduce()
    if method.repeatable:
        found["two_shot"] = TwoShot()
    if method.sparse:
        found["split_gather"] = SplitGather()
    return {**found, "auto": Auto()}


def _check_alone(
    codec: Codec, size: Callable[[Layout], int] | None, reference: Callable[[Tensor], Tensor] | None
) -> None:
    for numel in LENGTHS:
        plan = codec.plan(layout(numel), CPU)
        wanted = plan.message_size if size is None else size(layout(numel))
        fits = plan.message_size <= wanted if plan.variable else plan.message_size == wanted
        _law(2, fits, f"{codec} of {numel} elements takes {plan.message_size} bytes, and the formula says {wanted}")
        for kind in KINDS:
            where = f"{codec} of {numel} elements ({kind})"
            given = make(kind, numel)
            decoded, residual, message = trip(codec, given)
            _law(2, plan.variable or len(message) == wanted, f"{where} wrote {len(message)} bytes, not {wanted}")
            error = float((decoded.double() + residual.double() - given.double()).abs().max())
            room = 2.0**-22 * float(given.abs().max() + decoded.abs().max()) + 2.0**-149
            _law(1, error <= room, f"{where}: message and rest differ from the vector by {error:.3g}, over {room:.3g}")
            first, again, sent = written(codec, given, 1)
            _law(
                2,
                first.equal(again),
                f"{where}: the message depends on more than vector and key, or has unwritten bytes",
            )
            _law(2, first.equal(sent), f"{where}: send writes another message than encode")
            before, after = float(given.double().norm()), float(residual.double().norm())
            shrinks = not codec.contractive or after <= before * (1 + 1e-6)
            _law(8, shrinks, f"{where} is declared contractive, and leaves a norm of {after:.6g} of {before:.6g}")
            if reference is not None:
                off = float((reference(given.clone()) - decoded).abs().max())
                _law(8, off <= room, f"{where} is off its reference by {off:.3g}")
        for accumulate in (False, True):
            out, expected = rows_added(codec, numel, accumulate)
            off = float((out - expected).abs().max() / (1 + expected.abs().max()))
            _law(4, off <= 1e-5, f"{codec}: three messages decoded at once are off their sum by {off:.3g}")


def _check_together(method: Method, exchange: Exchange, count: int, where: str, rounding: float) -> None:
    result = outcome_of(means(method, exchange, count))
    _law(4, result.agree, f"{where}: ranks have different means")
    _law(4, result.finite, f"{where}: the mean of finite gradients is not finite")
    room = count * max(1e-6, rounding)
    kept = not method.conserves or result.error <= room
    _law(1, kept, f"{where}: mean and what stays differ from the sum by {result.error:.3g} of it, over {room:.3g}")
    _law(7, result.zero_flags, f"{where}: finite gradients are flagged")
    _law(7, flags_arrive(method, exchange, count), f"{where}: a gradient that is not finite does not reach every rank")
    counted, promised = result.counted, result.promised
    if not isinstance(method, Codec):
        _law(2, counted == promised, f"{where} sent {counted} bytes, and the plan says {promised}")
        return
    plan = method.plan(LARGE, CPU)
    if plan.variable:  # lengths travel too
        most = (count - 1) * (64 + aligned(4 * DENSE.numel) + aligned(plan.message_size))
        if isinstance(exchange, AllGather):
            _law(2, max(counted) <= most, f"{where} sent {counted} bytes, and messages take at most {most}")
    elif not method.sparse or isinstance(exchange, AllGather | TwoShot):
        _law(2, counted == promised, f"{where} sent {counted} bytes, and the plan says {promised}")


def _check_unbiased(codec: Codec, count: int) -> None:
    own, bias = noise(AllGather(), codec, LocalCollective(), KEYS)
    figures = f"the mean over {KEYS} keys is off by {bias:.3g} of the square, where noise would be {own / KEYS:.3g}"
    advice = "declare contractive = True, or round at random"
    _law(8, bias <= max(2 * own / KEYS, 1e-12), f"{codec} is not declared contractive, but {figures}; {advice}")
    left = run_threads(count, lambda collective: noise(AllGather(), codec, collective, KEYS))[0][0]
    figures = f"of noise {own:.3g} of one rank, {count} ranks with equal gradients leave {left:.3g}, not 1 / {count}"
    _law(8, left <= max(1.4 * own / count, 1e-12), f"{codec}: {figures}; draw from the key that encode is given")
