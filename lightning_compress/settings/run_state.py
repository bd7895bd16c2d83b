"""The settings that are in force: what the user chose, and what has changed or was decided during the run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_compress.codecs import Codec, Dense, Method
from lightning_compress.core.registry import describe, plain
from lightning_compress.corrections import Corrected, Correction
from lightning_compress.corrections.loco import LoCo
from lightning_compress.exchanges import Keeper, Pattern, Planner
from lightning_compress.exchanges.hierarchical import measured_by, replanned
from lightning_compress.exchanges.message import Section
from lightning_compress.reducers import Reducer
from lightning_compress.settings.automatic import Automatic, Chosen
from lightning_compress.settings.compensation import (
    Compensation,
    Optimizer,
    Residual,
    automatic,
    decided_before,
    described,
    saved_name,
)
from lightning_compress.settings.options import Options
from lightning_compress.settings.parsing import (
    COMPRESSORS,
    CompressorLike,
    build_compressor,
    mapping,
    rebuild_compressor,
    written,
)
from lightning_compress.settings.rules import Compressor, Rules, Shape
from lightning_compress.settings.schedule import changed


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The settings in force; equal on all ranks. Immutable: methods return a changed copy.

    Attributes:
        options: what the user chose.
        compressor: what compresses now.
        rules: which parameter takes which method.
        exchange: how messages travel, with the link's measurements.
        correction: the compressor's own, such as DGC's momentum.
        error_feedback: whether a residual is kept.
        optimizer: its kind, if known.
        decided: the compensation of each method in the run that this one resumes.
        chosen: what ``compressor="auto"`` picked, which ``compressor`` is then; else None.
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
        """The method for parameters that no rule takes."""
        return self.rules.method

    @property
    def residual(self) -> Residual:
        """Settings of the residual, where one is kept."""
        return self.options.error_feedback.residual

    @property
    def family(self) -> str:
        """The name of the kind of saved state: any settings of the same method can resume from it."""
        if self.chosen or isinstance(self.compressor, Automatic):
            return _AUTO
        parts = (self.correction, self.method)
        return " ".join(type(part).__name__ for part in parts if part is not None)

    @property
    def families(self) -> tuple[str, ...]:
        """The families that this run can resume from: "auto" and its candidates keep the same state."""
        candidates = tuple(type(candidate).__name__ for candidate in Automatic.candidates)
        if self.family == _AUTO:
            return (_AUTO, *candidates)
        return (self.family, _AUTO) if self.family in candidates else (self.family,)

    @property
    def works_alone(self) -> bool:
        """Whether there is something to do on a single rank."""
        return self.options.local_clip_norm is not None or self.correction is not None or self.optimizing is not None

    @property
    def plain(self) -> bool:
        """Whether stock DistributedDataParallel does all that was asked for."""
        more = self.options.deterministic or self.options.delay or self.options.on_nonfinite != "pass"
        return not more and not self.works_alone and all(isinstance(method, Dense) for method in self.methods)

    @property
    def dense_steps(self) -> int:
        """Steps with dense (float32) averages before compression begins."""
        return _dense_steps(self.options, self.compressor)

    @property
    def keeps_state(self) -> bool:
        """Whether a run that starts without its saved state loses anything."""
        has_state = isinstance(self.method, Reducer) or self.correction is not None or self.exchange.keeper is not None
        loco = any(isinstance(self.compensation(method), LoCo) for method in self.rules.methods)
        return self.error_feedback or loco or has_state or self.dense_steps > 0 or bool(self.options.schedule.courses)

    @property
    def averages(self) -> bool:
        """Whether the optimizer gets the mean of the gradients themselves, so that others may be added to it."""
        return self.steps_by is None and self.options.local_clip_norm is None

    @property
    def _scheduled(self) -> list[Compressor]:
        """The compressors of the schedule, in order."""
        return [] if isinstance(self.compressor, Automatic) else self.options.schedule.compressors(self.compressor)

    @property
    def methods(self) -> list[Method]:
        """All methods that will or may compress at some time."""
        if isinstance(self.compressor, Automatic):
            return [*self.rules.methods, *self.candidates]
        return [*self.rules.methods, *(_parts(compressor)[0] for compressor in self._scheduled)]

    @property
    def steps_by(self) -> Compressor | Automatic | Pattern | None:
        """What gives the optimizer anything but a mean of gradients (a velocity, Adam's step, a vote), or None."""
        if self.correction is not None:
            return self.compressor
        votes = [method for method in self.methods if not method.conserves]
        return votes[0] if votes else self.exchange if self.optimizing else None

    @property
    def optimizing(self) -> Keeper | None:
        """The exchange's part of the optimizer's work, or None."""
        keeper = self.exchange.keeper
        return keeper if keeper and keeper.replaces_optimizer else None

    @property
    def candidates(self) -> list[Codec]:
        """The candidates of ``compressor="auto"`` that this exchange can carry, from safe to coarse."""
        first, *others = Automatic.candidates
        carried: list[Codec] = [first]  # float32 needs no exchange
        for codec in others:
            with contextlib.suppress(ValueError):
                self.exchange.check(codec)
                carried.append(codec)
        return carried

    def become(self, chosen: Chosen) -> RunState:
        """Return these settings with the compressor that "auto" picked."""
        rules = dataclasses.replace(self.rules, method=chosen.codec)
        return dataclasses.replace(self, compressor=chosen.codec, rules=rules, chosen=chosen)._checked()

    def _checked(self) -> RunState:
        """Return these settings, with error feedback if a method of the rules needs it.

        Raises:
            ValueError: methods, exchange and error feedback do not go together.
        """
        for method in self.methods:
            _check_carried(method, self.exchange, self.compensation(method))
        for compressor in (self.compressor, *self._scheduled):
            if correction := _parts(compressor)[1]:
                _check_corrected(written(compressor), correction, self.exchange, self.rules.methods)
        needed = any(self.feeds_back(method) for method in self.rules.methods)
        return dataclasses.replace(self, error_feedback=self.error_feedback or needed)

    @classmethod
    def of(cls, *arguments: Any, **options: Any) -> RunState:
        """Return the first state of a run with what the user gave; see ``Options.of``."""
        return cls.begin(Options.of(*arguments, **options))

    @classmethod
    def begin(cls, options: Options) -> RunState:
        """Return the first state of a run.

        Raises:
            ValueError: options do not go together.
        """
        compressor = options.compressor
        state = cls(
            options=options,
            compressor=compressor,
            rules=Rules(_parts(compressor)[0], options.min_numel, options.rules),
            exchange=options.exchange,
            correction=_correction(options, compressor),
            error_feedback=options.error_feedback.way == "classical",
        )
        if isinstance(compressor, Automatic) and len(state.candidates) == 1:
            raise ValueError(
                f"exchange={written(options.exchange)} carries none of what compressor='auto' chooses among "
                f"({', '.join(map(written, Automatic.candidates))}). Name a compressor, or use exchange='auto'"
            )
        return state._checked()

    def bound(self, kinds: Mapping[str, str], whole: Mapping[str, Shape] | None = None) -> RunState:
        """Return these settings for a model; see ``Rules``."""
        return dataclasses.replace(self, rules=self.rules.bound(kinds, whole))

    def compensation(self, method: Method) -> Compensation:
        """Return what happens to the part that a method does not send."""
        feedback = self.options.error_feedback
        if feedback.way is not None:
            return "none" if isinstance(feedback.way, LoCo) and isinstance(method, Dense) else feedback.way
        if self.correction and self.correction.replaces_residual:
            return "none"
        if feedback.residual != Residual():  # settings of a residual were given, so one is wanted
            return automatic(method, None)
        known = None if self.correction else self.optimizer
        return dict(self.decided).get(saved_name(method)) or automatic(method, known)

    def feeds_back(self, method: Method) -> bool:
        """Return whether what the method does not send is added to the next gradient in full."""
        return self.compensation(method) == "classical"

    def fed(self, section: Section) -> Section:
        """Return the section, with whether its errors are fed back and whether its sums need more bits."""
        way, method = self.compensation(section.method), section.method
        precise = isinstance(method, Codec) and method.contractive and not method.sparse and way != "classical"
        return dataclasses.replace(section, fed_back=way != "none", precise=precise)

    def stepped_by(self, optimizer: Optimizer | None) -> RunState:
        """Return these settings for a kind of optimizer; only before there is a residual."""
        classical = self.options.error_feedback.way == "classical"
        return dataclasses.replace(self, optimizer=optimizer, error_feedback=classical)._checked()

    def retuned(self, compressor: CompressorLike | None, changes: Mapping[str, object]) -> RunState:
        """Return these settings with another compressor, or other settings of it; see ``Compression.retune``.

        A run that has a residual keeps one until its end, so that nothing is lost.

        Args:
            compressor: the new one; None: the present one.
            changes: its settings by name.

        Raises:
            ValueError: see ``Compression.retune``.
        """
        built = self.compressor if compressor is None else build_compressor(compressor)
        if isinstance(built, Automatic):
            raise ValueError(
                "compressor='auto' chooses once, when a run begins, and has no settings to change after that. Name "
                "another compressor"
            )
        following = changed(built, changes)
        method, correction = _parts(following)[0], _correction(self.options, following)
        if type(correction) is not type(self.correction):
            raise ValueError(
                f"compressor={written(following)} cannot follow {written(self.compressor)} within a run, because it "
                "takes another part of the optimizer's work. Start a new run with it"
            )
        rules = dataclasses.replace(self.rules, method=method)
        return dataclasses.replace(self, compressor=following, rules=rules, correction=correction)._checked()

    def running(self) -> dict[str, object]:
        """Return what may have changed since the run began, as primitives."""
        return {
            "compressor": describe(self.compressor, COMPRESSORS),
            "named": describe(self.options.compressor, COMPRESSORS),
            "error_feedback": self.error_feedback,
            "compensations": {
                saved_name(method): described(self.compensation(method)) for method in self.rules.methods
            },
            "measured": measured_by(self.exchange),
            "chosen": self.chosen and self.chosen.as_primitives(),
        }

    def follows(self, running: Mapping[str, object]) -> bool:
        """Return whether an earlier run's compressor goes on: the user named the same, or "auto" chose it here.

        Raises:
            ValueError: ``running`` is not what the method ``running`` returns.
        """
        compressor, before, named = running["compressor"], running.get("chosen"), running.get("named")
        if before is not None:
            before = mapping("chosen", before)
        if compressor is None or (before is None) != (self.chosen is None):
            return False
        if before is not None and self.chosen is not None:
            return self.chosen.was_here(before) or compressor != before.get("compressor")
        # None: saved by a version that did not keep it
        return named is None or self._rebuilt(named) == self.options.compressor

    def resumed(self, running: Mapping[str, object]) -> RunState:
        """Return these settings with what ``running`` returned in an earlier run.

        If the user now names another compressor, that one runs. A compressor that was changed in the middle of the run,
        or that "auto" chose on the same cluster, goes on.

        Raises:
            ValueError: see ``retuned`` and ``follows``.
        """
        settings = self.retuned(self._rebuilt(running["compressor"]), {}) if self.follows(running) else self
        measured = running.get("measured")
        measured = mapping("measured", {} if measured is None else measured)
        exchange = replanned(settings.exchange, lambda planner: planner.with_measurements(measured))
        return dataclasses.replace(settings._compensated(running), exchange=exchange)

    def _compensated(self, running: Mapping[str, object]) -> RunState:
        """Return these settings with an earlier run's compensations, unless the user named another."""
        state = dataclasses.replace(self, decided=decided_before(running, self.rules.methods))
        keeps = bool(running["error_feedback"])  # at least the rest of it is sent with the next gradient
        keeps = keeps or any(state.feeds_back(method) for method in state.rules.methods)
        return dataclasses.replace(state, error_feedback=keeps)

    def _rebuilt(self, described: object) -> Compressor:
        return rebuild_compressor(described, [self.compressor, *self.rules.methods, *self._scheduled])


_AUTO = "auto"
"""The family of runs with ``compressor="auto"``."""


def _dense_steps(options: Options, compressor: Compressor | Automatic) -> int:
    own = compressor.dense_steps if isinstance(compressor, Corrected) else 0
    return own if options.warmup_steps is None else options.warmup_steps


def _correction(options: Options, compressor: Compressor | Automatic) -> Correction | None:
    correction = _parts(compressor)[1]
    return correction and correction.with_dense_steps(_dense_steps(options, compressor))


def _parts(compressor: Compressor | Automatic) -> tuple[Method, Correction | None]:
    if isinstance(compressor, Automatic):
        return Automatic.candidates[0], None  # until one is picked
    return (compressor.codec, compressor.correction) if isinstance(compressor, Corrected) else (compressor, None)


def _check_carried(method: Method, exchange: Pattern, way: Compensation) -> None:
    """Raise ValueError if the exchange cannot carry a method, or its errors cannot be fed back."""
    if isinstance(method, Codec):
        exchange.check(method)
    elif not isinstance(exchange, Planner):
        raise ValueError(
            f"exchange={written(exchange)} cannot carry compressor={written(method)}, which exchanges by itself. Use "
            "exchange='auto'"
        )
    elif way != "none" and not method.conserves:
        raise ValueError(
            f"error_feedback=True has no use with compressor={written(method)}, which leaves nothing that could be fed "
            "back. Leave it out"
        )


def _check_corrected(compressor: str, correction: Correction, exchange: Pattern, methods: list[Method]) -> None:
    """Raise ValueError if the exchange or the rules' methods break what a compressor with a correction relies on."""
    if exchange.moves_residual and correction.masks:
        raise ValueError(
            f"exchange={written(exchange)} leaves what ranks sent in the residuals of others, but "
            f"compressor={compressor} takes everything that left a rank as applied. Use exchange='auto', or "
            "masking=False"
        )
    for method in methods if correction.replaces_residual else ():
        if not method.conserves or not (method.contractive or method.elementwise):
            raise ValueError(
                f"a rule gives compressor={compressor} the method {written(method)}, but its estimates need a method "
                "that always comes closer, not only on average. Use 'onebit', 'topk', 'bf16' or 'none' in the rule"
            )


def kept_of(now: RunState, following: RunState, scheduled: Mapping[str, object]) -> dict[str, object]:
    """Return what a checkpoint keeps, as primitives.

    Args:
        now: the settings that made the present state.
        following: the settings of the next step, after ``retune``.
        scheduled: the schedule's last values.
    """
    kept = now.running() | {"scheduled": dict(scheduled)}
    if following is not now:
        kept["next"] = following.running()
    primitives: dict[str, object] = plain(kept)
    return primitives


def resumed(own: RunState, kept: Mapping[str, object]) -> tuple[RunState, RunState, dict[str, object]]:
    """Return the arguments of ``kept_of`` from its result, in a run with the user's settings ``own``.

    Raises:
        ValueError: see ``RunState.resumed``. If ``kept`` is something else, also TypeError, LookupError and others.
    """
    now, following = (own.resumed(running).bound(own.rules.kinds, own.rules.whole) for running in (kept, coming(kept)))
    scheduled = dict(mapping("scheduled", kept["scheduled"])) if own.follows(kept) else {}
    return now, now if following == now else following, scheduled


def coming(kept: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of the next step, from the result of ``kept_of``."""
    return mapping("next", kept.get("next", kept))
