"""Change settings of the compressor during training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lightning_compress.corrections import WARMUP_DENSITIES, Corrected
from lightning_compress.settings.rules import Compressor

Unit = Literal["step", "epoch"]

PRESETS: dict[str, dict[str, tuple[float, ...]]] = {"dgc": {"density": WARMUP_DENSITIES}}
"""Values by stage. Values not above the compressor's own are left out; its own comes last and stays.
``dgc``: the warm-up of Lin et al., ICLR 2018."""
NONE = "none"
"""No schedule, not even the compressor's own."""


class Progress(NamedTuple):
    """How far training is: committed steps, the epoch, and the learning rate of the next step (None: unknown)."""

    step: int = 0
    epoch: int = 0
    rate: float | None = None

    def __str__(self) -> str:
        rate = "" if self.rate is None else f", learning rate {self.rate}"
        return f"step {self.step}, epoch {self.epoch}{rate}"


@dataclass(frozen=True)
class Milestones:
    """Pairs of a start (step or epoch) and the value from there on; the first start is 0."""

    unit: Unit
    values: tuple[tuple[int, object], ...]

    def at(self, progress: Progress) -> object:
        """Return the present value."""
        now = progress.step if self.unit == "step" else progress.epoch
        return [value for start, value in self.values if start <= now][-1]

    def examples(self) -> list[Progress]:
        """Return moments at which every value occurs."""
        return [Progress(**{self.unit: start}) for start, _ in self.values]


@dataclass(frozen=True)
class ByRate:
    """A dropped share that follows the learning rate: ``theta = min(limit, factor * lr)``.

    Dropping a share phi loses at most ``sqrt(phi)`` of the norm, so this is the diminishing ``theta^2 ~ lr`` of Wang et
    al., HPDC 2020. Values are rounded down to a grid in steps of a tenth, so that plans are not rebuilt in every step.

    Args:
        factor: above 0.
        limit: the compressor's own share.
        kept: the setting is the kept share instead: ``density = max(limit, 1 - factor * lr)``.
    """

    factor: float
    limit: float
    kept: bool

    def at(self, progress: Progress) -> float:
        """Return the present value; ``limit`` while the learning rate is unknown."""
        dropped = 1.0 if progress.rate is None else _rounded(self.factor * progress.rate)
        return max(self.limit, 1 - dropped) if self.kept else min(self.limit, dropped)

    def examples(self) -> list[Progress]:
        """Return moments at which both extreme values occur."""
        return [Progress(), Progress(rate=0.0)]


def _rounded(share: float) -> float:
    """Round down to a grid on which the smaller of ``share`` and ``1 - share`` changes by a tenth per step."""
    if share >= 1.0:
        return 1.0
    return 0.0 if share < 1e-3 else 1 / (1 + math.exp(-math.floor(10 * math.log(share / (1 - share))) / 10))


Course = Milestones | ByRate


def preset(given: object, compressor: Compressor) -> dict[str, object] | None:
    """Return the courses of a preset, or None if ``given`` is not a preset.

    Args:
        given: a name (one epoch per stage), ``{preset: name, steps: n}`` or ``{preset: name, epochs: n}``.
        compressor: whose settings change.

    Raises:
        ValueError: there is no such preset, or its stages have no length.
    """
    fields = {"preset": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
    if "preset" not in fields:
        return None
    name = fields.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"unknown schedule {name!r}; there are: {', '.join(PRESETS)}, {NONE}")
    unit, length = _length(fields or {"epochs": 1}, f"schedule {name!r}")
    courses: dict[str, object] = {}
    for setting, values in PRESETS[name].items():
        own = getattr(compressor, setting, values[-1])
        stages = [*(value for value in values if value > own), own]
        courses[setting] = {"unit": unit, "values": {stage * length: value for stage, value in enumerate(stages)}}
    return courses


def _length(fields: Mapping[object, object], where: str) -> tuple[Unit, int]:
    for unit in get_args(Unit):
        length = fields.get(f"{unit}s")
        if len(fields) == 1 and isinstance(length, int) and not isinstance(length, bool) and length > 0:
            return unit, length
    raise ValueError(f"{where} needs either steps or epochs, a whole number above 0, and nothing else, not {fields}")


def course(name: str, given: object, own: object) -> Course:
    """Read the schedule of one setting; the forms are those of ``CompressedDDPStrategy``.

    Args:
        name: of the setting.
        given: by the user.
        own: the compressor's value of the setting.

    Raises:
        ValueError: it has none of the forms.
    """
    where = f"schedule of {name}"
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{where}: {given!r} must be a mapping such as {{0: value, 100: value}}")
    fields = dict(given)
    kind = fields.pop("kind", None)
    if kind is None:
        return _milestones(where, own, fields)
    if kind == "lr":
        return _by_rate(where, name, own, fields)
    if kind in ("linear", "exponential"):
        return _ramp(where, own, kind == "linear", fields)
    raise ValueError(f"{where}: kind={kind!r} must be lr, linear, exponential, or left out")


