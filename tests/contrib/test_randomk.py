"""RandomK: which elements it draws, how far it is off, and what ranks have in common."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_compress.codecs.codec import Plan
from lightning_compress.collectives import Collective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import EXCHANGES, TwoShot
from lightning_compress.exchanges.message import Section
from tests.codecs.helpers import CPU, layout, make
from tests.reference import ternary as reference
from tests.turns import by_turns

NUMEL = 1000


def encoded(plan: Plan, vector: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(decoded, residual) where all ranks draw from this key."""
    residual, decoded = vector.clone(), torch.full_like(vector, torch.nan)
    message = torch.zeros(1, plan.message_size, dtype=torch.uint8)
    plan.share(key)
    plan.encode(residual, message[0], 123)
    plan.decode(message, decoded, 1.0, False)
    return decoded, residual


@pytest.mark.parametrize("density", [1e-9, 0.01, 0.3, 0.77, 1.0])
@pytest.mark.parametrize("numel", [1, 5, 1000, 4097])
def test_equals_the_reference(numel: int, density: float) -> None:
    vector = make("normal", numel)
    plan = RandomK(density).plan(layout(numel), CPU)
    ranges = [(segment.offset, segment.end) for segment in layout(numel).segments if segment.numel]
    for key in (0, 7, 2**64 - 1):
        decoded, residual = encoded(plan, vector, key)
        wanted = reference.randomk_places(ranges, density, key)
        for places, (start, stop) in zip(wanted, ranges, strict=True):
            assert len(set(places)) == len(places) == max(1, math.ceil(density * (stop - start)))
            assert start <= min(places) <= max(places) < stop
        drawn = torch.zeros(numel, dtype=torch.bool).index_fill_(
            0, torch.tensor([place for places in wanted for place in places]), True
        )
        assert torch.equal(decoded, torch.where(drawn, vector, 0))
        assert torch.equal(residual, torch.where(drawn, 0, vector))


@pytest.mark.parametrize(("numel", "density"), [(37, 0.12), (64, 0.25), (10, 0.95), (7, 0.01)])
def test_every_element_is_as_likely(numel: int, density: float) -> None:
    plan = RandomK(density).plan(Layout.of([("before", (11,)), ("this", (numel,))]), CPU)
    draws, counts = 20_000, torch.zeros(numel)
    for key in range(draws):
        plan.share(key)
        counts += encoded_mask(plan, numel + 11)[11:]
    chance = math.ceil(density * numel) / numel
    chi = ((counts - draws * chance).square() / (draws * chance)).sum() / (numel - 1)
    assert chi <= 1 + 5 * math.sqrt(2 / (numel - 1))  # less than a multinomial's: one of every stretch is drawn
    assert (counts - draws * chance).abs().max() <= 5 * math.sqrt(draws * chance)
    neighbours = counts.unfold(0, 2, 1).diff().abs().max()
    assert neighbours <= 7 * math.sqrt(draws * chance)


def encoded_mask(plan: Plan, numel: int) -> torch.Tensor:
    message, mask = torch.ones(1, plan.message_size // 4), torch.zeros(numel)
    plan.decode(message.view(torch.uint8), mask, 1.0, False)
    return mask


@pytest.mark.parametrize(
    ("kind", "density"), by_turns(["normal", "heavy", "one-hot", "constant", "sparse"], (0.01, 0.2), 1)
)
def test_error_and_mean(kind: str, density: float) -> None:
    vector, draws = make(kind, NUMEL), 3000
    square = float(vector.double().square().sum())
    whole = Layout.of([("a", (NUMEL,))])
    biased, rescaled = (RandomK(density, rescale).plan(whole, CPU) for rescale in (False, True))
    kept, off, total = 0.0, 0.0, torch.zeros(NUMEL, dtype=torch.float64)
    for key in range(draws):
        kept += float(encoded(biased, vector, key)[1].double().square().sum()) / square
        decoded, residual = encoded(rescaled, vector, key)
        off += float(residual.double().square().sum()) / square
        total += decoded
    # An outlier is drawn or not: the spread of its share is that of one coin.
    slack = 4 * math.sqrt(density / draws)
    assert kept / draws == pytest.approx(1 - density, abs=slack)
    assert off / draws == pytest.approx(1 / density - 1, abs=slack / density**2)
    error = (total / draws - vector).abs()
    assert (error <= 5.5 * vector.abs() * math.sqrt((1 / density - 1) / draws) + 1e-12).all()
    assert error.square().sum() <= 2.5 * square * (1 / density - 1) / draws or kind in ("heavy", "one-hot", "sparse")


@pytest.mark.parametrize("exchange", ["all_reduce", "all_gather", "two_shot", "auto"])
@pytest.mark.parametrize("size", [2, 5])
def test_all_ranks_draw_alike(exchange: str, size: int) -> None:
    whole = Layout.of([("a", (40, 100))])

    def program(collective: Collective) -> list[torch.Tensor]:
        sections, world = [Section(RandomK(0.05), whole, 0)], World(collective, CPU, Meter(CPU))
        plan = EXCHANGES[exchange]().plan(sections, world)
        means = []
        for key in (1, 2):
            vector, mean = torch.full((4000,), 1.0 + collective.rank), torch.empty(4000)
            plan.mean(vector, mean, key, torch.tensor(0.0))
            assert torch.equal((vector == 0), (mean != 0))  # what any rank sent, all ranks sent
            means.append(mean)
        return means

    first, second = run_threads(size, program)[0]
    assert first.count_nonzero() == pytest.approx(200, abs=size)
    assert (first[first != 0] == torch.arange(1.0, size + 1).mean()).all()
    assert not torch.equal(first, second)


def test_sums_of_messages_are_messages_of_sums() -> None:
    plan = RandomK(0.1, rescale=True).plan(layout(NUMEL), CPU, summands=2)
    messages, out, both = torch.zeros(2, plan.message_size, dtype=torch.uint8), torch.zeros(NUMEL), torch.zeros(NUMEL)
    plan.share(4)
    for key, message in enumerate(messages):
        plan.encode(make("normal", NUMEL, key), message, key)
    plan.decode(messages, both, 1.0, False)
    plan.decode(messages.view(torch.float32).sum(0, keepdim=True).view(torch.uint8), out, 1.0, False)
    assert torch.equal(out, both)
    huge = torch.full((NUMEL,), 3e38)
    plan.encode(huge, messages[0], 0)
    assert messages[0].view(torch.float32).max() * 2 <= torch.finfo(torch.float32).max
    assert huge.isfinite().all()


def test_rescaled_is_not_encoded_twice() -> None:
    with pytest.raises(ValueError, match="rescale them twice; use exchange='auto', 'all_reduce' or 'all_gather'"):
        TwoShot().check(RandomK(rescale=True))
    TwoShot().check(RandomK())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"density": 0}, r"density must be in \(0, 1\]"),
        ({"density": 1.1}, r"density must be in \(0, 1\]"),
        ({"density": True}, r"density must be in \(0, 1\]"),
        ({"rescale": 1}, "rescale must be true or false"),
    ],
)
def test_bad_settings(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RandomK(**arguments)  # type: ignore[arg-type]
