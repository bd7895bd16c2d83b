"""Vectors worth trying, and one trip through a codec."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from lightning_compress.codecs import Codec
from lightning_compress.testing.single_rank import trip
from lightning_compress.testing.vectors import CPU, KINDS, layout, make
from tests.cases import CASES

__all__ = ["CODECS", "CPU", "KINDS", "layout", "make", "trip", "vectors"]

OURS = [case.codec for case in CASES if isinstance(case.codec, Codec)]
CODECS: list[Codec] = list(dict.fromkeys(OURS + [type(codec)() for codec in OURS]))


def vectors() -> st.SearchStrategy[torch.Tensor]:
    """Vectors of 1 to 70,000 elements of every kind."""
    sizes = st.one_of(
        st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 4096, 4097, 70_000]), st.integers(1, 70_000)
    )
    return st.builds(make, st.sampled_from(KINDS), sizes, st.integers(0, 99))
