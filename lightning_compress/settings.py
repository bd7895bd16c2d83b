"""What a user chooses, checked as soon as it is given."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_compress.codecs import CODECS, Codec
from lightning_compress.corrections import CORRECTED, Corrected, Correction
from lightning_compress.corrections.clipping import ClipBy, check_by
from lightning_compress.exchanges import EXCHANGES, Auto, Exchange, Hierarchical
from lightning_compress.guards import Guards
from lightning_compress.kinds import KINDS
from lightning_compress.layout import Layout
from lightning_compress.reducers import REDUCERS, Reducer
from lightning_compress.registry import build, describe, rebuild
from lightning_compress.rules import Compressor, Method, Rule, Rules
from lightning_compress.schedule import Schedule, changed

COMPRESSORS: dict[str, type[Compressor]] = {**CODECS, **REDUCERS, **CORRECTED}
"""What ``compressor=`` takes by name."""

CompressorLike = str | Mapping[str, object] | Compressor
ExchangeLike = str | Mapping[str, object] | Exchange
ScheduleLike = str | Mapping[str, object] | Schedule | None


def build_compressor(compressor: CompressorLike) -> Compressor:
    """A compressor by name, by ``{"name": ..., **settings}``, or as it is.

    Raises:
        ValueError: there is no such compressor or setting, or a value is out of range.
    """
    built = build("compressor", compressor, COMPRESSORS, (Codec, Reducer, Corrected))
    assert isinstance(built, Codec | Reducer | Corrected)
    return built


def build_exchange(exchange: ExchangeLike) -> Exchange:
    """An exchange by name, by ``{"name": ..., **settings}``, or as it is.

    Raises:
        ValueError: there is no such exchange or setting.
    """
    built = build("exchange", exchange, EXCHANGES, (Exchange,))
    assert isinstance(built, Exchange)
    return built


@dataclass(frozen=True)
class Settings:
    """Everything that decides what travels; must be equal on all ranks."""

    compressor: Compressor
    rules: Rules
    exchange: Exchange
    correction: Correction | None
    error_feedback: bool
    as_needed: bool
    warmup_steps: int
    seed: int
    schedule: Schedule
    residual_decay: float
    residual_follows_lr: bool
    residual_dtype: torch.dtype
    local_clip_norm: float | None
    local_clip_by: ClipBy
    deterministic: bool
    guards: Guards

    @property
    def method(self) -> Method:
        """What compresses."""
        return self.rules.method

    @property
    def family(self) -> str:
        """What state is of: it is good for any settings of the same method."""
        parts = (self.correction, self.method)
        return " ".join(type(part).__name__ for part in parts if part is not None)

    @property
    def dense_steps(self) -> int:
        """Steps before compression begins."""
        own = self.compressor.dense_steps if isinstance(self.compressor, Corrected) else 0
        return max(self.warmup_steps, own)

    @property
    def keeps_state(self) -> bool:
        """Whether anything is lost if compression begins anew."""
        kept = self.exchange.state(Layout(()))
        declares = isinstance(self.method, Reducer) or self.correction is not None or bool(kept)
        return self.error_feedback or declares or self.dense_steps > 0 or bool(self.schedule.courses)

    @property
    def methods(self) -> list[Method]:
        """All that will compress at some time."""
        scheduled = self.schedule.compressors(self.compressor)
        return [*self.rules.methods, *(_parts(each)[0] for each in scheduled)]

    @property
    def steps_by(self) -> Compressor | Exchange | None:
        """What gives the optimizer anything else than a mean of gradients: a velocity, a step of Adam, a vote."""
        if self.correction is not None:
            return self.compressor
        votes = [each for each in self.methods if isinstance(each, Reducer) and not each.conserves]
        return votes[0] if votes else self.exchange if self.exchange.optimizes else None

    def _checked(self) -> Settings:
        """With error feedback on if the rules' methods ask for it.

        Raises:
            ValueError: methods, exchange and error feedback do not go together.
        """
        for method in self.methods:
            if isinstance(method, Codec):
                self.exchange.check(method)
            elif not isinstance(self.exchange, Auto):
                raise ValueError(
                    f"exchange={self.exchange} cannot carry {method}, which exchanges by itself; use exchange='auto'"
                )
            elif self.feeds_back(method) and not method.conserves:
                raise ValueError(f"error_feedback=True: {method} leaves nothing that could be fed back; set it to null")
        needed = any(self.feeds_back(method) for method in self.rules.methods)
        return dataclasses.replace(self, error_feedback=self.error_feedback or needed)

    @classmethod
    def of(
        cls,
        compressor: CompressorLike,
        exchange: ExchangeLike = "auto",
        error_feedback: bool | None = None,
        warmup_steps: int = 0,
        min_numel: int = 1024,
        exclude: Sequence[str] | None = (),
        seed: int = 0,
        schedule: ScheduleLike = None,
        rules: Sequence[Mapping[str, object]] | None = (),
        residual_decay: float = 1.0,
        residual_follows_lr: bool = False,
        residual_dtype: str | torch.dtype = "float32",
        local_clip_norm: float | None = None,
        deterministic: bool = False,
        on_nonfinite: str = "pass",
        on_drift: str = "error",
        check_drift_every: int = 100,
        local_clip_by: ClipBy = "parameter",
    ) -> Settings:
        """Check and complete what the user gave; the arguments are those of ``CompressedDDPStrategy``.

        Raises:
            ValueError: a value is not allowed; the message names it, what is allowed, and the fix.
        """
        given, pattern = build_compressor(compressor), build_exchange(exchange)
        method, correction = _parts(given)
        if correction and isinstance(pattern, Hierarchical):
            raise ValueError(
                f"exchange={pattern} adds up the gradients of a node before they are compressed, and {given} needs to "
                "know what each rank sent; use exchange='auto', or a compressor without momentum of its own"
            )
        if correction and pattern.hands_over:
            raise ValueError(
                f"exchange={pattern} leaves what ranks sent in the residuals of others, and {given} takes what has "
                "left its own for applied; use exchange='auto', or a compressor without momentum of its own"
            )
        pattern = pattern.flat() if correction else pattern
        if correction and pattern.optimizes:
            raise ValueError(f"exchange={pattern} and {given} would both do the optimizer's work; use one of them")
        for name, value in (("warmup_steps", warmup_steps), ("min_numel", min_numel), ("seed", seed)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be an integer, 0 or more")
        if error_feedback not in (None, True, False):
            raise ValueError(
                f"error_feedback={error_feedback!r} must be true, false, or null (on for methods that need it)"
            )
        if not isinstance(residual_decay, (int, float)) or not 0 <= residual_decay <= 1:
            raise ValueError(f"residual_decay={residual_decay!r} must be in [0, 1]; 1 keeps all of it")
        for name, value in (("residual_follows_lr", residual_follows_lr), ("deterministic", deterministic)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be true or false")
        check_by("local_clip_by", local_clip_by)
        made = cls(
            compressor=given,
            rules=Rules(method, min_numel, _patterns("exclude", exclude), _rules(rules)),
            exchange=pattern.fixed() if deterministic else pattern,
            correction=correction,
            error_feedback=bool(error_feedback),
            as_needed=error_feedback is None,
            warmup_steps=warmup_steps,
            seed=seed,
            schedule=Schedule.of(schedule, given),
            residual_decay=float(residual_decay),
            residual_follows_lr=residual_follows_lr,
            residual_dtype=_dtype(residual_dtype),
            local_clip_norm=_norm(local_clip_norm, given),
            local_clip_by=local_clip_by,
            deterministic=deterministic,
            guards=Guards(on_nonfinite, on_drift, check_drift_every),
        )
        return made._checked()

    def bound(self, kinds: Mapping[str, str]) -> Settings:
        """The same for a model whose parameters are of these kinds."""
        return dataclasses.replace(self, rules=self.rules.bound(kinds))

    def feeds_back(self, method: Method) -> bool:
        """Whether what the method does not send is added to the next gradient."""
        return method.contractive if self.as_needed else self.error_feedback

    def retuned(self, compressor: CompressorLike | None, changes: Mapping[str, object]) -> Settings:
        """The same with another compressor (None: this one), or other settings of it; see ``Compression.retune``.

        A residual that is kept once is kept for good, so that nothing is lost in between.

        Raises:
            ValueError: see ``Compression.retune``.
        """
        given = changed(self.compressor if compressor is None else build_compressor(compressor), changes)
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
            "error_feedback": self.error_feedback,
            "measured": self.exchange.measured(),
        }

    def resumed(self, running: Mapping[str, object]) -> Settings:
        """The same with what ``running`` gave in an earlier run.

        Raises:
            ValueError: see ``retuned``.
        """
        compressor, feedback = running["compressor"], bool(running["error_feedback"])
        settings = self if compressor is None else self.retuned(self._rebuilt(compressor), {})
        measured = running.get("measured")
        if not isinstance(measured, Mapping | None):
            raise ValueError(f"the state has no mapping of what was measured, but {type(measured).__name__}")
        exchange = settings.exchange.given(measured or {})
        return dataclasses.replace(settings, error_feedback=settings.error_feedback or feedback, exchange=exchange)

    def _rebuilt(self, described: object) -> Compressor:
        """The compressor of an earlier run; one from outside is of a class that this run was given, or refused."""
        if not isinstance(described, Mapping):
            raise ValueError(f"the state has no mapping of the compressor, but {type(described).__name__}")
        given = [self.compressor, *self.rules.methods, *self.schedule.compressors(self.compressor)]
        try:
            built = rebuild("compressor", described, COMPRESSORS, (Codec, Reducer, Corrected), given)
        except RecursionError as error:
            raise ValueError("the state's compressor has too many others inside") from error
        if not isinstance(built, Codec | Reducer | Corrected):
            raise ValueError(f"the state is of {type(built).__name__}, which is no compressor")
        return built

    def digest(self) -> bytes:
        """32 bytes that are equal where the settings are."""
        return hashlib.sha256(repr(self).encode()).digest()


def _parts(compressor: Compressor) -> tuple[Method, Correction | None]:
    return (compressor.codec, compressor.correction) if isinstance(compressor, Corrected) else (compressor, None)


def _rules(given: object) -> tuple[Rule, ...]:
    """Rules as a user writes them: ``[{match: pattern(s), kind: kind, compressor: ...}, ...]``."""
    if given is not None and (not isinstance(given, Iterable) or isinstance(given, str | Mapping)):
        raise ValueError(f"rules={given!r} must be a list, such as [{{kind: embedding, compressor: bf16}}]")
    made = []
    for each in given or ():
        if not isinstance(each, Mapping) or not {"compressor"} <= each.keys() <= {"match", "kind", "compressor"}:
            raise ValueError(f"the rule {each!r} must be a mapping with compressor, and match or kind or both")
        match, kind, method = each.get("match"), each.get("kind"), build_compressor(each["compressor"])
        if kind is not None and kind not in KINDS:
            raise ValueError(f"the rule {each!r}: kind={kind!r} must be one of {', '.join(KINDS)}")
        if isinstance(method, Corrected):
            raise ValueError(
                f"the rule {each!r}: {method} takes a part of the optimizer's work for all parameters; "
                "give it as compressor= and put the others into rules"
            )
        patterns = _patterns("match", [match] if isinstance(match, str) else match)
        if not patterns and kind is None:
            raise ValueError(f"the rule {each!r} must say which parameters: match, kind, or both")
        made.append(Rule(method, patterns, None if kind is None else str(kind)))
    return tuple(made)


def _dtype(given: object) -> torch.dtype:
    for dtype in (torch.float32, torch.bfloat16):
        if given in (dtype, str(dtype).removeprefix("torch.")):
            return dtype
    raise ValueError(f"residual_dtype={given!r} must be 'float32' or 'bfloat16'")


def _norm(given: object, compressor: Compressor) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise ValueError(f"local_clip_norm={given!r} must be a norm above 0, or null for no clipping")
    if getattr(compressor, "clip", None) is not None:
        raise ValueError(f"local_clip_norm={given!r}: {compressor} clips by itself; set one of the two to null")
    return float(given)


def _patterns(what: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ValueError(f"{what}={given!r} must be a list of patterns; write {what}=[{given!r}]")
    patterns = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{what}={given!r} must be a list of name patterns, such as ['head.*', '*.bias']")
    return tuple(map(str, patterns))
