"""Learning rates as a pure function of the step, in units of the optimizer's own rate."""

from __future__ import annotations

import math
from typing import Literal, get_args

__all__ = ["Schedule", "lr_factor"]

Schedule = Literal["constant", "step", "linear", "cosine", "inverse_sqrt"]


def lr_factor(
    step: int,
    total: int,
    *,
    schedule: Schedule = "step",
    peak: float = 1.0,
    warmup: int = 0,
    start: float | None = None,
) -> float:
    """Factor on the base learning rate for one optimizer step.

    The first ``warmup`` steps go linearly from ``start`` to ``peak`` (Goyal et al. 2017: from the rate of one worker's
    minibatch to the scaled one). Then ``step`` divides by 10 at 50 % and at 75 % of ``total`` (He et al. 2015: 32k and
    48k of 64k iterations); ``linear`` and ``cosine`` fall to 0 at ``total``; ``inverse_sqrt`` falls as
    1 / sqrt(step) (Vaswani et al. 2017, section 5.3).

    Args:
        step: optimizer steps done so far, from 0.
        total: optimizer steps of the whole run, at least 1.
        schedule: what follows the warm-up.
        peak: factor after the warm-up, the minibatch over the reference minibatch.
        warmup: length of the warm-up in steps; there is none where it would start at ``peak``.
        start: factor at step 0; None: 1, or ``peak`` where that is less.

    Returns:
        The factor, at least 0.

    Raises:
        ValueError: there is no such schedule.
    """
    first = min(1.0, peak) if start is None else start
    if (
        schedule != "inverse_sqrt" and first == peak
    ):  # which falls from the end of the warm-up, whatever that began with
        warmup = 0
    if step < warmup:
        return first + (peak - first) * step / warmup
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup) / max(1, warmup, step))
    left = max(0.0, (total - step) / max(1, total - warmup))
    if schedule == "step":
        return peak * 0.1 ** ((2 * step >= total) + (4 * step >= 3 * total))
    if schedule == "linear":
        return peak * left
    if schedule == "cosine":
        return peak * (1 - math.cos(math.pi * left)) / 2
    raise ValueError(f"schedule={schedule!r}: choose from {', '.join(get_args(Schedule))}")
