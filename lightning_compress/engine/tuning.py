"""Which settings run now, and which from the next step on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass

from lightning_compress.core.registry import describe
from lightning_compress.settings.arguments import COMPRESSORS, CompressorLike
from lightning_compress.settings.schedule import Progress
from lightning_compress.settings.settings import Settings


class Tuning:
    """Settings that a schedule and the user change while training.

    Args:
        settings: what the run begins with.

    Attributes:
        now: what runs.
        next: what the next step begins with.
    """

    def __init__(self, settings: Settings) -> None:
        self.now = self.next = settings
        self._scheduled: dict[str, object] = {}  # as primitives

    def retune(self, compressor: CompressorLike | None, changes: Mapping[str, object]) -> None:
        """See ``Compression.retune``."""
        self.next = self.next.retuned(compressor, changes)

    def begin_step(self, progress: Progress) -> bool:
        """Change to what the next step begins with; whether that is anything else.

        The schedule decides where its values are others than in the last step; in between ``retune`` has the say.
        """
        values = self.next.schedule.values(progress)
        described = {
            name: describe(value, COMPRESSORS) if is_dataclass(value) else value for name, value in values.items()
        }
        if described != self._scheduled:
            self._scheduled = described
            self.retune(None, values)
        changed = self.next is not self.now
        self.now = self.next
        return changed

    def running(self) -> dict[str, object]:
        """What may have changed since the run began, as primitives."""
        return self.next.running() | {"scheduled": dict(self._scheduled)}

    def resume(self, running: Mapping[str, object]) -> None:
        """Go on with what ``running`` gave in an earlier run.

        Raises:
            ValueError: these settings cannot follow the ones that the run began with.
        """
        scheduled = dict(running["scheduled"])  # type: ignore[call-overload]
        self.now = self.next = self.now.resumed(running).bound(self.now.rules.kinds)
        self._scheduled = scheduled
