"""Take optimizer steps that leave nothing behind in a compression."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_compress.core import state_dict
from lightning_compress.core.state_dict import IN_FLIGHT
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.delayed import DelayedCompression


@contextmanager
def trial(compression: Compression) -> Iterator[None]:
    """Undo, at the end of the context, what the steps inside changed: states, settings, counters and the epoch.

    The model and its optimizers are the caller's. Collective: all ranks enter and leave in the same step, and not
    between a backward pass and its optimizer step. After an error inside nothing is undone, because other ranks may be
    gone.

    Args:
        compression: of the model that is stepped inside.
    """
    if not isinstance(compression, DelayedCompression):  # which commits a step as soon as it is averaged
        compression.roll_back()  # of a step that a GradScaler skipped
    copied = state_dict.mapped(compression.state_dict(), lambda one: one | {"numbers": one["numbers"].clone()})
    if flying := copied.get(IN_FLIGHT):
        means = {name: mean.clone() for name, mean in flying["means"].items()}
        copied[IN_FLIGHT] = flying | {"means": means}
    counters, nonfinite, epoch = dict(vars(compression.meter)), compression.finite.count.clone(), compression.epoch
    yield
    compression.load_state_dict(copied)
    vars(compression.meter).update(counters)
    compression.finite.count.copy_(nonfinite)
    compression.epoch = epoch
