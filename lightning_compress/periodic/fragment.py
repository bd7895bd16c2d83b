"""A fragment of the model: the anchors that all ranks share, and how replicas and anchors follow each other.

local steps -> anchor - replica on every rank -> Compression (residual, codec, exchange) -> mean
            -> outer optimizer steps the anchors -> commit -> replicas continue from the anchors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_compress.collectives import Collective
from lightning_compress.core import errors
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.optimizers import Trained
from lightning_compress.settings.run_state import RunState

_CAPS = (25 << 20, 25 << 20)
"""Bytes of a group, the same as DistributedDataParallel's buckets."""


@dataclass(frozen=True)
class Outer:
    """Settings of the SGD that steps the anchors. Its gradient is the mean over the ranks of ``anchor - replica``.

    Args:
        lr: learning rate, above 0. With 1 and no momentum, the anchors become the plain average of the replicas
            (local SGD, Stich, ICLR 2019, arXiv:1805.09767).
        momentum: in [0, 1); 0 switches it off.
        nesterov: use Nesterov momentum. DiLoCo (Douillard et al., 2023, arXiv:2311.08105) does, with lr 0.7 and
            momentum 0.9.

    Raises:
        ValueError: a value is out of range.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        for name, value in {"lr": self.lr, "momentum": self.momentum}.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"outer.{name}={value!r} must be a number")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"outer.lr={self.lr!r} must be above 0; 1 averages the models")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer.momentum={self.momentum!r} must be in [0, 1)")
        if not isinstance(self.nesterov, bool) or (self.nesterov and not self.momentum):
            raise ValueError(f"outer.nesterov={self.nesterov!r} must be true or false, and true with momentum only")

    @classmethod
    def of(cls, outer: object) -> Outer:
        """Return the settings for what the user passed as ``outer=``.

        Args:
            outer: "average", "nesterov", a mapping with some of "lr", "momentum", "nesterov", or an ``Outer``.

        Raises:
            ValueError: the name or a setting is unknown, or a value is out of range.
        """
        if isinstance(outer, cls):
            return outer
        if isinstance(outer, str) and outer in OUTERS:
            return OUTERS[outer]
        known = [field.name for field in fields(cls)]
        if not isinstance(outer, Mapping) or not set(outer) <= set(known):
            raise ValueError(
                f"outer={outer!r} must be one of {', '.join(map(repr, OUTERS))}, or a mapping with some of "
                f"{', '.join(known)}"
            )
        return cls(**outer)


OUTERS = {"average": Outer(), "nesterov": Outer(0.7, 0.9, True)}
"""What ``outer=`` accepts by name."""
_PLAIN = asdict(OUTERS["average"])


class Outcome(Enum):
    """What became of the mean of a fragment that the replicas have not followed yet."""

    PENDING = "pending"
    """There is none, or it has not arrived."""
    STEPPED = "stepped"
    """The anchors have made their outer step."""
    SKIPPED = "skipped"
    """A rank's numbers were not finite: the anchors stay, and all ranks are to return to them."""


