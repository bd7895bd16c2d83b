"""What runs in a run: what the user chose, and what has changed since, or was decided."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from lightning_compress.codecs import Codec, Dense, Method
from lightning_compress.core.registry import describe, plain
from lightning_compress.corrections import Corrected, Correction
from lightning_compress.corrections.loco import LoCo
from lightning_compress.exchanges import Keeper, Pattern
from lightning_compress.exchanges.hierarchical import measured_by, replanned
from lightning_compress.exchanges.message import Section
from lightning_compress.reducers import Reducer
from lightning_compress.settings.automatic import Automatic, Chosen
from lightning_compress.settings.compatibility import check_carried, check_corrected
from lightning_compress.settings.compensation import (
    Compensation,
    Optimizer,
    Residual,
    automatic,
    decided_before,
    described,
    name_of,
)
from lightning_compress.settings.options import Options
from lightning_compress.settings.parsing import COMPRESSORS, CompressorLike, build_compressor, rebuild_compressor
from lightning_compress.settings.rules import Compressor, Rules
from lightning_compress.settings.schedule import changed


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What runs now: what the user chose, and what has changed in the run or was decided; equal on all ranks.

    Attributes:
        options: what the user chose.
        compressor: what compresses now.
        rules: which parameter takes which method.
        exchange: with what was measured for it.
        correction: the compressor's own.
        error_feedback: a residual is kept.
        optimizer: its kind, where it is known.
        decided: what an earlier run did about errors, by method, which goes on.
        chosen: what ``compressor="auto"`` became, which ``compressor`` is then; else None.
    """

    options: Options
    compressor: Compressor | Automatic
    rules: Rules
    exchange: Pattern
    correction: Correction | None
    error_feedback: bool
    optimizer: Optimizer | None = None
    decided: tuple[tuple[str, Compensation], ...] = ()
    chosen: Chosen | None = None

    @property
    def method(self) -> Method:
        """What compresses."""
        return self.rules.method

    @property
    def residual(self) -> Residual:
        """What a residual is like, where one is kept."""
        return self.options.error_feedback.residual

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
        return self.options.local_clip_norm is not None or self.correction is not None or self.optimizing is not None

    @property
    def plain(self) -> bool:
        """Whether DistributedDataParallel does all of it by itself."""
        dense = all(isinstance(method, Dense) for method in self.methods)
        return dense and not self.options.deterministic and not self.works_alone and self.options.on_nonfinite == "pass"

    @property
    def dense_steps(self) -> int:
        """Steps before compression begins."""
        return _dense_steps(self.options, self.compressor)

    @property
    def keeps_state(self) -> bool:
        """Whether anything is lost if compression begins anew."""
        declares = isinstance(self.method, Reducer) or self.correction is not None or self.exchange.keeper is not None
        loco = any(isinstance(self.compensation(each), LoCo) for each in self.rules.methods)
        return self.error_feedback or loco or declares or self.dense_steps > 0 or bool(self.options.schedule.courses)

    @property
    def averages(self) -> bool:
        """Whether what the optimizer is given is the mean of the gradients themselves, to which others may be added."""
        return self.steps_by is None and self.options.local_clip_norm is None

    @property
    def _scheduled(self) -> list[Compressor]:
        """The compressors that a schedule produces, in order."""
        return [] if isinstance(self.compressor, Automatic) else self.options.schedule.compressors(self.compressor)

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
        return keeper if keeper and keeper.replaces_optimizer else None

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

    def become(self, chosen: Chosen) -> RunState:
        """The same with what was chosen."""
        rules = dataclasses.replace(self.rules, method=chosen.codec)
        return dataclasses.replace(self, compressor=chosen.codec, rules=rules, chosen=chosen)._checked()

    def _checked(self) -> RunState:
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
    def of(cls, *given: Any, **more: Any) -> RunState:
        """The beginning of a run by what the user gave; see ``Options.of``."""
        return cls.begin(Options.of(*given, **more))

    @classmethod
    def begin(cls, options: Options) -> RunState:
        """The state in which a run begins.

        Raises:
            ValueError: options do not go together.
        """
        given, feedback = options.compressor, options.error_feedback
        made = cls(
            options=options,
            compressor=given,
            rules=Rules(_parts(given)[0], options.min_numel, options.rules),
            exchange=options.exchange,
            correction=_correction(options, given),
            error_feedback=feedback.way == "classical",
        )
        if isinstance(given, Automatic) and len(made.candidates) == 1:
            raise ValueError(
                f"exchange={options.exchange} carries none of what compressor='auto' chooses among "
                f"({', '.join(map(str, Automatic.candidates))}); name a compressor, or use exchange='auto'"
            )
        return made._checked()

    def bound(self, kinds: Mapping[str, str]) -> RunState:
        """The same for a model whose parameters are of these kinds."""
        return dataclasses.replace(self, rules=self.rules.bound(kinds))

    def compensation(self, method: Method) -> Compensation:
        """What makes up for what the method does not send."""
        feedback = self.options.error_feedback
        if feedback.way is not None:
            return "none" if isinstance(feedback.way, LoCo) and isinstance(method, Dense) else feedback.way
        if self.correction and self.correction.replaces_residual:
            return "none"
        if feedback.residual != Residual():  # the user said something about it, and so wants one
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

    def stepped_by(self, optimizer: Optimizer | None) -> RunState:
        """The same where an optimizer of this kind steps; before there is any residual."""
        asked = self.options.error_feedback.way == "classical"
        return dataclasses.replace(self, optimizer=optimizer, error_feedback=asked)._checked()

    def retuned(self, compressor: CompressorLike | None, changes: Mapping[str, object]) -> RunState:
        """The same with another compressor (None: this one), or other settings of it; see ``Compression.retune``.

        Once there is a residual, the run keeps one until its end, so that nothing is lost.

        Raises:
            ValueError: see ``Compression.retune``.
        """
        built = self.compressor if compressor is None else build_compressor(compressor)
        if isinstance(built, Automatic):
            raise ValueError(f"{built} is chosen once, when a run begins, and has no settings after that; name another")
        given = changed(built, changes)
        method, correction = _parts(given)[0], _correction(self.options, given)
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
            "named": describe(self.options.compressor, COMPRESSORS),
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
        # None: of a version that did not keep it
        return named is None or self._rebuilt(named) == self.options.compressor

    def resumed(self, running: Mapping[str, object]) -> RunState:
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
        exchange = replanned(settings.exchange, lambda planner: planner.with_measurements(measured or {}))
        return dataclasses.replace(settings._compensated(running), exchange=exchange)

    def _compensated(self, running: Mapping[str, object]) -> RunState:
        """The same that makes up for errors as an earlier run did, unless the user named another way."""
        made = dataclasses.replace(self, decided=decided_before(running, self.rules.methods))
        keeps = bool(running["error_feedback"])  # what is left of it is sent with the next gradient, at least
        keeps = keeps or any(made.feeds_back(each) for each in made.rules.methods)
        return dataclasses.replace(made, error_feedback=keeps)

    def _rebuilt(self, described: object) -> Compressor:
        return rebuild_compressor(described, [self.compressor, *self.rules.methods, *self._scheduled])


