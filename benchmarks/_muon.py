"""Muon for hidden matrices with AdamW for the rest, and what is compared with it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from benchmarks._local import AVERAGE, ROTATED
from lightning_compress.periodic.sync_schedule import Rounds
from lightning_compress.strategies.constructors import LOCAL_STEPS

REST = ["embedding.*", "places.*", "head.*", "*bias", "*norm*"]
"""Patterns of the decoder's parameters that AdamW steps."""
ADAMW_RATE = 3e-3
_FOUR = {"rounds": Rounds(4), **AVERAGE, "compressor": ROTATED}
_MULOCO = dict(LOCAL_STEPS["muloco"])


class MuonAndAdamW(torch.optim.Optimizer):
    """Both in one class, with one list of groups for schedules; ``rate``: Muon's."""

    def __init__(self, module: nn.Module, rate: float) -> None:
        super().__init__(module.parameters(), {})
        rest = {name: any(fnmatchcase(name, each) for each in REST) for name, _ in module.named_parameters()}
        hidden, others = (
            [module.get_parameter(name) for name in rest if rest[name] == which] for which in (False, True)
        )
        self.two: Any = torch.optim.Muon(hidden, rate), torch.optim.AdamW(others, ADAMW_RATE)
        self.param_groups = [group for each in self.two for group in each.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both."""
        for each in self.two:
            each.step()


METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "bf16": {"compressor": "bf16"},
    **{
        f"{name} {bits} bits": {"compressor": {"name": name, "bits": bits}}
        for name in ("qsgd", "rotated")
        for bits in (2, 4, 5, 8)
    },
    **{
        f"{name}, {way}": {"compressor": name, "error_feedback": given}
        for name in ("onebit", "efsign")
        for way, given in (("none", False), ("loco", "loco"), ("classical", True))
    },
    "topk 1 %": {"compressor": "topk"},
    "powersgd 4": {"compressor": {"name": "powersgd", "rank": 4}, "exchange": "auto"},
    "4 local steps": _FOUR,
    "4 local steps, the rest averaged": _FOUR | {"average_gradients": REST},
    "muloco": {"rounds": Rounds(_MULOCO.pop("sync_every")), **_MULOCO},
    "diloco, 2 bits": {"rounds": Rounds(30), "outer": "nesterov", "compressor": {"name": "rotated", "bits": 2}},
}
"""Arguments of ``attach``; with ``rounds``, of ``Local``."""
_LONG = ("dense", "qsgd 5 bits", "qsgd 8 bits", "4 local steps, the rest averaged", "muloco", "qsgd 4 bits")
STAGES: dict[str, tuple[int, tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = {
    "muon": (300, (0, 1), ("decoder", "decoder, 64 excerpts"), tuple(METHODS)),
    "muon_long": (1500, (0, 1, 2), ("small decoder",), _LONG),
}
"""Steps, seeds, models, and methods with Muon; beside them DiLoCo around AdamW, to compare with ``muloco``."""
RATES = (0.01, 0.02, 0.04, 0.08)
TUNED = 300
"""Steps of the dense runs of seed 0 by which a learning rate is chosen, for all methods but ``ROUNDS``."""
ROUNDS = ("muloco", "diloco, 2 bits")
"""Methods whose learning rate is chosen by whole runs of their own: in long rounds dense's is too high."""
BESIDE = ("dense", "diloco, 2 bits")
"""Methods that AdamW steps."""
MODELS = ("decoder", "decoder, 64 excerpts", "small decoder")
"""Whose methods are those of ``METHODS``."""
