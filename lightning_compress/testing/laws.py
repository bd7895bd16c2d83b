"""The laws by their numbers in docs/architecture.md, and how one that is broken is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LAWS = {
    1: "conservation",
    2: "size",
    3: "identity",
    4: "one truth",
    6: "state is committed",
    7: "bad numbers pass",
    8: "faithful",
    9: "any bytes",
}


class LawBrokenError(AssertionError):
    """A law is broken; the message says which one, where, and the figures."""


def law(number: int, holds: bool, figures: str) -> None:
    """Raise unless the law holds."""
    if not holds:
        raise LawBrokenError(f"law {number} ({LAWS[number]}): {figures}")


@contextmanager
def named(where: str) -> Iterator[None]:
    """Whatever a method raises by itself is told with where it did."""
    try:
        yield
    except LawBrokenError:
        raise
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
