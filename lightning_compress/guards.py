"""What is done when something goes wrong while training."""

from __future__ import annotations

from dataclasses import dataclass

ON_NONFINITE = ("pass", "skip", "raise")
ON_DRIFT = ("error", "resync")


@dataclass(frozen=True)
class Guards:
    """The arguments of that name of ``CompressedDDPStrategy``.

    Raises:
        ValueError: a value is not allowed.
    """

    on_nonfinite: str = "pass"
    on_drift: str = "error"
    check_drift_every: int = 100

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("on_nonfinite", self.on_nonfinite, ON_NONFINITE),
            ("on_drift", self.on_drift, ON_DRIFT),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
        every = self.check_drift_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"check_drift_every={every!r} must be a number of steps, or 0 for never")
