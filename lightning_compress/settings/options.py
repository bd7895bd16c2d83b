"""What a user chooses, checked as soon as it is given."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

from lightning_compress.corrections import Corrected
from lightning_compress.corrections.clipping import Clipping
from lightning_compress.exchanges import Pattern
from lightning_compress.exchanges.hierarchical import replanned
from lightning_compress.settings import validators
from lightning_compress.settings.automatic import Automatic, check_automatic
from lightning_compress.settings.compatibility import check_alone
from lightning_compress.settings.compensation import BY_METHOD, Feedback, check_feedback, read_feedback
from lightning_compress.settings.parsing import (
    CompressorLike,
    ExchangeLike,
    ScheduleLike,
    build_compressor,
    build_exchange,
    read_clipping,
    read_rules,
)
from lightning_compress.settings.rules import Compressor, Rule
from lightning_compress.settings.schedule import Schedule

GONE = {
    "exclude": "rules=[{'match': ['head.*'], 'compressor': 'none'}]",
    "local_clip_by": "local_clip_norm={'norm': 1.0, 'by': 'bucket'}",
    "residual_decay": "error_feedback={'decay': 0.95}",
    "residual_dtype": "error_feedback={'dtype': 'bfloat16'}",
    "residual_follows_lr": "error_feedback={'follows_lr': True}",
    "warmup_rounds": "warmup_steps=5, which are rounds there",
}
"""What is no argument any more, and how to write it."""


def check_gone(names: Collection[str]) -> None:
    """Refuse what is no argument any more.

    Raises:
        ValueError: it was given; the message says what to write.
    """
    for name in names:
        if name in GONE:
            raise ValueError(f"{name}= is gone: write {GONE[name]}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that decides what travels, as the user chose it; must be equal on all ranks.

    What is ``Annotated`` is an argument of ``CompressedDDPStrategy``, which documents it; that function reads what the
    user gave under this name. So are the others, but ``rules`` is what ``read_rules`` makes of them.
    """

    compressor: Compressor | Automatic
    exchange: Pattern
    rules: tuple[Rule, ...]
    schedule: Schedule
    min_numel: Annotated[int, validators.whole] = 1024
    error_feedback: Annotated[Feedback, read_feedback] = BY_METHOD
    warmup_steps: Annotated[int | None, validators.warmup] = None
    seed: Annotated[int, validators.whole] = 0
    local_clip_norm: Annotated[Clipping | None, read_clipping] = None
    deterministic: Annotated[bool, validators.truth] = False
    on_nonfinite: Annotated[str, validators.one_of("pass", "skip", "raise")] = "pass"
    on_drift: Annotated[str, validators.one_of("error", "resync")] = "error"
    check_drift_every: Annotated[int, validators.count("a number of steps, or 0 for never")] = 100

    @classmethod
    def of(
        cls,
        compressor: CompressorLike,
        exchange: ExchangeLike = "auto",
        *,
        rules: Sequence[Mapping[str, object]] | None = (),
        schedule: ScheduleLike = None,
        **options: Any,
    ) -> Options:
        """Check and complete what the user gave; the arguments are those of ``CompressedDDPStrategy``.

        Raises:
            ValueError: a value is not allowed; the message names it, what is allowed, and the fix.
            TypeError: there is no such argument.
        """
        given, pattern = build_compressor(compressor), build_exchange(exchange)
        correction = given.correction if isinstance(given, Corrected) else None
        if isinstance(given, Automatic):
            check_automatic(given, options.get("error_feedback"), schedule)
        if correction:
            check_alone(given, pattern)
        read = cls._read(options)
        check_feedback(read["error_feedback"], given, correction)
        if read["on_drift"] != "error" and not read["check_drift_every"]:
            raise ValueError(
                f"on_drift={read['on_drift']!r} and check_drift_every=0: without checks no drift is found; give "
                "check_drift_every=100, or leave on_drift out"
            )
        return cls(
            compressor=given,
            exchange=replanned(pattern, lambda planner: planner.limited(read["deterministic"], bool(correction))),
            rules=read_rules(rules),
            schedule=Schedule() if isinstance(given, Automatic) else Schedule.of(schedule, given),
            **read,
        )

    @classmethod
    def _read(cls, given: Mapping[str, object]) -> dict[str, Any]:
        """Values of all fields that are read by themselves, the defaults included.

        Raises:
            TypeError: there is no such field.
            ValueError: a value is not allowed.
        """
        known = {
            name: hint.__metadata__[0]
            for name, hint in get_type_hints(cls, include_extras=True).items()
            if get_origin(hint) is Annotated
        }
        check_gone(given.keys())
        for name in given.keys() - known.keys():
            close = difflib.get_close_matches(name, [*inspect.signature(cls.of).parameters, *known], n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"there is no argument {name!r}{meant}")
        return {name: read(name, given.get(name, getattr(cls, name))) for name, read in known.items()}
