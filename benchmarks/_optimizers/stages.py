"""What is compared, as data: settings of method and compensation, and the stages in which most of them drop out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks._local import AVERAGE, ROTATED
from lightning_compress.periodic.sync_schedule import Rounds

LOCO = {"name": "loco", "beta": 0.05}
WAYS: dict[str, dict[str, Any]] = {
    "none": {"error_feedback": False},
    "classical": {"error_feedback": True},
    "half": {"error_feedback": {"name": "residual", "decay": 0.5}},
    "loco": {"error_feedback": LOCO},
}
"""What becomes of errors."""


def _each(name: str, compressor: object, *ways: str, **more: object) -> dict[str, dict[str, Any]]:
    return {f"{name}, {way}": {"compressor": compressor, **WAYS[way], **more} for way in ways}


def _topk(density: float, **more: object) -> dict[str, object]:
    return {"name": "topk", "density": density, **more}


def _local(every: int, name: str, compressor: object) -> dict[str, dict[str, Any]]:
    """What each rank's own optimizer changed in so many steps is averaged; what encoding leaves is fed back."""
    return {f"local {every}, {name}": {**AVERAGE, "compressor": compressor, "rounds": Rounds(every)}}


DENSE = {"compressor": "none"}
TWO_SHOT = {"name": "two_shot"}


def _sums(bits: int) -> dict[str, object]:
    return TWO_SHOT | {"sums": {"name": "rotated", "bits": bits}}


SETTINGS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "rotated 4": {"compressor": ROTATED},
    **_each("onebit", "onebit", *WAYS),
    **_each("rotated 2", {"name": "rotated", "bits": 2}, *WAYS),
    **_each("topk 10 %", _topk(0.1), *WAYS),
    **_each("topk 1 %", _topk(0.01), *WAYS),
    **_each("onebit, two_shot", "onebit", "classical", exchange={**TWO_SHOT, "sums": "same"}),
    **_each("onebit, 4 bits of sums", "onebit", "none", "classical", "loco", exchange=_sums(4)),
    **_each("onebit, 8 bits of sums", "onebit", "loco", exchange=_sums(8)),
    **_each("onebit, 3 bits of sums", "onebit", "none", "loco", exchange=_sums(3)),
    **_each("onebit, 2 bits of sums", "onebit", "none", "loco", exchange=_sums(2)),
    **_each("efsign", "efsign", *WAYS),
    **_each("rotated 3", {"name": "rotated", "bits": 3}, "none", "loco"),
    **_each("rotated 2, correlated", {"name": "rotated", "bits": 2, "correlated": True}, "none", "loco"),
    **_each("rotated 3, correlated", {"name": "rotated", "bits": 3, "correlated": True}, "none"),
    **_each("qsgd 2", {"name": "qsgd", "bits": 2}, "none"),
    **_each("qsgd 2, correlated", {"name": "qsgd", "bits": 2, "correlated": True}, "none"),
    **_each("terngrad", "terngrad", "none", "classical", "loco"),
    **_each("topk 3 %", _topk(0.03), "classical", "loco"),
    **_each("topk 3 %, 2 bits", _topk(0.03, values="2bit", indices="rice"), "classical", "loco"),
    **_each("topk 10 %, 2 bits", _topk(0.1, values="2bit", indices="rice"), "classical", "loco"),
    "onebit, loco 0.1": {"compressor": "onebit", "error_feedback": {"name": "loco", "beta": 0.1}},
    "onebit, loco 0.02": {"compressor": "onebit", "error_feedback": {"name": "loco", "beta": 0.02}},
    "onebit, loco, reset 64": {"compressor": "onebit", "error_feedback": LOCO | {"reset_every": 64}},
    "onebit 64, loco": {"compressor": {"name": "onebit", "block": 64}, "error_feedback": LOCO},
    "onebit, loco, warm-up": {"compressor": "onebit", "error_feedback": LOCO, "warmup_steps": 30},
    "onebit, none, warm-up": {"compressor": "onebit", "error_feedback": False, "warmup_steps": 30},
    "onebit, 3 bits of sums, loco, warm-up": {
        "compressor": "onebit",
        "error_feedback": LOCO,
        "exchange": _sums(3),
        "warmup_steps": 30,
    },
    "onebit_adam": {"compressor": "onebit_adam", "warmup_steps": 60},
    **{
        f"adam_mask {100 * density:g} %, {rest}": {
            "compressor": {"name": "adam_mask", "density": density, "rest": rest}
        }
        for density in (0.02, 0.06)
        for rest in ("residual", "moment")
    },
    "adam_mask 2 %, loco": {"compressor": {"name": "adam_mask", "density": 0.02}, "error_feedback": LOCO},
    "adam_mask 6 %, loco": {"compressor": {"name": "adam_mask", "density": 0.06}, "error_feedback": LOCO},
    **{
        f"ef21 {eta}, {name}": {"compressor": {"name": "ef21", "eta": eta, "quantiser": quantiser}}
        for eta in (0.1, 0.5)
        for name, quantiser in (("onebit", "onebit"), ("topk 3 %", _topk(0.03)))
    },
    "powersgd": {"compressor": {"name": "powersgd", "rank": 4}},
    **_local(1, "onebit", "onebit"),
    **_local(2, "onebit", "onebit"),
    **_local(4, "onebit", "onebit"),
    **_local(2, "rotated 4", ROTATED),
    **_local(4, "rotated 4", ROTATED),
    **_local(8, "rotated 4", ROTATED),
    **_local(16, "rotated 4", ROTATED),
}
"""Arguments of ``Settings.of``, or with ``rounds`` those of ``Local``, by the name of the row."""


@dataclass(frozen=True)
class Stage:
    """Runs of one model and optimizer.

    Args:
        best: only so many settings, the best of the stage ``after``; None: all.
    """

    model: str = "lstm"
    optimizer: str = "adamw"
    ranks: int = 4
    steps: int = 300
    seeds: int = 2
    best: int | None = None
    after: str = ""

    @property
    def title(self) -> str:
        """What is run."""
        return f"{self.model}, {self.optimizer}, {self.ranks} ranks, {self.steps} steps"


STAGES = {
    "screening": Stage(),
    "long": Stage(steps=1500, seeds=3, best=8, after="screening"),
    "transformer": Stage("transformer", steps=1500, seeds=3, best=4, after="long"),
    "ranks": Stage(ranks=8, steps=1500, seeds=3, best=1, after="long"),
    "sgd": Stage(optimizer="sgd"),
    "sgd_long": Stage(optimizer="sgd", steps=1500, best=8, after="sgd"),
}
RATES = {("lstm", "adamw"): 1e-2, ("lstm", "sgd"): 1.0, ("transformer", "adamw"): 1e-2}
"""The dense run's best: see ``benchmarks/optimizers.py``. Of the Transformer, 4 ranks, seed 0, held-out loss at 1e-3,
3e-3 and 1e-2: 2.054, 1.583, 1.404 after 300 steps; the last two 1.071 and 1.038 after 1,500."""
LIMITS = (2.1, 1.1, 0.7)
"""Bits an element up to which the best of a stage goes on, in equal shares, besides the best of all."""
