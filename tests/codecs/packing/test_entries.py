"""Codings of positions and values: round trips, sizes, damage; and top-k in all of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.codecs import TopK
from lightning_compress.codecs.packing.positions import KINDS, positions_of
from lightning_compress.core.layout import Layout
from tests.codecs.helpers import CPU, layout, make, trip, vectors
from tests.reference import sparse as reference

modest = settings(deadline=None, derandomize=True, max_examples=40)
kinds = pytest.mark.parametrize("kind", KINDS)
SETTINGS = list(itertools.product(("fp32", "fp16", "2bit", "1bit"), KINDS))


@kinds
@modest
@given(numel=st.integers(1, 200_000), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_positions_round_trip(kind: str, numel: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(share * min(numel, 3000))
    positions = np.sort(random.choice(numel, count, replace=False)).astype(np.int64)
    coding = positions_of(kind, numel, count)
    body = random.integers(0, 256, coding.size + 9).astype(np.uint8)
    before = body.copy()
    used = coding.write(positions, body)
    assert used <= coding.size
    assert coding.variable or used == coding.size
    assert np.array_equal(body[used:], before[used:])
    back, size = coding.read(body)
    assert np.array_equal(back, positions)
    assert size == used
    assert reference.read_positions(body.tobytes(), numel, kind) == (positions.tolist(), used)
    with pytest.raises(ValueError, match="truncated"):
        coding.read(body[: used - 1])
    if count:
        with pytest.raises(ValueError, match="most"):
            positions_of(kind, numel, count - 1).read(body)


@kinds
def test_positions_that_do_not_ascend_are_refused(kind: str) -> None:
    coding, larger = positions_of(kind, 100, 5), positions_of(kind, 1000, 5)
    body = np.zeros(larger.size, np.uint8)
    larger.write(np.array([5, 99, 101]), body)
    if kind != "bitmap":  # which has no bits from there on, but up to the next whole byte
        with pytest.raises(ValueError, match="indices outside"):
            coding.read(body)
    if kind in ("int32", "int16"):
        coding.write(np.array([7, 7]), body)
        with pytest.raises(ValueError, match="indices outside"):
            coding.read(body)
    body[:] = 0xFF
    with pytest.raises(ValueError, match="truncated, damaged"):
        coding.read(body)


@kinds
def test_positions_beyond_what_float32_can_count(kind: str) -> None:
    numel = (1 << 24) + 1000
    positions = np.array([0, 1, 1 << 24, (1 << 24) + 1, numel - 1])
    coding = positions_of(kind, numel, 5)
    body = np.zeros(coding.size, np.uint8)
    coding.write(positions, body)
    assert coding.read(body)[0].tolist() == positions.tolist()


def test_auto_takes_the_fewest_bytes() -> None:
    for numel, density in itertools.product((10, 1000, 10**6), (1e-3, 0.01, 0.1, 0.5, 1.0)):
        most = max(1, math.ceil(density * numel))
        sizes = {kind: positions_of(kind, numel, most).size for kind in KINDS}
        assert positions_of("auto", numel, most).size == min(sizes.values())
    assert isinstance(positions_of("auto", 10**6, 10**4), KINDS["rice"])
    assert isinstance(positions_of("auto", 10**6, 6 * 10**5), KINDS["bitmap"])


def ranges(numel: int, scope: str) -> list[tuple[int, int]]:
    if scope == "group":
        return [(0, numel)]
    return [(segment.offset, segment.end) for segment in layout(numel).segments if segment.numel]


@pytest.mark.parametrize("scope", ["parameter", "group"])
@pytest.mark.parametrize(("values", "indices"), SETTINGS)
@settings(deadline=None, derandomize=True, max_examples=12)
@given(vector=vectors())
def test_topk_equals_the_reference(values: str, indices: str, scope: str, vector: torch.Tensor) -> None:
    codec = TopK(0.07, scope, "exact", values, indices)  # type: ignore[arg-type]
    decoded, residual, message = trip(codec, vector)
    found = ranges(len(vector), scope)
    parts = reference.kept(vector.numpy(), 0.07, found)
    sent, stays = reference.coded(vector.numpy(), parts, values)
    np.testing.assert_array_equal(decoded.numpy(), sent)
    np.testing.assert_array_equal(residual.numpy(), stays)
    if (values, indices) not in (("fp32", "int32"), ("fp16", "int32")) and len(vector) < 5000:
        parsed, used = reference.parse_entries(message, len(vector), [end for _, end in found], indices, values)
        np.testing.assert_array_equal(parsed, sent)
        assert not message[used:].any()
        assert indices != "rice" or used == len(message)


@pytest.mark.parametrize("values", ["fp16", "2bit", "1bit"])
@pytest.mark.parametrize("indices", KINDS)
def test_topk_sends_the_same_elements_in_every_coding(values: str, indices: str) -> None:
    vector = make("normal", 200_000)
    wanted = trip(TopK(0.01), vector)[0] != 0
    decoded, residual, _ = trip(TopK(0.01, values=values, indices=indices), vector)  # type: ignore[arg-type]
    assert torch.equal(decoded != 0, wanted)
    assert torch.equal(residual[~wanted], vector[~wanted])


@pytest.mark.parametrize(
    ("values", "most"), [("fp16", 1e-7), ("2bit", 0.04), ("1bit", 0.15)]
)  # of the squares of what is kept
def test_values_are_close(values: str, most: float) -> None:
    vector = make("normal", 300_000)
    decoded, residual, _ = trip(TopK(0.01, values=values), vector)  # type: ignore[arg-type]
    kept = decoded != 0
    assert residual[kept].double().square().sum() <= most * vector[kept].double().square().sum()


@pytest.mark.parametrize(("density", "bits"), [(0.1, 4.9), (0.01, 8.2), (0.001, 11.5)])
def test_rice_bits_of_topk(density: float, bits: float) -> None:
    numel = 1 << 20
    plan = TopK(density, values="1bit", indices="rice").plan(Layout.of([("w", (numel,))]), CPU)
    message = torch.empty(plan.message_size, dtype=torch.uint8)
    plan.encode(make("normal", numel), message, 0)
    assert 8 * plan.used <= (1 + bits) * density * numel + 300
    assert plan.used <= plan.message_size <= 1.1 * plan.used + 64


def test_a_message_with_numbers_that_are_not_finite_is_refused() -> None:
    plan = TopK(0.5, indices="bitmap").plan(layout(16), CPU)
    message = torch.zeros(plan.message_size, dtype=torch.uint8)
    plan.encode(make("normal", 16), message, 0)
    message[-4:].view(torch.uint8).copy_(torch.tensor([torch.nan]).view(torch.uint8))
    with pytest.raises(ValueError, match="not finite"):
        plan.decode(message[None], torch.zeros(16), 1.0, False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"values": "8bit"}, "values must be one of 'fp32', 'fp16', '2bit', '1bit'"),
        ({"indices": "int8"}, "indices must be one of 'int32', 'int16', 'bitmap', 'rice', 'auto'"),
    ],
)
def test_bad_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TopK(**settings)  # type: ignore[arg-type]
