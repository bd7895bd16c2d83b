"""Test vectors and their layouts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_compress.core.layout import Layout

CPU = torch.device("cpu")
DENSE = Layout.of([("bias", (37,)), ("norm", (5,))])
LARGE = Layout.of([("conv", (16, 9, 9, 9)), ("linear", (101, 67)), ("odd", (3, 347))])
SMALL = Layout.of([("matrix", (16, 16)), ("row", (67,))])
"""The layout of vectors that are sent hundreds of times. Its last elements do not fill a block of any method."""
LENGTHS = (1, 300, 5000)
"""Lengths of vectors that are encoded on one rank."""
KINDS = (
    "normal",
    "heavy",
    "zeros",
    "constant",
    "negative",
    "one-hot",
    "denormal",
    "tiny",
    "minus zero",
    "huge",
    "ties",
    "sparse",
    "lopsided",
)


def make(kind: str, numel: int, seed: int = 0) -> Tensor:
    """Return a float32 vector ``[numel]`` of one of ``KINDS``."""
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
        "tiny": normal * 1e-30,
        "minus zero": np.where(normal > 0.5, 1.0, -0.0),
        "huge": normal * 1e30,
        "ties": random.integers(-2, 3, numel),
        "lopsided": np.where(normal < -1, normal * 10.0 ** random.integers(-30, 0), 1 + np.abs(normal)),
        "sparse": np.where(random.random(numel) < 0.02, normal, 0),
    }[kind]
    return torch.from_numpy(values.astype(np.float32))


def layout(numel: int) -> Layout:
    """Return a layout of three parameters, the last one cut."""
    first, second = numel // 2, numel // 3
    whole = Layout.of([("a", (first,)), ("b", (second,)), ("c", (numel - first - second + 7,))])
    return whole.cut(0, numel)


def vector(rank: int, seed: int = 0) -> Tensor:
    """Return a group's gradient, float32 ``[DENSE.numel + LARGE.numel]``, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numel = DENSE.numel + LARGE.numel
    normal = torch.randn(numel, dtype=torch.float32, generator=generator)
    return normal * torch.rand(numel, dtype=torch.float32, generator=generator).square()
