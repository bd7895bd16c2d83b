"""What ran, as primitives in a checkpoint, and the settings with which another run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from lightning_compress.core.primitives import plain
from lightning_compress.settings.run_state import RunState

Scheduled = Mapping[str, object]
"""What a schedule said last, as primitives."""


def running(now: RunState, following: RunState, scheduled: Scheduled) -> dict[str, object]:
    """What a checkpoint keeps.

    Args:
        now: with which the states were made.
        following: with which the next step begins, after ``retune``.
        scheduled: see ``Scheduled``.
    """
    made = now.running() | {"scheduled": dict(scheduled)}
    if following is not now:
        made["next"] = following.running()
    kept: dict[str, object] = plain(made)
    return kept


def resumed(own: RunState, kept: Mapping[str, object]) -> tuple[RunState, RunState, dict[str, object]]:
    """What ``running`` was made of, in a run of the user's ``own`` settings.

    Raises:
        ValueError: see ``RunState.resumed``. Where something else was saved, also TypeError, LookupError and the like.
    """
    now, following = (own.resumed(each).bound(own.rules.kinds) for each in (kept, coming(kept)))
    scheduled = dict(cast(Scheduled, kept["scheduled"])) if own.follows(kept) else {}
    return now, now if following == now else following, scheduled


def coming(kept: Mapping[str, object]) -> Mapping[str, object]:
    """What the next step was to begin with."""
    following = kept.get("next", kept)
    if not isinstance(following, Mapping):
        raise ValueError(f"the state has no mapping of what was to run next, but {type(following).__name__}")
    return following
