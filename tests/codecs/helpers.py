"""Vectors worth trying, and one trip through a codec."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from tests.cases import CASES

CPU = torch.device("cpu")
OURS = [case.codec for case in CASES if isinstance(case.codec, Codec)]
CODECS: list[Codec] = list(dict.fromkeys(OURS + [type(codec)() for codec in OURS]))
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


def make(kind: str, numel: int, seed: int = 0) -> torch.Tensor:
    """A vector of a kind."""
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


def vectors() -> st.SearchStrategy[torch.Tensor]:
    """Vectors of 1 to 70,000 elements of every kind."""
    sizes = st.one_of(
        st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 4096, 4097, 70_000]), st.integers(1, 70_000)
    )
    return st.builds(make, st.sampled_from(KINDS), sizes, st.integers(0, 99))


def trip(codec: Codec, vector: torch.Tensor, key: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode and decode; returns (decoded, residual, what was used of the message)."""
    plan = codec.plan(layout(len(vector)), CPU)
    residual = vector.clone()
    message = torch.full((plan.message_size,), 0xAB, dtype=torch.uint8)
    plan.encode(residual, message, key)
    assert plan.used <= plan.message_size
    message = message[: plan.used]
    decoded = torch.full_like(vector, torch.nan)
    plan.decode(message[None], decoded, 1.0, False)
    return decoded, residual, message
