"""The compressor that is chosen when a run begins: float32 where that is as fast, else a near-lossless one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from lightning_compress.codecs import BF16, CODECS, Codec, Dense, Rotated
from lightning_compress.core.registry import describe
from lightning_compress.exchanges.nodes import Cluster

__all__ = ["Automatic"]

TRUST = 0.75
"""What is to take the place of a float32 all-reduce must take less than this share of its time: predictions may be a
quarter off, and doing nothing is safe."""


@dataclass(frozen=True)
class Automatic:
    """``none``, ``bf16``, or ``rotated`` at 8 or 4 bits, whichever the link, the codecs' speeds and the model call for.

    These lose nothing worth mentioning with any optimizer, Adam or SGD (docs/results.md), and need no error feedback.
    The choice is made once, before the first step, by the cost model of ``exchange="auto"`` (or for the exchange that
    was named) over the whole model: link and codecs are measured, and the figures of rank 0 decide on all ranks. From
    safe to coarse, the next one is taken if it is predicted to shorten the exchange by a good share: by a quarter to
    leave float32 at all, since predictions may be that far off, and by ``gain`` after that. Float32 is left to
    DistributedDataParallel, and costs what it costs there.

    A checkpoint keeps the choice. With other ranks or on other hosts it is made again.

    Args:
        gain: the share of an exchange's time that a coarser method has to save, in [0, 1).

    Raises:
        ValueError: it is no such share.
    """

    gain: float = 0.1

    candidates: ClassVar[tuple[Codec, ...]] = (Dense(), BF16(), Rotated(bits=8), Rotated(bits=4))
    """From safe to coarse."""

    def __post_init__(self) -> None:
        if isinstance(self.gain, bool) or not isinstance(self.gain, int | float) or not 0 <= self.gain < 1:
            raise ValueError(f"Automatic(gain={self.gain!r}): it must be a share in [0, 1), such as 0.1")

    def pick(self, seconds: Sequence[float]) -> int:
        """Which one of several is taken, from safe to coarse, the first of which is float32.

        Args:
            seconds: what each is predicted to take.
        """
        taken = 0
        for number, each in enumerate(seconds):
            if each < min(TRUST if taken == 0 else 1.0, 1 - self.gain) * seconds[taken]:
                taken = number
        return taken


@dataclass(frozen=True)
class Chosen:
    """What ``Automatic`` became.

    Args:
        codec: one of its candidates.
        cluster: where that was chosen.
        why: the figures, for people.
    """

    codec: Codec
    cluster: Cluster
    why: str = ""

    def as_primitives(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"compressor": describe(self.codec, CODECS), "cluster": asdict(self.cluster)}

    def was_here(self, kept: Mapping[str, Any]) -> bool:
        """Whether what ``as_primitives`` gave was chosen on this cluster."""
        return kept.get("cluster") == asdict(self.cluster)


def check_automatic(given: Automatic, error_feedback: object, schedule: object) -> None:
    """Refuse what belongs to a method that is named.

    Raises:
        ValueError: it was given.
    """
    if error_feedback not in (None, False, "auto"):
        raise ValueError(
            f"error_feedback={error_feedback!r}: {given} chooses among methods that need none; set it to null, or name "
            "a compressor"
        )
    if schedule not in (None, "none"):
        raise ValueError(f"schedule={schedule!r}: {given} has no settings that could change; name a compressor")
