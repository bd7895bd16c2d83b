"""``compressor="auto"``: pick float32, or a near-lossless compressor where that is faster, when a run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from lightning_compress.codecs import BF16, CODECS, QSGD, Codec, Dense
from lightning_compress.core.registry import describe
from lightning_compress.exchanges.nodes import Cluster

__all__ = ["Automatic"]

TRUST = 0.75
"""A candidate replaces float32 only below this share of its predicted time: predictions may be off by a quarter, and
float32 is the safe choice."""
LEAST_S = 1e-3
"""Seconds that it must save in a step, too: compressing costs time in Python that no prediction contains."""
ALIKE = 0.02
"""Share of the time that a coding of the same numbers must save."""


@dataclass(frozen=True)
class Automatic:
    """Pick ``none``, ``bf16``, or ``qsgd`` with 8 or 4 bits, by the link, the codecs' speeds and the model.

    In our runs these lose almost nothing with Adam or SGD (``lightning-compress docs accuracy``), and they need no
    error feedback.

    The choice is made once, before the first step, for the whole model. The cost model of ``exchange="auto"`` (or of
    the exchange that was named) predicts the time of each candidate, from measurements of the link and the codecs. The
    figures of rank 0 decide for all ranks. From safe to coarse, the next candidate is taken if it shortens the exchange
    enough: by a quarter and a millisecond to leave float32 at all, since predictions may be off, and by ``gain`` after
    that. On CPUs with numba, the 4 bits are sent as Huffman codes of the same numbers (``coding="entropy"``) if that
    saves a fiftieth. Float32 is left to DistributedDataParallel and costs what it costs there.

    Where all ranks are on one machine's CPUs, nothing is measured: float32 is fastest there. On several machines the
    link's speed is rounded (1, 2.5, 5, 10 Gbit/s, ...), so that equal runs choose alike; rank 0 logs the argument that
    keeps the choice. A checkpoint keeps it too. With another number of ranks or on other hosts, it is made again.

    Args:
        gain: the share of the exchange's time that a coarser candidate must save, in [0, 1).

    Raises:
        ValueError: ``gain`` is out of range.
    """

    gain: float = 0.1

    candidates: ClassVar[tuple[Codec, ...]] = (Dense(), BF16(), QSGD(8), QSGD(4), QSGD(4, coding="entropy"))
    """From safe to coarse."""

    def __post_init__(self) -> None:
        if isinstance(self.gain, bool) or not isinstance(self.gain, int | float) or not 0 <= self.gain < 1:
            raise ValueError(f"Automatic(gain={self.gain!r}): gain must be in [0, 1), such as 0.1")

    def pick(self, seconds: Sequence[float], codecs: Sequence[Codec] = candidates) -> int:
        """Return the index of the candidate to take.

        Args:
            seconds: predicted time of each, from safe to coarse; the first is float32.
            codecs: the candidates that these are.
        """
        taken = 0
        for index, (time, codec) in enumerate(zip(seconds, codecs, strict=False)):
            same = isinstance(codec, QSGD) and codec.coding != "packed" and codec.packed == codecs[taken]
            most = (1 - min(self.gain, ALIKE if same else 1)) * seconds[taken]
            if time < (most if taken else min(most, TRUST * seconds[0], seconds[0] - LEAST_S)):
                taken = index
        return taken


@dataclass(frozen=True)
class Chosen:
    """What ``Automatic`` picked.

    Args:
        codec: one of its candidates.
        cluster: the ranks and hosts that it was picked for.
        why: the figures, for people.
        reason: of float32, if that was picked.
    """

    codec: Codec
    cluster: Cluster
    why: str = ""
    reason: str = "this link is as fast as the compressor"

    def as_primitives(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"compressor": describe(self.codec, CODECS), "cluster": asdict(self.cluster)}

    def was_here(self, kept: Mapping[str, Any]) -> bool:
        """Return whether a choice that ``as_primitives`` described was made on this cluster."""
        return kept.get("cluster") == asdict(self.cluster)
