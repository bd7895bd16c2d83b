"""What a user chooses, checked when it is given."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

from lightning_compress.corrections import Corrected, Correction
from lightning_compress.corrections.clipping import Clipping
from lightning_compress.corrections.loco import LoCo
from lightning_compress.exchanges import Pattern
from lightning_compress.exchanges.hierarchical import replanned
from lightning_compress.reducers import Reducer
from lightning_compress.settings import parsing
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.compensation import BY_METHOD, Feedback, read_feedback
from lightning_compress.settings.parsing import CompressorLike, ExchangeLike, ScheduleLike, written
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
"""Removed arguments, with what to write instead."""


def check_gone(names: Collection[str]) -> None:
    """Raise ValueError if one of these arguments was removed; the message says what to write instead."""
    for name in names:
        if name in GONE:
            raise ValueError(f"{name}= is gone: write {GONE[name]}")


OF_CODECS = ("rules", "min_numel", "error_feedback")
"""Options that say which parameter takes which codec, and what becomes of what that does not send."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that decides what travels, as the user chose it; must be equal on all ranks.

    The fields are arguments of ``CompressedDDPStrategy``, which documents them. ``Annotated`` names the function that
    reads a field's value from what the user gave. ``rules`` is what ``read_rules`` returned.
    """

    compressor: Compressor | Automatic
    exchange: Pattern
    rules: tuple[Rule, ...]
    schedule: Schedule
    min_numel: Annotated[int, parsing.whole] = 1024
    error_feedback: Annotated[Feedback, read_feedback] = BY_METHOD
    warmup_steps: Annotated[int | None, parsing.warmup] = None
    seed: Annotated[int, parsing.read_seed] = 0
    local_clip_norm: Annotated[Clipping | None, parsing.read_clipping] = None
    deterministic: Annotated[bool, parsing.truth] = False
    on_nonfinite: Annotated[str, parsing.one_of("pass", "skip", "raise")] = "pass"
    on_drift: Annotated[str, parsing.one_of("error", "resync")] = "error"
    check_drift_every: Annotated[int, parsing.count("a number of steps, or 0 for never")] = 100
    delay: Annotated[int, parsing.one_of(0, 1)] = 0

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
            ValueError: a value is not allowed, or does not go with another one.
            TypeError: there is no such argument.
        """
        built, pattern = parsing.build_compressor(compressor), parsing.build_exchange(exchange)
        correction = built.correction if isinstance(built, Corrected) else None
        if isinstance(built, Automatic):
            _check_auto(options.get("error_feedback"), schedule)
        if correction:
            _check_exchange(written(built), pattern)
        read = cls._read(options)
        if correction:
            _check_feedback(read["error_feedback"], options.get("error_feedback"), written(built), correction)
        if read["delay"]:
            _check_delay(read["error_feedback"])
            check_delayed([built, *(rule.method for rule in parsing.read_rules(rules))])
        if read["on_drift"] != "error" and not read["check_drift_every"]:
            raise ValueError(
                f"on_drift={read['on_drift']!r} and check_drift_every=0: without checks no drift is found. Set "
                "check_drift_every=100, or leave on_drift out"
            )
        return cls(
            compressor=built,
            exchange=replanned(pattern, lambda planner: planner.limited(read["deterministic"], bool(correction))),
            rules=parsing.read_rules(rules),
            schedule=Schedule() if isinstance(built, Automatic) else Schedule.of(schedule, built),
            **read,
        )

    @classmethod
    def _read(cls, given: Mapping[str, object]) -> dict[str, Any]:
        """Return the values of all ``Annotated`` fields, including defaults.

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


def check_delayed(compressors: Iterable[object]) -> None:
    """Raise ValueError if one of these compressors cannot be averaged beside the next step (``delay=1``)."""
    for compressor in compressors:
        if isinstance(compressor, Reducer):
            raise ValueError(
                f"delay=1 does not work with compressor={written(compressor)}, which needs several rounds of messages "
                "for an average. Use a codec, such as compressor='qsgd', or delay=0"
            )


def _check_delay(feedback: Feedback) -> None:
    """Raise ValueError if a residual follows the learning rate: its step's rate is not known yet."""
    if feedback.residual.follows_lr:
        raise ValueError(
            "delay=1 does not work with error_feedback={'follows_lr': True}: a residual is kept before the learning "
            "rate is known at which its step is applied. Leave follows_lr out, or use delay=0"
        )


def _check_auto(error_feedback: object, schedule: object) -> None:
    """Raise ValueError if an argument was given that only a named compressor can use."""
    if error_feedback not in (None, False, "auto"):
        raise ValueError(
            f"error_feedback={error_feedback!r} has no use with compressor='auto', which chooses among methods that "
            "need none. Leave it out, or name a compressor"
        )
    if schedule not in (None, "none"):
        raise ValueError(
            f"schedule={schedule!r} has no use with compressor='auto', which has no settings that could change. "
            "Name a compressor"
        )


def _check_exchange(compressor: str, exchange: Pattern) -> None:
    """Raise ValueError if a compressor with a correction lacks what it needs, or if both do the optimizer's work."""
    if exchange.plans_collectively:
        raise ValueError(
            f"exchange={written(exchange)} sums the gradients of a node before they are compressed, but "
            f"compressor={compressor} needs to know what each rank sent. Use exchange='auto', or a compressor without "
            "momentum of its own"
        )
    if exchange.keeper and exchange.keeper.replaces_optimizer:
        raise ValueError(
            f"exchange={written(exchange)} and compressor={compressor} would both do the optimizer's work. Use one of "
            "them"
        )


def _check_feedback(feedback: Feedback, given: object, compressor: str, correction: Correction) -> None:
    """Raise ValueError if a compressor's correction does not go with this error feedback; ``given``: by the user."""
    if correction.replaces_residual and (feedback.way not in (None, "none") or feedback.residual_settings):
        raise ValueError(
            f"error_feedback={given!r} has no use with compressor={compressor}, which keeps no residual, but an "
            "estimate per rank. Leave it out"
        )
    if isinstance(feedback.way, LoCo):
        raise ValueError(
            f"error_feedback={given!r} does not work with compressor={compressor}, which counts on a residual. Leave "
            "it out"
        )