_AUTO = "auto"
"""The family of runs whose compressor is chosen."""


def _dense_steps(options: Options, compressor: Compressor | Automatic) -> int:
    own = compressor.dense_steps if isinstance(compressor, Corrected) else 0
    return own if options.warmup_steps is None else options.warmup_steps


def _correction(options: Options, compressor: Compressor | Automatic) -> Correction | None:
    correction = _parts(compressor)[1]
    return correction and correction.begun(_dense_steps(options, compressor))


def _parts(compressor: Compressor | Automatic) -> tuple[Method, Correction | None]:
    if isinstance(compressor, Automatic):
        return Automatic.candidates[0], None  # until it is chosen
    return (compressor.codec, compressor.correction) if isinstance(compressor, Corrected) else (compressor, None)


def kept_of(now: RunState, following: RunState, scheduled: Mapping[str, object]) -> dict[str, object]:
    """What a checkpoint keeps, as primitives.

    Args:
        now: with which the states were made.
        following: with which the next step begins, after ``retune``.
        scheduled: what a schedule said last.
    """
    made = now.running() | {"scheduled": dict(scheduled)}
    if following is not now:
        made["next"] = following.running()
    kept: dict[str, object] = plain(made)
    return kept


def resumed(own: RunState, kept: Mapping[str, object]) -> tuple[RunState, RunState, dict[str, object]]:
    """What ``kept_of`` was made of, in a run of the user's ``own`` settings.

    Raises:
        ValueError: see ``RunState.resumed``. Where something else was saved, also TypeError, LookupError and the like.
    """
    now, following = (own.resumed(each).bound(own.rules.kinds) for each in (kept, coming(kept)))
    scheduled = dict(cast(Mapping[str, object], kept["scheduled"])) if own.follows(kept) else {}
    return now, now if following == now else following, scheduled


def coming(kept: Mapping[str, object]) -> Mapping[str, object]:
    """What the next step was to begin with."""
    following = kept.get("next", kept)
    if not isinstance(following, Mapping):
        raise ValueError(f"the state has no mapping of what was to run next, but {type(following).__name__}")
    return following
