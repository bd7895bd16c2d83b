"""Settings of compression that rounds can have."""

from __future__ import annotations

from lightning_compress.settings.run_state import RunState


def check(settings: RunState) -> None:
    """Refuse what gives the outer optimizer anything else than a mean, or looks at the inner optimizer.

    Raises:
        ValueError: it is chosen.
    """
    if (by := settings.steps_by) is not None:
        raise ValueError(
            f"local steps cannot be combined with {by}, which does a part of the optimizer's work, or votes: the outer "
            "optimizer needs a mean of what the ranks have learned; use 'rotated', 'topk' or another compressor"
        )
    if settings.options.schedule.by_rate:
        raise ValueError(
            "local steps cannot be combined with a schedule by learning rate: the outer one does not change; give "
            "values by rounds, such as {'density': {0: 0.25, 10: 0.01}}"
        )


def alone(settings: RunState) -> RunState:
    """The same on one rank, where there is nothing to compress."""
    return RunState.of("none", on_nonfinite=settings.options.on_nonfinite, check_drift_every=0)
