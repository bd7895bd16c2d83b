"""The laws by their numbers in docs/architecture.md, and the error that a broken law raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LAWS = {
    1: "conservation",
    2: "size",
    3: "identity",
    4: "agreement",
    6: "state is committed",
    7: "non-finite values propagate",
    8: "fidelity",
    9: "any bytes",
}


class LawBrokenError(AssertionError):
    """A law is broken. The message names the law, the place, and figures."""


def law(number: int, holds: bool, figures: str) -> None:
    """Raise LawBrokenError with the law's name and ``figures`` unless ``holds``."""
    if not holds:
        raise LawBrokenError(f"law {number} ({LAWS[number]}): {figures}")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Raise other errors of the method as AssertionError with the place ``where`` they occurred."""
    try:
        yield
    except LawBrokenError:
        raise
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
