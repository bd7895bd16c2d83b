"""The error of a rank that cannot continue: where it was, and the probable cause."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

_TRANSPORT = re.compile("gloo|pair closure", re.I)
_LOST = re.compile("closed by peer|reset by peer|broken pipe|connection refused|remote process exited|socket", re.I)
_LATE = re.compile(r"time(d )? ?out", re.I)
_MILLISECONDS = re.compile(r"(\d+) ?ms|\(ms\)=(\d+)")


class ExchangeError(RuntimeError):
    """The ranks could not average, save or wait together; ``__cause__`` is the error that it began with."""


@contextmanager
def explained(what: str, rank: int) -> Iterator[None]:
    """Say where an error happened and what is the probable cause; Ctrl-C and exits pass through.

    Args:
        what: is done inside, such as ``"step 7: averaging layer.weight"``.
        rank: of this process.

    Raises:
        ExchangeError: from the error that was raised inside.
    """
    try:
        yield
    except Exception as error:
        explain(error, what, rank)


def explain(error: Exception, what: str, rank: int) -> NoReturn:
    """Raise an ``ExchangeError`` from an error that happened while ``what`` was done; see ``explained``."""
    if isinstance(error, ExchangeError):
        raise error
    raise ExchangeError(f"rank {rank}, {what}: {cause(error)} [{type(error).__name__}: {error}]") from error


@contextmanager
def of_transport(what: str, rank: int) -> Iterator[None]:
    """The same for errors of the transport alone; what else is raised inside passes through."""
    try:
        yield
    except Exception as error:
        if not _of_transport(error):
            raise
        with explained(what, rank):
            raise


def _of_transport(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or bool(_TRANSPORT.search(str(error)))


def cause(error: Exception) -> str:
    """The probable cause of an error inside a collective, or around it."""
    text = str(error)
    if not _of_transport(error):
        return "this rank's own error"
    if _LATE.search(text):
        found = _MILLISECONDS.search(text)
        limit = f"{int(found[1] or found[2]) / 1000:g} s" if found else "the time limit"
        return (
            f"a rank did not answer within {limit}: it hangs, waits for something else, has no batch left where this "
            "one has (give all ranks the same number), or the network is gone (the limit is the strategy's timeout=)"
        )
    if _LOST.search(text):
        return (
            "a rank died or stopped with an error of its own, and what it said last tells why; or it had no batch left "
            "where this one has: give all ranks the same number"
        )
    return "the ranks did not do the same, as where one has no batch left and another has, or the network failed"