def _milestones(where: str, own: object, fields: Mapping[object, object]) -> Milestones:
    unit: object = "step"
    values: object = fields
    rest: dict[object, object] = {}
    if not fields.keys().isdisjoint({"unit", "values"}):
        rest = dict(fields)
        unit, values = rest.pop("unit", "step"), rest.pop("values", None)
    if rest or unit not in get_args(Unit) or not isinstance(values, Mapping) or not values:
        raise ValueError(f"{where}: write {{unit: step or epoch, values: {{0: value, ...}}}}, not {dict(fields)}")
    starts = {}
    for start, value in values.items():
        if not str(start).isdecimal():
            raise ValueError(f"{where}: {start!r} must be a whole number of {unit}s, 0 or more")
        starts[int(str(start))] = value
    return Milestones("epoch" if unit == "epoch" else "step", tuple(sorted({0: own, **starts}.items())))


def _ramp(where: str, own: object, linear: bool, fields: dict[object, object]) -> Milestones:
    """Return stages of equal length from one value to another, which is reached at the end and stays."""
    first, last, stages = fields.pop("from", own), fields.pop("to", None), fields.pop("stages", 8)
    unit, length = _length(fields, where)
    if not isinstance(first, (int, float)) or not isinstance(last, (int, float)):
        raise ValueError(f"{where}: to={last!r} and from={first!r} must be numbers")
    if not isinstance(stages, int) or not 1 <= stages <= length:
        raise ValueError(f"{where}: stages={stages!r} must be a whole number from 1 to {length}")
    if not linear and min(first, last) <= 0:
        raise ValueError(f"{where}: an exponential ramp goes between numbers above 0, not from {first} to {last}")
    shares = [stage / stages for stage in range(stages)]
    values = [first + (last - first) * s if linear else first * (last / first) ** s for s in shares]
    whole = [round(value) if isinstance(own, int) else value for value in [*values, last]]
    return Milestones(unit, tuple((round(n * length / stages), value) for n, value in enumerate(whole)))


def _by_rate(where: str, name: str, own: object, fields: Mapping[object, object]) -> ByRate:
    factor = fields.get("factor")
    if name not in ("theta", "density") or not isinstance(own, (int, float)):
        raise ValueError(f"{where}: kind=lr drives a share, theta or density. Use another kind, or milestones")
    if {*fields} != {"factor"} or not isinstance(factor, (int, float)) or not factor > 0:
        raise ValueError(f"{where}: kind=lr needs factor, a number above 0, and nothing else, not {dict(fields)}")
    return ByRate(float(factor), own, kept=name == "density")


@dataclass(frozen=True)
class Schedule:
    """The value of each scheduled setting over time. It depends on ``Progress`` alone, so all ranks agree."""

    courses: tuple[tuple[str, Course], ...] = ()

    @classmethod
    def of(cls, given: object, compressor: Compressor) -> Schedule:
        """Read a schedule; the forms are those of ``CompressedDDPStrategy``. None: the compressor's own, if it has one.

        Raises:
            ValueError: it has none of these forms, or the compressor has no such setting or refuses a value.
        """
        if isinstance(given, Schedule):
            schedule = given
        else:
            own = compressor.schedule if given is None and isinstance(compressor, Corrected) else given
            courses = {} if own in (None, NONE) else preset(own, compressor) or own
            if not isinstance(courses, Mapping) or (own not in (None, NONE) and not courses):
                raise ValueError(
                    f"schedule={given!r} must be {{setting: {{0: value, step: value, ...}}}}, a preset "
                    f"({', '.join(PRESETS)}), or none"
                )
            check_names(compressor, courses)
            named = {str(name): each for name, each in courses.items()}
            schedule = cls(tuple((name, course(name, each, getattr(compressor, name))) for name, each in named.items()))
        schedule.compressors(compressor)
        return schedule

    @property
    def by_epoch(self) -> bool:
        """Whether any value depends on the epoch."""
        return any(isinstance(each, Milestones) and each.unit == "epoch" for _, each in self.courses)

    @property
    def by_rate(self) -> bool:
        """Whether any value depends on a learning rate."""
        return any(isinstance(each, ByRate) for _, each in self.courses)

    def values(self, progress: Progress) -> dict[str, object]:
        """Return the present values of the scheduled settings."""
        return {name: each.at(progress) for name, each in self.courses}

    def compressors(self, compressor: Compressor) -> list[Compressor]:
        """Return the compressors that the schedule produces, in order.

        Raises:
            ValueError: a value is out of range.
        """
        produced = []
        for moment in [moment for _, each in self.courses for moment in each.examples()]:
            values = self.values(moment)
            try:
                produced.append(changed(compressor, values))
            except ValueError as error:
                raise ValueError(f"schedule, at {moment}: {error}") from error
        return produced


def changed(compressor: Compressor, changes: Mapping[str, object]) -> Compressor:
    """Return the compressor with changed settings.

    Raises:
        ValueError: there is no such setting, or a value is out of range.
    """
    if not changes:
        return compressor
    check_names(compressor, changes)
    return dataclasses.replace(compressor, **changes)  # type: ignore[type-var]


def check_names(compressor: Compressor, names: Iterable[object]) -> None:
    """Raise ValueError if the compressor lacks one of these settings."""
    allowed = [field.name for field in dataclasses.fields(compressor)]  # type: ignore[arg-type]
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(
            f"{type(compressor).__name__} has no setting {', '.join(map(repr, unknown))}; "
            f"it has: {', '.join(allowed) or 'none'}"
        )
