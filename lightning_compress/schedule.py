"""Settings of the compressor that change while training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_compress.corrections import Corrected
from lightning_compress.courses import PRESETS, ByRate, Course, Milestones, Progress, course, preset
from lightning_compress.rules import Compressor


@dataclass(frozen=True)
class Schedule:
    """What each setting's value is, and when; nothing else decides, so all ranks agree."""

    courses: tuple[tuple[str, Course], ...] = ()

    @classmethod
    def of(cls, given: object, compressor: Compressor) -> Schedule:
        """Check and complete what the user gave; the forms are those of ``CompressedDDPStrategy``.

        Where the user gives none, it is what the compressor brings itself.

        Raises:
            ValueError: it is none of these forms, or names a setting or a value that the compressor has not.
        """
        if isinstance(given, Schedule):
            schedule = given
        else:
            own = compressor.courses if isinstance(compressor, Corrected) else {}
            courses = own if given is None else preset(given) or given
            if not isinstance(courses, Mapping) or (given is not None and not courses):
                raise ValueError(
                    f"schedule={given!r}: give {{setting: {{0: value, step: value, ...}}}}, or a preset: "
                    f"{', '.join(PRESETS)}"
                )
            check_names(compressor, courses)
            named = {str(name): each for name, each in courses.items()}
            schedule = cls(tuple((name, course(name, each, getattr(compressor, name))) for name, each in named.items()))
        schedule.compressors(compressor)
        return schedule

    @property
    def by_epoch(self) -> bool:
        """Whether the number of the epoch decides anything."""
        return any(isinstance(each, Milestones) and each.unit == "epoch" for _, each in self.courses)

    @property
    def by_rate(self) -> bool:
        """Whether a learning rate decides anything."""
        return any(isinstance(each, ByRate) for _, each in self.courses)

    def values(self, progress: Progress) -> dict[str, object]:
        """What the settings should be now."""
        return {name: each.at(progress) for name, each in self.courses}

    def compressors(self, compressor: Compressor) -> list[Compressor]:
        """What the compressor becomes in turn.

        Raises:
            ValueError: at some time it would have a value out of range.
        """
        made = []
        for moment in [moment for _, each in self.courses for moment in each.examples()]:
            values = self.values(moment)
            try:
                made.append(changed(compressor, values))
            except ValueError as error:
                raise ValueError(f"schedule, at {moment}: {error}") from error
        return made


def changed(compressor: Compressor, changes: Mapping[str, object]) -> Compressor:
    """A compressor with other settings.

    Raises:
        ValueError: there is no such setting, or a value is out of range.
    """
    if not changes:
        return compressor
    check_names(compressor, changes)
    return dataclasses.replace(compressor, **changes)  # type: ignore[type-var]


def check_names(compressor: Compressor, names: Iterable[object]) -> None:
    """Refuse settings that the compressor has not.

    Raises:
        ValueError: it has not.
    """
    allowed = [field.name for field in dataclasses.fields(compressor)]  # type: ignore[arg-type]
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(
            f"{type(compressor).__name__} has no setting {', '.join(map(repr, unknown))}; "
            f"it has: {', '.join(allowed) or 'none'}"
        )
