"""The error of a rank that cannot continue: where it happened, and its probable cause."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch.distributed as dist

_TRANSPORT = re.compile("gloo|pair closure", re.I)
_LOST = re.compile("closed by peer|reset by peer|broken pipe|connection refused|remote process exited|socket", re.I)
_LATE = re.compile(r"time(d )? ?out", re.I)
_MILLISECONDS = re.compile(r"(\d+) ?ms|\(ms\)=(\d+)")

_PATIENCE_S = 0.5
"""Seconds for which a rank that fails asks what the others do."""
_ASKS = "lightning_compress: what do the other ranks do?"


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


@contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """Let the other ranks know that this one is inside a call that every rank has to make, and may wait for them.

    It tells them by the store through which the ranks have met. There they read it once they fail.

    Args:
        call: as the user writes it, such as ``"trainer.save_checkpoint()"``; empty to tell nothing. Calls inside of it
            are not told.
    """
    if _calls or not call:
        yield
        return
    _calls.append(call)
    _tell(call)
    try:
        yield
    finally:
        _calls.clear()
    _tell("")  # not after an error: the others may still have to read it


_calls: list[str] = []
"""The call that this rank is inside of."""


def _key(rank: int) -> str:
    return f"lightning_compress/call/{rank}"


def _store() -> Any:
    """Return the default group's store; None if there is no group, or it has none, as with MPI."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    store = dist.distributed_c10d._get_default_store()
    return store if hasattr(store, "check") else None


def _tell(call: str) -> None:
    if (store := _store()) is not None:
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            store.set(_key(dist.get_rank()), call)


def called_alone() -> str:
    """Return which ranks wait in a call that the others have not made; empty if there are none, or nobody knows."""
    calls = list[str]()
    if not any(each.name == _ASKS for each in threading.enumerate()):  # else nobody has answered before
        asking = threading.Thread(target=_ask, args=[calls], name=_ASKS, daemon=True)  # who keeps the store may hang
        asking.start()
        asking.join(_PATIENCE_S)
    inside = [str(rank) for rank, call in enumerate(calls) if call]
    if not inside or len({*calls}) == 1:
        return ""
    call = calls[int(inside[0])]
    outside = [str(rank) for rank, each in enumerate(calls) if each != call]
    return (
        f"rank {listed(inside)} waits in {call}, and rank {listed(outside)} does not. Call it on every rank, without "
        "'if rank == 0': each has a part in it, and a file is written only once"
    )


def _ask(calls: list[str]) -> None:
    """Add the call that each rank is inside of, if it has told one."""
    if (store := _store()) is not None:
        keys = [_key(rank) for rank in range(dist.get_world_size())]
        with suppress(RuntimeError):
            calls[:] = [store.get(key).decode() if store.check([key]) else "" for key in keys]


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
    text, alone = str(error), called_alone()
    if not _of_transport(error):
        return f"this rank's own error{alone and f', or {alone}'}"
    batches = "fewer batches than this rank (give all ranks the same number)"
    if _LATE.search(text):
        match = _MILLISECONDS.search(text)
        limit = f"{int(match[1] or match[2]) / 1000:g} s" if match else "the time limit"
        why = alone or f"it hangs, the network is down, or it has {batches}"
        return f"a rank did not answer within {limit} (the strategy's timeout=): {why}"
    if _LOST.search(text):
        return (
            f"a rank died or stopped with an error of its own, see that rank's log; or {alone or f'it had {batches}'}"
        )
    return (
        alone or "the ranks issued different collectives, as with different numbers of batches, or the network failed"
    )
