"""Exchanges in which one rank sends what it should not."""

import math

import numpy as np
import torch

from lightning_compress.codecs import QSGD, Codec, Dense, OneBit, TopK
from lightning_compress.collectives import Collective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.exchanges.chain import Chain
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import EXCHANGES, composite
from lightning_compress.exchanges.message import Section
from lightning_compress.testing.fuzz import mutate
from tests.cases import CASES

CPU = torch.device("cpu")
DENSE = Layout.of([("bias", (37,))])
LARGE = Layout.of([("conv", (16, 9, 3, 3)), ("linear", (61, 37))])
OTHER = Layout.of([("embedding", (70, 30))])
SUMS = ("recursive_doubling", "butterfly", "run_length")
"""Exchanges of sums, for methods that send few elements."""
DROPPING = ("ok_topk",)
"""Those of them that drop the smaller sums."""
TREES = {"binomial": ("bf16", "topk", "onebit", "randomk", "qsgd", "variable", "mixed"), "chain": ("variable", "mixed")}
"""Exchanges to which all methods are alike, and those that are tried."""
PATTERNS = {name: kind() for name, kind in EXCHANGES.complete().items()} | {"chain": Chain("all_gather", 2)}
WAIT = 30.0
"""Seconds that a rank waits for the others: then it hangs."""
METHODS = {case.name: (case.codec,) for case in CASES if case.name != "none"}
METHODS |= {"variable": (TopK(0.05, indices="rice"), QSGD(3, 64, "l2", "elias")), "mixed": (OneBit(64), TopK(0.05))}


class Liar(Collective):
    """Spoils what one rank sends, at some of its sends."""

    def __init__(self, inner, random, whole=None):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.random = random
        self.whole = whole or self

    def _spoilt(self, tensor):
        random = self.whole.random  # of now, also for parts that were made before
        trusted = self.whole is not self and tensor.dtype == torch.float32  # numbers within a node
        if random is None or trusted or random.random() < 0.4:
            return tensor
        spoilt = tensor.clone(memory_format=torch.contiguous_format)
        mutate(spoilt.view(-1).view(torch.uint8).numpy(), random)
        return spoilt

    def all_reduce(self, tensor, operation="sum"):
        sent = self._spoilt(tensor)
        self.inner.all_reduce(sent, operation)
        tensor.copy_(sent)

    def all_gather(self, tensor, out):
        self.inner.all_gather(self._spoilt(tensor), out)

    def all_to_all(self, send, receive):
        self.inner.all_to_all(self._spoilt(send), receive)

    def swap(self, sends, receives):
        self.inner.swap({peer: self._spoilt(tensor) for peer, tensor in sends.items()}, receives)

    def begin_rows(self, tensor, rows):
        return self.inner.begin_rows(self._spoilt(tensor), rows)

    def part(self, ranks):
        return Liar(self.inner.part(ranks), None, self.whole)


def selects(method):
    """Whether few elements are sent."""
    return method.sparse or isinstance(method, RandomK)


def ways():
    """Every method by every exchange that carries it."""
    for name, methods in METHODS.items():
        for exchange in PATTERNS:
            allowed = exchange == "auto"
            if exchange != "auto" and all(isinstance(each, Codec) for each in methods):
                fits = {
                    "two_shot": lambda each: each.reencodable,
                    "all_reduce": lambda each: each.sum_dtype,
                    "split_gather": lambda each: each.sparse,
                    **dict.fromkeys(SUMS, selects),
                    **dict.fromkeys(DROPPING, lambda each: each.contractive and selects(each)),
                    "hierarchical": lambda each: False,  # what is tried alone
                }
                allowed = all(fits.get(exchange, lambda each: True)(each) for each in methods)
                allowed &= name in TREES.get(exchange, (name,))
            if allowed:
                yield f"{exchange}:{name}"


WAYS = [(way, 3 if way.startswith(("two_shot", "chain")) else 2 + number % 3) for number, way in enumerate(ways())]


def mean(plan, collective, seed):
    """One mean on this rank."""
    generator = torch.Generator().manual_seed(100 * seed + collective.rank)
    numel = DENSE.numel + LARGE.numel + OTHER.numel
    vector, out, flag = torch.randn(numel, generator=generator), torch.full((numel,), 7.0), torch.zeros(())
    plan.mean(vector, out, seed, flag)
    return out, flag


def plan_of(way, collective):
    exchange, _, name = way.partition(":")
    first, second = (METHODS[name] * 2)[:2]
    sections = [
        Section(Dense(), DENSE, 0),
        Section(first, LARGE, DENSE.numel),
        Section(second, OTHER, DENSE.numel + LARGE.numel, number=1),
    ]
    layout = Layout.of((each.name, each.shape) for part in (DENSE, LARGE, OTHER) for each in part.segments)
    return composite.plan_with_states(sections, PATTERNS[exchange], layout, World(collective, CPU, Meter(CPU)))


def exchange(way, size, random):
    """One mean with a liar, then one without; whether the first was refused.

    Raises:
        AssertionError: a rank hangs, or ranks end differently.
        Exception: any that is no ``ValueError``.
    """
    liar = int(random.integers(size))

    def program(ranks):
        collective = Liar(ranks, None)
        plan, states = plan_of(way, collective)  # what is measured at setup is believed
        collective.random = random if ranks.rank == liar else None
        said, out = "", None
        try:
            with np.errstate(all="ignore"):  # numbers from garbage overflow
                out, flag = mean(plan, collective, 1)
                assert float(flag) == 0.0 or math.isnan(flag)
        except ValueError as error:
            said = str(error)
        collective.random = None
        for state in states.values():
            state.roll_back()
        return said, out, mean(plan, collective, 2)[0]

    answers = run_threads(size, program, timeout=WAIT)
    assert len({bool(said) for said, _, _ in answers}) == 1, "only some ranks raise"
    if not answers[0][0]:
        assert all(same(out, answers[0][1]) for _, out, _ in answers), "the ranks have different means"
    expected = run_threads(size, lambda ranks: mean(plan_of(way, ranks)[0], ranks, 2)[0], timeout=WAIT)
    assert all(same(after, expected[0]) for *_, after in answers), "a good step is another one afterwards"
    return bool(answers[0][0])


def same(one, other):
    """Equal bits; NaN equals NaN."""
    return torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30)) and torch.equal(one.isnan(), other.isnan())
