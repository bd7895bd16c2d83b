"""Checks of single settings: each takes the argument's name and what was given, and returns what it means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def must(fits: Callable[[Any], bool], be: str) -> Callable[[str, object], object]:
    """Accept what fits; ``be`` says what it must be."""

    def read(name: str, given: object) -> object:
        if not fits(given):
            raise ValueError(f"{name}={given!r} must be {be}")
        return given

    return read


def count(be: str) -> Callable[[str, object], object]:
    """Accept integers from 0 on."""
    return must(lambda given: isinstance(given, int) and not isinstance(given, bool) and given >= 0, be)


def one_of(*allowed: str) -> Callable[[str, object], object]:
    """Accept these."""
    return must(lambda given: given in allowed, f"one of {', '.join(map(repr, allowed))}")


whole = count("an integer, 0 or more")
warmup = must(lambda given: given is None or (type(given) is int and given >= 0), "a number of steps, or null")
truth = must(lambda given: isinstance(given, bool), "true or false")


def share(name: str, given: object) -> float:
    """A share in [0, 1]."""
    if not isinstance(given, (int, float)) or not 0 <= given <= 1:
        raise ValueError(f"{name}={given!r} must be in [0, 1]; 1 keeps all of it")
    return float(given)
