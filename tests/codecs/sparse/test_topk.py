"""What is particular to top-k: ties, places, sampling."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_compress.codecs import TopK
from lightning_compress.codecs.sparse.selection import CpuSelector, SortSelector, sample_of
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.corrections import DGC
from tests.codecs.helpers import CPU, KINDS, make, trip


def sent(message: torch.Tensor) -> tuple[list[int], list[float]]:
    half = len(message) // 2
    return message[:half].view(torch.int32).tolist(), message[half:].view(torch.float32).tolist()


def test_the_first_ones_among_equals() -> None:
    vector = torch.tensor([1.0, -2.0, 1.0, 2.0, -2.0, 2.0, 3.0, 0.0])
    _, residual, message = trip(TopK(density=0.5, scope="group"), vector)
    assert sent(message) == ([1, 3, 4, 6], [-2.0, 2.0, -2.0, 3.0])
    assert residual.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["zeros", "one-hot", "sparse", "constant"])
def test_places_are_unique_when_little_is_there(kind: str) -> None:
    _, _, message = trip(TopK(density=0.1, scope="group"), make(kind, 50_000))
    places, _ = sent(message)
    assert len(set(places)) == 5000
    assert places == sorted(places)


def test_a_misleading_sample_does_not_change_the_exact_choice() -> None:
    numel = 200_000
    for key in range(3):
        vector = make("normal", numel)
        vector[list(sample_of(numel, 10_000, key))] *= 1e3  # all of the sample is large, and little else
        plan = TopK(density=0.05).plan(Layout.of([("w", (numel,))]), CPU)
        message = torch.empty(plan.message_size, dtype=torch.uint8)
        expected = torch.sort(vector.abs(), descending=True, stable=True).indices[:10_000].sort().values
        plan.encode(vector, message, key)
        assert sent(message)[0] == expected.tolist()


def _mostly_zeros(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < 2e-3)


@pytest.mark.parametrize("codec", [DGC().codec, TopK(0.01), TopK(0.05)], ids=repr)
@pytest.mark.parametrize("kind", [*KINDS, "mostly zeros"])
@pytest.mark.parametrize(
    "numel",
    [pytest.param(4096, marks=pytest.mark.thorough), 4097, 36_864, pytest.param(150_000, marks=pytest.mark.thorough)],
)
def test_as_many_are_sent_as_were_asked_for(codec: TopK, kind: str, numel: int) -> None:
    plan = codec.plan(Layout.of([("w", (numel,))]), CPU)
    message, k = torch.empty(plan.message_size, dtype=torch.uint8), math.ceil(codec.density * numel)
    for seed in range(12):
        vector = _mostly_zeros(numel, seed) if kind == "mostly zeros" else make(kind, numel, seed)
        out = torch.zeros(numel)
        plan.encode(vector.clone(), message, seed * 2654435761)
        plan.decode(message[None], out, 1.0, accumulate=False)
        largest = vector[out != 0].abs().double().sum()
        assert int((out != 0).sum()) == min(k, int((vector != 0).sum()))
        assert largest == pytest.approx(float(vector.abs().topk(k).values.double().sum()), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0.001, 0.05, 0.5])
@pytest.mark.parametrize("key", [0, 7, 2**64 - 1])
def test_a_sample_finds_what_a_look_at_all_does(kind: str, density: float, key: int) -> None:
    vector = make(kind, 70_000)
    sampled, everything = (trip(TopK(density, selection=each), vector, key)[2] for each in ("sampled", "exact"))
    assert torch.equal(sampled, everything)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 70, 7000, 69_999])
def test_the_accelerators_way_makes_the_same_choice(sampled: bool, kind: str, k: int) -> None:
    vector, part = make(kind, 70_000), range(11, 70_000)
    results = []
    for selector in (CpuSelector(sampled), SortSelector()):
        indices, values = torch.empty(min(k, len(part)), dtype=torch.int32), torch.empty(min(k, len(part)))
        selector.select(vector, part, 5, indices, values)
        results.append((indices, values))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_places_beyond_what_float32_can_count() -> None:
    numel = (1 << 24) + 5
    vector = torch.zeros(numel)
    vector[-4] = 7.0
    plan = TopK(density=1e-9).plan(Layout.of([("w", (numel,))]), CPU)
    message = torch.empty(plan.message_size, dtype=torch.uint8)
    plan.encode(vector, message, 0)
    assert sent(message) == ([numel - 4], [7.0])
    assert not vector.any()


def test_vectors_beyond_int32_are_refused() -> None:
    layout = Layout((Segment("w", (2**31,), 0, 0, 2**31),))
    with pytest.raises(ValueError, match="another compressor by rules"):
        TopK().plan(layout, CPU)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"density": 0}, "density must be in"),
        ({"density": -0.1}, "density must be in"),
        ({"density": 1.5}, "density must be in"),
        ({"density": float("nan")}, "density must be in"),
        ({"density": "1 %"}, "density must be in"),
        ({"scope": "layer"}, "scope must be one of 'parameter', 'group'"),
        ({"selection": "random"}, "selection must be one of 'exact', 'sampled'"),
    ],
)
def test_bad_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TopK(**settings)  # type: ignore[arg-type]
