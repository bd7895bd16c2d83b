"""Rows that are not zero: the union of the ranks' rows arrives, whatever way it takes, and costs what it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_compress.codecs import Rows
from lightning_compress.collectives import Collective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Source
from lightning_compress.exchanges import Exchange
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import Link
from tests.codecs.helpers import CPU
from tests.reference import sparse as reference
from tests.test_laws import PATTERNS, SPARSE

LAYOUT = Layout.of([("conv", (40, 3, 3, 3)), ("linear", (101, 67)), ("bias", (37,)), ("scale", ()), ("empty", (0, 5))])
WAYS: dict[str, Exchange] = {
    name: PATTERNS[name] for name in ("all_gather", "two_shot", "split_gather", "auto", *SPARSE)
}
WAYS["slow link"] = Auto(link=Link(1e-4, 1e7))


def of_few_rows(rank: int, share: float, layout: Layout = LAYOUT) -> torch.Tensor:
    """Zero but for some rows, which differ by rank."""
    generator, parts = torch.Generator().manual_seed(rank), []
    for segment in layout.segments:
        rows = torch.randn(segment.shape or (1,), generator=generator)
        kept = torch.rand(len(rows), generator=generator) < share
        parts.append((rows * kept.view(-1, *(1 for _ in rows.shape[1:]))).flatten())
    return torch.cat(parts)


def message_of(vector: torch.Tensor, layout: Layout) -> torch.Tensor:
    plan = Rows().plan(layout, CPU)
    message = torch.zeros(plan.message_size, dtype=torch.uint8)
    plan.encode_from(Source(vector.clone()), None, message, 0)
    return message[: plan.used]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("way", WAYS)
def test_the_union_arrives_exactly(way: str, ranks: int) -> None:
    given = [of_few_rows(rank, 0.1) for rank in range(ranks)]

    def program(collective: Collective) -> tuple[torch.Tensor, torch.Tensor]:
        plan = WAYS[way].plan([Section(Rows(), LAYOUT, 0)], World(collective, CPU, Meter(CPU)))
        vector, mean = given[collective.rank].clone(), torch.empty(LAYOUT.numel)
        plan.mean(vector, mean, 3, torch.tensor(0.0))
        return vector, mean

    results = run_threads(ranks, program)
    wanted = torch.stack(given).double().mean(0)
    for vector, mean in results:
        assert not vector.any()
        assert torch.equal(mean, results[0][1])
        assert torch.equal(mean != 0, torch.stack(given).any(0))
        torch.testing.assert_close(mean.double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.97, 1.0])
@pytest.mark.parametrize(("start", "stop"), [(0, LAYOUT.numel), (11, 5000), (1100, 1130), (1081, 1147)])
def test_rows_that_a_shard_cuts(start: int, stop: int, share: float) -> None:
    layout, vector = LAYOUT.cut(start, stop), of_few_rows(0, share)[start:stop]
    message, decoded = message_of(vector, layout), torch.full((stop - start,), torch.nan)
    segments = [(each.numel, each.start, int(np.prod(each.shape[1:]))) for each in layout.segments]
    assert bytes(message.tolist()) == reference.rows(vector.numpy(), segments)
    Rows().plan(layout, CPU).decode(message[None], decoded, 1.0, False)
    assert torch.equal(decoded, vector)


def test_bytes() -> None:
    layout = Layout.of([("weight", (4096, 512))])
    for kept, named in ((0, 0), (1, 4), (100, 400), (200, 512), (4095, 512), (4096, 0)):
        vector = torch.zeros(4096, 512)
        vector[torch.randperm(4096)[:kept], 7] = 1.0
        assert len(message_of(vector.flatten(), layout)) == 8 + named + 4 * 512 * kept
    narrow = Layout.of([("bias", (640,))])
    for kept in (639, 638, 620, 600):  # nearly all: never more than all of it and a header
        vector = torch.ones(640)
        vector[kept:] = 0
        assert len(message_of(vector, narrow)) == 8 + min(4 * 640, 4 * 20 + 4 * kept)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([3, 0, 1, 2, 200], "do not ascend"),
        ([2, 0, 2, 2], "do not ascend"),
        ([1, 0, -1], "do not ascend"),
        ([500, 0], "its header says 500 of"),
        ([5, 2], "its header says 5 of"),
        ([1, 3, 0], "with coding 3"),
        ([9, 1, 1, 0, 0, 0, 0, 0], "bitmap has 1 rows, but its header says 9"),
        ([4, 0, 0, 1, 2, 3], "are left"),
    ],
)
def test_damaged_messages_are_refused(words: list[int], why: str) -> None:
    plan, out = Rows().plan(LAYOUT, CPU), torch.full((LAYOUT.numel,), 5.0)
    message = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(ValueError, match=why):
        plan.decode(message[None], out, 1.0, True)
    assert (out == 5).all()


@pytest.mark.parametrize("density", [0, 1.5, True, "all"])
def test_bad_settings(density: object) -> None:
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\]"):
        Rows(density)  # type: ignore[arg-type]


def test_it_goes_with_any_optimizer() -> None:
    assert Rows().safe_with_adam
    assert not Rows().contractive
