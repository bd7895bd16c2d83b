"""The error of a rank that cannot continue: where it happened, and its probable cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

_TRANSPORT = re.compile("gloo|pair closure", re.I)
_LOST = re.compile("closed by peer|reset by peer|broken pipe|connection refused|remote process exited|socket", re.I)
_LATE = re.compile(r"time(d )? ?out", re.I)
_MILLISECONDS = re.compile(r"(\d+) ?ms|\(ms\)=(\d+)")


class ExchangeError(RuntimeError):
    """The ranks could not average, save or wait together; ``__cause__`` is the original error."""


@contextmanager
def explained(what: str, rank: int) -> Iterator[None]:
    """Turn an error inside the context into one that says where it happened and why; Ctrl-C and exits pass through.

    Args:
        what: is being done inside, such as ``"step 7: averaging layer.weight"``.
        rank: of this process.

    Raises:
        ExchangeError: from the error that was raised inside.
    """
    try:
        yield
    except Exception as error:
        explain(error, what, rank)


def listed(names: Sequence[str]) -> str:
    """Return the first three names as text, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def explain(error: Exception, what: str, rank: int) -> NoReturn:
    """Raise an ``ExchangeError`` from an error that happened while doing ``what``; see ``explained``."""
    if isinstance(error, ExchangeError):
        raise error
    raise ExchangeError(f"rank {rank}, {what}: {cause(error)} [{type(error).__name__}: {error}]") from error


@contextmanager
def of_transport(what: str, rank: int) -> Iterator[None]:
    """``explained`` for errors of the transport only; other errors pass through unchanged."""
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
    """Return the probable cause of an error inside or around a collective."""
    text = str(error)
    if not _of_transport(error):
        return "this rank's own error"
    if _LATE.search(text):
        match = _MILLISECONDS.search(text)
        limit = f"{int(match[1] or match[2]) / 1000:g} s" if match else "the time limit"
        return (
            f"a rank did not answer within {limit} (the strategy's timeout=): it hangs, the network is down, or it has "
            "fewer batches than this rank (give all ranks the same number)"
        )
    if _LOST.search(text):
        return (
            "a rank died or stopped with an error of its own, see that rank's log; or it had fewer batches than this "
            "rank (give all ranks the same number)"
        )
    return "the ranks issued different collectives, as with different numbers of batches, or the network failed"