class Fragment:
    """One part of the model on this rank.

    Args:
        replicas: the parameters that this rank trains, by name.
        settings: of the compression, bound to the model.
        outer: settings of the optimizer that steps the anchors.
        ranks: to average over. If anything else is sent at the same time, this fragment needs a collective of its own.

    Attributes:
        compression: averages the changes.
        anchors: what all ranks share, by name; float32 where the replica has half precision.
        synced: local steps until which this rank's changes were collected.
        wait: waits until the mean has arrived; None if the fragment is not travelling.
        outcome: of the last mean, until the replicas have followed it.
    """

    def __init__(
        self,
        replicas: Mapping[str, nn.Parameter],
        settings: RunState,
        outer: Outer,
        ranks: Collective,
    ) -> None:
        self.replicas, self._rank = dict(replicas), ranks.rank
        self.synced = 0
        self.wait: Callable[[], None] | None = None
        self.outcome = Outcome.PENDING
        self.anchors = {name: nn.Parameter(_anchor_of(replica)) for name, replica in replicas.items()}
        self._changes = {name: torch.zeros_like(anchor) for name, anchor in self.anchors.items()}
        trained = [Trained(name, anchor) for name, anchor in self.anchors.items()]
        self.compression = Compression(trained, settings, ranks, unused=False, accumulates=False, caps=_CAPS)
        self.compression.active = True
        self._outer = torch.optim.SGD(self.anchors.values(), **asdict(outer))
        self.compression.take_over(self._outer)

    def collect(self, step: int) -> int:
        """Note what this rank has learned until local step ``step``; return in how many steps."""
        for name, replica in self.replicas.items():
            anchor = self.anchors[name].detach()  # a replica in half precision started from the rounded anchor
            torch.sub(anchor.to(replica.dtype).to(anchor.dtype), replica.detach(), out=self._changes[name])
        learned, self.synced = step - self.synced, step
        return learned

    def average(self, steps: int) -> None:
        """Replace the collected changes by their mean over the ranks. Collective: every rank must call it.

        Args:
            steps: local steps that the changes come from. ``bytes_dense`` counts one dense average of the replicas for
                each of them.
        """
        meter = self.compression.meter
        before = meter.bytes_dense
        for dtype in dict.fromkeys(anchor.dtype for anchor in self.anchors.values()):
            names = tuple(name for name, anchor in self.anchors.items() if anchor.dtype == dtype)
            with errors.explained(f"round {self.compression.step}, averaging {names[0]} and on", self._rank):
                self.compression.reduce(names, [self._changes[name] for name in names])
        share = sum(each.nbytes for each in self.replicas.values()) / sum(each.nbytes for each in self.anchors.values())
        meter.bytes_dense = before + round(steps * share * (meter.bytes_dense - before))

    def step(self, plain: bool = False) -> None:
        """Step the anchors by the mean, and note the outcome. Collective if the drift check is on.

        Args:
            plain: move the anchors to the mean itself, without the outer learning rate and momentum.

        Raises:
            FloatingPointError: a rank's numbers were not finite, and ``on_nonfinite="raise"``; on all ranks.
            RuntimeError: the ranks' anchors differ; on all ranks.
        """
        before, group = self.compression.step, self._outer.param_groups[0]
        usual = {name: group[name] for name in _PLAIN}
        for name, anchor in self.anchors.items():
            anchor.grad = self._changes[name]
        try:
            group.update(_PLAIN if plain else usual)
            self._outer.step()
        finally:
            group.update(usual)
            for anchor in self.anchors.values():
                anchor.grad = None
        if self.compression.step == before:
            self.compression.roll_back()
            self.outcome = Outcome.SKIPPED
        else:
            self.compression.compare_ranks()
            self.outcome = Outcome.STEPPED

    def use(self, alpha: float = 0.0) -> None:
        """Set each replica to ``alpha * replica + (1 - alpha) * anchor``."""
        for name, replica in self.replicas.items():
            anchor = self.anchors[name].detach()
            replica.copy_(replica.to(anchor.dtype).lerp_(anchor, 1 - alpha) if alpha else anchor)

    @property
    def finite(self) -> bool:
        """Whether all numbers of this rank's replica are finite."""
        return all(bool(replica.detach().isfinite().all()) for replica in self.replicas.values())

    def rebase(self) -> None:
        """Set the anchors to the replicas, which must be the same on all ranks."""
        for name, replica in self.replicas.items():
            self.anchors[name].detach().copy_(replica.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and primitives. Only what is under ``"compression"`` may differ between ranks."""
        return {
            "common": {
                "anchors": {name: anchor.detach() for name, anchor in self.anchors.items()},
                "outer": self._outer.state_dict(),
            },
            "compression": self.compression.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``. Collective: every rank must call it.

        Raises:
            ValueError: the state has other parameters or another compressor.
        """
        anchors = state["common"]["anchors"]
        if anchors.keys() != self.anchors.keys():
            raise ValueError("the state belongs to other fragments or to another model")
        for name, anchor in anchors.items():
            self.anchors[name].detach().copy_(anchor)
        momentum = {"state": state["common"]["outer"]["state"]}  # learning rates come from this run's settings
        self._outer.load_state_dict(self._outer.state_dict() | momentum)
        self.compression.load_state_dict(state["compression"])


def _anchor_of(replica: Tensor) -> Tensor:
    """Return a contiguous copy, as messages need; in float32 for half precision, which would lose small steps."""
    half = replica.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else replica.dtype
    return replica.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
