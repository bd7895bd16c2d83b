"""What a user chooses, checked as soon as it is given."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

import torch

from lightning_compress.codecs import Codec, Dense, Method
from lightning_compress.core.registry import describe
from lightning_compress.corrections import Corrected, Correction
from lightning_compress.corrections.clipping import ClipBy
from lightning_compress.corrections.loco import LoCo
from lightning_compress.exchanges import Keeper, Pattern, Planner
from lightning_compress.exchanges.hierarchical import measured_by, replanned
from lightning_compress.exchanges.message import Section
from lightning_compress.reducers import Reducer
from lightning_compress.settings import readers
from lightning_compress.settings.arguments import (
    COMPRESSORS,
    CompressorLike,
    ExchangeLike,
    ScheduleLike,
    build_compressor,
    build_exchange,
    read_dtype,
    read_norm,
    read_patterns,
    read_rules,
    rebuild_compressor,
)
from lightning_compress.settings.automatic import Automatic, Chosen, check_automatic
from lightning_compress.settings.compensation import (
    Compensation,
    FeedbackLike,
    Optimizer,
    automatic,
    check_feedback,
    decided_before,
    described,
    name_of,
    read_feedback,
)
from lightning_compress.settings.conflicts import check_carried, check_corrected, check_idle
from lightning_compress.settings.rules import Compressor, Rules
from lightning_compress.settings.schedule import Schedule, changed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what travels; must be equal on all ranks.

    What is ``Annotated`` is an argument of ``CompressedDDPStrategy``, which documents it; that function reads what the
    user gave under this name.

    Attributes:
        error_feedback: a residual is kept.
        feedback: what the user chose for all methods; None: it follows from the method and the optimizer.
        asks: the latter was asked for by name, and needs an optimizer.
        optimizer: its kind, where it is known.
        decided: what an earlier run did, by method, which goes on.
        chosen: what ``compressor="auto"`` became, which ``compressor`` is then; else None.
        named: the compressor that the user gave, whatever it was changed to since.
    """

    compressor: Compressor | Automatic
    rules: Rules
    exchange: Pattern
    correction: Correction | None
    error_feedback: bool
    feedback: Compensation | None
    schedule: Schedule
    asks: bool = False
    optimizer: Optimizer | None = None
    decided: tuple[tuple[str, Compensation], ...] = ()
    warmup_steps: Annotated[int, readers.whole] = 0
    seed: Annotated[int, readers.whole] = 0
    residual_decay: Annotated[float, readers.share] = 1.0
    residual_follows_lr: Annotated[bool, readers.truth] = False
    residual_dtype: Annotated[torch.dtype, read_dtype] = torch.float32
    local_clip_norm: Annotated[float | None, read_norm] = None
    local_clip_by: Annotated[ClipBy, readers.clip_by] = "parameter"
    deterministic: Annotated[bool, readers.truth] = False
    on_nonfinite: Annotated[str, readers.one_of("pass", "skip", "raise")] = "pass"
    on_drift: Annotated[str, readers.one_of("error", "resync")] = "error"
    check_drift_every: Annotated[int, readers.count("a number of steps, or 0 for never")] = 100
    chosen: Chosen | None = None
    named: Compressor | Automatic | None = None

    @property
    def method(self) -> Method:
        """What compresses."""
        return self.rules.method

    @property
    def family(self) -> str:
        """What state is of: it is good for any settings of the same method."""
        if self.chosen or isinstance(self.compressor, Automatic):
            return _AUTO
        parts = (self.correction, self.method)
        return " ".join(type(part).__name__ for part in parts if part is not None)

    @property
    def families(self) -> tuple[str, ...]:
        """Of which state a run can go on: what is chosen, and may be chosen, has the same."""
        candidates = tuple(type(each).__name__ for each in Automatic.candidates)
        if self.family == _AUTO:
            return (_AUTO, *candidates)
        return (self.family, _AUTO) if self.family in candidates else (self.family,)

    @property
    def works_alone(self) -> bool:
        """Whether there is something to do on one rank, too."""
        return self.local_clip_norm is not None or self.correction is not None or self.optimizing is not None

    @property
    def plain(self) -> bool:
        """Whether DistributedDataParallel does all of it by itself."""
        dense = all(isinstance(method, Dense) for method in self.methods)
        return dense and not self.deterministic and not self.works_alone and self.on_nonfinite == "pass"

    @property
    def dense_steps(self) -> int:
        """Steps before compression begins."""
        own = self.compressor.dense_steps if isinstance(self.compressor, Corrected) else 0
        return max(self.warmup_steps, own)

    @property
    def keeps_state(self) -> bool:
        """Whether anything is lost if compression begins anew."""
        declares = isinstance(self.method, Reducer) or self.correction is not None or self.exchange.keeper is not None
        loco = any(isinstance(self.compensation(each), LoCo) for each in self.rules.methods)
        return self.error_feedback or loco or declares or self.dense_steps > 0 or bool(self.schedule.courses)

    @property
    def averages(self) -> bool:
        """Whether what the optimizer is given is the mean of the gradients themselves, to which others may be added."""
        return self.steps_by is None and self.local_clip_norm is None

    @property
    def _scheduled(self) -> list[Compressor]:
        """The compressors that a schedule produces, in order."""
        return [] if isinstance(self.compressor, Automatic) else self.schedule.compressors(self.compressor)

    @property
    def methods(self) -> list[Method]:
        """All that will compress at some time, or may be chosen to."""
        if isinstance(self.compressor, Automatic):
            return [*self.rules.methods, *self.candidates]
        return [*self.rules.methods, *(_parts(each)[0] for each in self._scheduled)]

    @property
    def steps_by(self) -> Compressor | Automatic | Pattern | None:
        """What gives the optimizer anything else than a mean of gradients: a velocity, a step of Adam, a vote."""
        if self.correction is not None:
            return self.compressor
        votes = [each for each in self.methods if not each.conserves]
        return votes[0] if votes else self.exchange if self.optimizing else None

    @property
    def optimizing(self) -> Keeper | None:
        """The exchange's part of the optimizer's work, if it does any."""
        keeper = self.exchange.keeper
        return keeper if keeper and keeper.optimizes else None

    @property
    def candidates(self) -> list[Codec]:
        """What ``compressor="auto"`` can become with this exchange, from safe to coarse."""
        first, *others = Automatic.candidates
        carried: list[Codec] = [first]  # which needs no exchange
        for each in others:
            with contextlib.suppress(ValueError):
                self.exchange.check(each)
                carried.append(each)
        return carried

    def become(self, chosen: Chosen) -> Settings:
        """The same with what was chosen."""
        rules = dataclasses.replace(self.rules, method=chosen.codec)
        return dataclasses.replace(self, compressor=chosen.codec, rules=rules, chosen=chosen)._checked()

    def _checked(self) -> Settings:
        """With error feedback on if the rules' methods ask for it.

        Raises:
            ValueError: methods, exchange and error feedback do not go together.
        """
        for method in self.methods:
            check_carried(method, self.exchange, self.compensation(method))
        for given in (self.compressor, *self._scheduled):
            if correction := _parts(given)[1]:
                check_corrected(given, correction, self.exchange, self.rules.methods)
        needed = any(self.feeds_back(method) for method in self.rules.methods)
        return dataclasses.replace(self, error_feedback=self.error_feedback or needed)

    @classmethod
    def of(
        cls,
        compressor: CompressorLike,
        exchange: ExchangeLike = "auto",
        error_feedback: FeedbackLike = None,
        *,
        min_numel: int = 1024,
        exclude: Sequence[str] | None = (),
        rules: Sequence[Mapping[str, object]] | None = (),
        schedule: ScheduleLike = None,
        **options: Any,
    ) -> Settings:
        """Check and complete what the user gave; the arguments are those of ``CompressedDDPStrategy``.

        Raises:
            ValueError: a value is not allowed; the message names it, what is allowed, and the fix.
            TypeError: there is no such argument.
        """
        given, pattern = build_compressor(compressor), build_exchange(exchange)
        if isinstance(given, Automatic):
            check_automatic(given, error_feedback, schedule)
        method, correction = _parts(given)
        if correction and pattern.talks:
            raise ValueError(
                f"exchange={pattern} adds up the gradients of a node before they are compressed, and {given} needs to "
                "know what each rank sent; use exchange='auto', or a compressor without momentum of its own"
            )
        pattern = pattern.flat() if correction and isinstance(pattern, Planner) else pattern
        if correction and pattern.keeper and pattern.keeper.optimizes:
            raise ValueError(f"exchange={pattern} and {given} would both do the optimizer's work; use one of them")
        feedback, asks = read_feedback(error_feedback)
        chosen = cls._read(options)
        read_norm("local_clip_norm", chosen["local_clip_norm"], given)
        check_idle(*(chosen[name] for name in ("local_clip_norm", "local_clip_by", "on_drift", "check_drift_every")))
        readers.whole("min_numel", min_numel)
        made = cls(
            compressor=given,
            rules=Rules(method, min_numel, read_patterns("exclude", exclude), read_rules(rules)),
            exchange=replanned(pattern, lambda planner: planner.fixed()) if chosen["deterministic"] else pattern,
            correction=correction,
            error_feedback=feedback == "classical",
            feedback=feedback,
            asks=asks,
            schedule=Schedule() if isinstance(given, Automatic) else Schedule.of(schedule, given),
            named=given,
            **chosen,
        )
        check_feedback(feedback, given, correction, made._shapes_residual)
        if isinstance(given, Automatic) and len(made.candidates) == 1:
            raise ValueError(
                f"exchange={pattern} carries none of what compressor='auto' chooses among "
                f"({', '.join(map(str, Automatic.candidates))}); name a compressor, or use exchange='auto'"
            )
        return made._checked()

    @classmethod
    def _read(cls, given: Mapping[str, object]) -> dict[str, Any]:
        """Values of all fields that a user sets, the defaults included.

        Raises:
            TypeError: there is no such field.
            ValueError: a value is not allowed.
        """
        known = {
            name: hint.__metadata__[0]
            for name, hint in get_type_hints(cls, include_extras=True).items()
            if get_origin(hint) is Annotated
        }
        for name in given.keys() - known.keys():
            close = difflib.get_close_matches(name, [*inspect.signature(cls.of).parameters, *known], n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"Settings.of() got an unexpected keyword argument {name!r}{meant}")
        return {name: read(name, given.get(name, getattr(cls, name))) for name, read in known.items()}

    def bound(self, kinds: Mapping[str, str]) -> Settings:
        """The same for a model whose parameters are of these kinds."""
        return dataclasses.replace(self, rules=self.rules.bound(kinds))

    def compensation(self, method: Method) -> Compensation:
        """What makes up for what the method does not send."""
        if self.feedback is not None:
            return "none" if isinstance(self.feedback, LoCo) and isinstance(method, Dense) else self.feedback
        if self.correction and self.correction.replaces_residual:
            return "none"
        if self._shapes_residual:
            return automatic(method, None)
        known = None if self.correction else self.optimizer
        return dict(self.decided).get(name_of(method)) or automatic(method, known)

    def feeds_back(self, method: Method) -> bool:
        """Whether what the method does not send is added to the next gradient, in full."""
        return self.compensation(method) == "classical"

    def fed(self, section: Section) -> Section:
        """The section with what becomes of its errors."""
        way, method = self.compensation(section.method), section.method
        precise = isinstance(method, Codec) and method.contractive and not method.sparse and way != "classical"
        return dataclasses.replace(section, fed_back=way != "none", precise=precise)

    @property
    def _shapes_residual(self) -> bool:
        """The user said something about a residual, and so wants one."""
        usual = self.residual_decay == 1.0 and self.residual_dtype == torch.float32
        return not usual or self.residual_follows_lr

    def stepped_by(self, optimizer: Optimizer | None) -> Settings:
        """The same where an optimizer of this kind steps; before there is any residual."""
        made = dataclasses.replace(self, optimizer=optimizer, error_feedback=self.feedback == "classical")
        return made._checked()

    def retuned(self, compressor: CompressorLike | None, changes: Mapping[str, object]) -> Settings:
        """The same with another compressor (None: this one), or other settings of it; see ``Compression.retune``.

        Once there is a residual, the run keeps one until its end, so that nothing is lost.

        Raises:
            ValueError: see ``Compression.retune``.
        """
        built = self.compressor if compressor is None else build_compressor(compressor)
        if isinstance(built, Automatic):
            raise ValueError(f"{built} is chosen once, when a run begins, and has no settings after that; name another")
        given = changed(built, changes)
        method, correction = _parts(given)
        if type(correction) is not type(self.correction):
            raise ValueError(
                f"{given} cannot follow {self.compressor} within a run: each takes another part of the optimizer's work"
            )
        rules = dataclasses.replace(self.rules, method=method)
        return dataclasses.replace(self, compressor=given, rules=rules, correction=correction)._checked()

    def running(self) -> dict[str, object]:
        """What may have changed since the run began, as primitives."""
        return {
            "compressor": describe(self.compressor, COMPRESSORS),
            "named": describe(self.named, COMPRESSORS),
            "error_feedback": self.error_feedback,
            "compensations": {name_of(each): described(self.compensation(each)) for each in self.rules.methods},
            "measured": measured_by(self.exchange),
            "chosen": self.chosen and self.chosen.as_primitives(),
        }

    def follows(self, running: Mapping[str, object]) -> bool:
        """Whether the compressor of an earlier run goes on: the user named the same, or ``auto`` chose it here.

        Raises:
            ValueError: it is not what ``running`` gave.
        """
        compressor, before, named = running["compressor"], running.get("chosen"), running.get("named")
        if not isinstance(before, Mapping | None):
            raise ValueError(f"the state has no mapping of what was chosen, but {type(before).__name__}")
        if compressor is None or (before is None) != (self.chosen is None):
            return False
        if before is not None and self.chosen is not None:
            return self.chosen.was_here(before) or compressor != before.get("compressor")
        return named is None or self._rebuilt(named) == self.named  # None: of a version that did not keep it

    def resumed(self, running: Mapping[str, object]) -> Settings:
        """The same with what ``running`` gave in an earlier run.

        What the user names otherwise than then runs as named. A compressor that was changed in the middle of the run,
        or that ``auto`` chose on the same cluster, goes on.

        Raises:
            ValueError: see ``retuned`` and ``follows``.
        """
        settings = self.retuned(self._rebuilt(running["compressor"]), {}) if self.follows(running) else self
        measured = running.get("measured")
        if not isinstance(measured, Mapping | None):
            raise ValueError(f"the state has no mapping of what was measured, but {type(measured).__name__}")
        exchange = replanned(settings.exchange, lambda planner: planner.given(measured or {}))
        return dataclasses.replace(settings._compensated(running), exchange=exchange)

    def _compensated(self, running: Mapping[str, object]) -> Settings:
        """The same that makes up for errors as an earlier run did, unless the user named another way."""
        made = dataclasses.replace(self, decided=decided_before(running, self.rules.methods))
        keeps = bool(running["error_feedback"])  # what is left of it is sent with the next gradient, at least
        keeps = keeps or any(made.feeds_back(each) for each in made.rules.methods)
        return dataclasses.replace(made, error_feedback=keeps)

    def _rebuilt(self, described: object) -> Compressor:
        return rebuild_compressor(described, [self.compressor, *self.rules.methods, *self._scheduled])

    def digest(self) -> bytes:
        """32 bytes that are equal where the settings are."""
        return hashlib.sha256(repr(self).encode()).digest()


_AUTO = "auto"
"""The family of runs whose compressor is chosen."""


def _parts(compressor: Compressor | Automatic) -> tuple[Method, Correction | None]:
    if isinstance(compressor, Automatic):
        return Automatic.candidates[0], None  # until it is chosen
    return (compressor.codec, compressor.correction) if isinstance(compressor, Corrected) else (compressor, None)
