"""A row of the table of cases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.reducers import Reducer
from tests.reference import codecs as reference

Loss = Literal["nothing", "element", "block", "vector", "added"]
Size = Callable[[Any, Layout], int]
Reference = Callable[[Any, reference.Array, Layout, torch.Tensor], tuple[reference.Array, reference.Array]]


@dataclass(frozen=True)
class Case:
    """A method with small settings, and what is true of it.

    Args:
        codec: the method; a codec or a reducer.
        size: a codec's formula: bytes without flag and padding; the most that a message may take if that varies.
        rounding: what summing in the message's own dtype may lose, relative to the largest value.
        lossless: settings at which the method changes nothing, if there are any.
        loses: what message and rest together may differ by from the vector: "nothing", or a last bit of the element
            itself, of the largest of its "block" or of the "vector", or of all that was "added" to it.
        variable: messages differ in length.
        growth: of two-shot's traffic from 4 to 16 ranks, at most, on a small layout; more where equal shards take
            different numbers of bytes, and where sums of more ranks take many more bits (``Codec.refined``).
        reference: a slow one, if there is any: of a vector and its message (of key 1), what is sent and what stays.
        also: other settings that are compared with the reference.
        numba: settings under which kernels of a CPU are compared with tensor operations, if it has any.
        triton: settings under which kernels of an accelerator are compared with a CPU, if it has any.
        transforms: the latter round otherwise than a CPU.
        scales: of normal gradients whose error is a constant share of them; None: the mean depends on signs alone.
    """

    name: str
    codec: Codec | Reducer
    size: Size | None = None
    rounding: float = 0.0
    lossless: Codec | Reducer | None = None
    loses: Loss = "nothing"
    variable: bool = False
    growth: float = 1.35
    reference: Reference | None = None
    also: tuple[Codec, ...] = ()
    numba: tuple[dict[str, Any], ...] = ()
    triton: tuple[dict[str, Any], ...] = ()
    transforms: bool = False
    scales: tuple[float, float] | None = (1e-35, 1e30)

    def message_size(self, layout: Layout) -> int:
        """The method's formula for its settings."""
        return self.size(self.codec, layout)

    @property
    def contrib(self) -> bool:
        """Whether it stands for completeness, and is tried at one size and by one exchange unless thoroughly."""
        return type(self.codec).__module__.startswith("lightning_compress.contrib")

    def check_errors(self, errors: dict[float, float]) -> None:
        """Check the error by scale of the gradients, relative to these.

        Within the method's range it is what it is at 1. Beyond, no more than all may be lost.
        """
        assert self.scales is not None
        least, most = self.scales
        for scale, error in errors.items():
            if least <= scale * (1 + 1e-9) and scale <= most * (1 + 1e-9):
                assert error == pytest.approx(errors[1.0], rel=0.2, abs=1e-6), f"of gradients of scale {scale:g}"
            else:
                assert error <= 1 + 1e-6, f"of gradients of scale {scale:g}"
