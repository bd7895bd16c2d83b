"""What plans share whose messages differ in length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_compress.codecs.codec import Plan

Bytes = npt.NDArray[np.uint8]


class VariablePlan(Plan):
    """A plan that sets ``_used`` in every ``encode``, and ``_expected`` once."""

    variable = True
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
