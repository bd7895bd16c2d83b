"""What plans share whose messages differ in length."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress.codecs.base import Plan

Bytes = npt.NDArray[np.uint8]


class VariablePlan(Plan):
    """A plan that sets ``_used`` in every ``encode``, and ``_expected`` once."""

    variable: ClassVar[bool] = True
    _used = 0
    _expected = 0

    @property
    def used(self) -> int:
        """Bytes of the message that ``encode`` wrote last."""
        return self._used

    @property
    def expected_size(self) -> int:
        """Bytes that a message usually takes, from which exchanges are chosen."""
        return self._expected


def check_variable(vector: Tensor, messages: Tensor, numel: int, capacity: int, whole: bool) -> None:
    """Refuse a vector or messages that cannot be this plan's; the messages' insides are checked as they are read.

    Args:
        vector: should be float32 ``[numel]``.
        messages: should be uint8 with ``capacity`` bytes in a row, or fewer.
        numel: length of the plan's vectors.
        capacity: the plan's ``message_size``.
        whole: there must be room for all of the capacity.

    Raises:
        ValueError: a length or a dtype is not the plan's.
    """
    if vector.shape != (numel,) or vector.dtype != torch.float32:
        raise ValueError(
            f"the vector is {vector.dtype} of shape {tuple(vector.shape)}, but this plan is for float32 of shape "
            f"({numel},); make a plan for its layout"
        )
    size = messages.shape[-1]
    if messages.dtype != torch.uint8 or size > capacity or (whole and size < capacity):
        raise ValueError(
            f"the message is {messages.dtype} with {size} bytes, but this plan's messages are uint8 with "
            f"{'' if whole else 'at most '}{capacity} bytes; it is truncated, or was made by a plan for another layout"
        )


def damaged(what: str) -> ValueError:
    """The error for a message that no ``encode`` of this plan makes."""
    return ValueError(f"the message is truncated, damaged, or of another layout: {what}")


def take(body: Bytes, size: int, what: str) -> Bytes:
    """The first ``size`` bytes.

    Raises:
        ValueError: there are fewer.
    """
    if size > len(body):
        raise damaged(f"{what} take {size} bytes, and {len(body)} are left")
    return body[:size]
