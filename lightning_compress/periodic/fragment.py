"""A part of a model: its anchors, which all ranks have in common, and how they follow what the ranks learn.

local steps -> anchor - replica, of every rank -> Compression (residual, codec, exchange) -> mean
            -> outer optimizer steps the anchors -> commit -> replicas are set from the anchors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_compress.collectives import Collective
from lightning_compress.core import errors
from lightning_compress.engine.compression import Compression
from lightning_compress.settings.run_state import RunState

_CAPS = (25 << 20, 25 << 20)
"""Bytes of a group, as of DistributedDataParallel's buckets."""


@dataclass(frozen=True)
class Outer:
    """SGD over the anchors, whose gradient is the mean of ``anchor - replica`` over the ranks.

    Args:
        lr: learning rate; 1 without momentum is the plain average of the replicas (Stich, ICLR 2019, arXiv:1805.09767).
        momentum: 0 for none, less than 1.
        nesterov: Nesterov's form of it, as in DiLoCo (Douillard et al., 2023, arXiv:2311.08105): lr 0.7, momentum 0.9.

    Raises:
        ValueError: a value is out of range.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        numbers = {"lr": self.lr, "momentum": self.momentum}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"outer.{name}={value!r} must be a number")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"outer.lr={self.lr!r} must be above 0; 1 averages the models")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer.momentum={self.momentum!r} must be in [0, 1)")
        if not isinstance(self.nesterov, bool) or (self.nesterov and not self.momentum):
            raise ValueError(f"outer.nesterov={self.nesterov!r} must be true or false, and true with momentum only")

    @classmethod
    def of(cls, given: object) -> Outer:
        """An outer optimizer by name, by ``{"lr": ..., "momentum": ..., "nesterov": ...}``, or as it is.

        Raises:
            ValueError: there is no such name or setting, or a value is out of range.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str) and given in OUTERS:
            return OUTERS[given]
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise ValueError(
                f"outer={given!r} must be one of {', '.join(map(repr, OUTERS))}, or a mapping with some of "
                f"{', '.join(known)}"
            )
        return cls(**given)

    def over(self, anchors: Iterable[nn.Parameter]) -> torch.optim.SGD:
        """The optimizer."""
        return torch.optim.SGD(anchors, self.lr, self.momentum, nesterov=self.nesterov)


OUTERS = {"average": Outer(), "nesterov": Outer(0.7, 0.9, True)}
"""By name."""
_PLAIN = asdict(OUTERS["average"])


class Anchors(nn.Module):
    """Parameters by the names that they have in the model, in which no module is."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in named.items():  # register_parameter takes no dots
            self._parameters[name] = nn.Parameter(tensor)


class Fragment:
    """One part of the model on this rank.

    Args:
        replicas: its parameters, which the rank trains, by name.
        kinds: of the model's parameters, see ``kinds_of``.
        settings: of the compression.
        outer: steps the anchors.
        ranks: to average over; of this fragment alone, if anything else is sent at the same time.

    Attributes:
        compression: averages.
        anchors: what all ranks have in common, by name; float32 for parameters in half precision.
    """

    def __init__(
        self,
        replicas: Mapping[str, nn.Parameter],
        kinds: Mapping[str, str],
        settings: RunState,
        outer: Outer,
        ranks: Collective,
    ) -> None:
        self.replicas, self._rank = dict(replicas), ranks.rank
        made = Anchors({name: _anchor(each) for name, each in self.replicas.items()})
        self.anchors = dict(made.named_parameters())
        self._changes = {name: torch.zeros_like(each) for name, each in self.anchors.items()}
        self.compression = Compression(made, settings, ranks, unused=False, accumulates=False, caps=_CAPS, kinds=kinds)
        self.compression.active = True
        self._outer = outer.over(made.parameters())
        self.compression.take_over(self._outer)

    def look(self) -> None:
        """Take what this rank has learned since the last time."""
        for name, replica in self.replicas.items():
            anchor = self.anchors[name].detach()  # replicas in half precision began from it as rounded
            torch.sub(anchor.to(replica.dtype).to(anchor.dtype), replica.detach(), out=self._changes[name])

    def average(self, steps: int) -> None:
        """Replace what was taken by its mean over the ranks; a collective call.

        Args:
            steps: in which it was learned: averaging in each of them would have sent that many times as much.
        """
        before = self.compression.meter.bytes_dense
        for dtype in dict.fromkeys(each.dtype for each in self.anchors.values()):
            names = [name for name, each in self.anchors.items() if each.dtype == dtype]
            with errors.explained(f"round {self.compression.step}, averaging {names[0]} and on", self._rank):
                self.compression.reduce([self.anchors[name] for name in names], [self._changes[name] for name in names])
        meter = self.compression.meter
        meter.bytes_dense += (steps - 1) * (meter.bytes_dense - before)

    def step(self, plain: bool = False) -> bool:
        """Step the anchors by the mean; a collective call where drift is looked for.

        Args:
            plain: go to the mean itself, and leave the outer optimizer's momentum as it is.

        Returns:
            whether they did: not where a rank's numbers were not finite, and that is to be left out.

        Raises:
            FloatingPointError: they were not, and that is to be an error; on all ranks.
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
            return False
        self.compression.before_forward()
        return True

    def use(self, alpha: float = 0.0) -> None:
        """Go on from the anchors, and a share ``alpha`` of what the rank has by now."""
        for name, replica in self.replicas.items():
            anchor = self.anchors[name].detach()
            if alpha and replica.dtype == anchor.dtype:
                replica.lerp_(anchor, 1 - alpha)
            elif alpha:
                replica.copy_(replica.to(anchor.dtype).lerp_(anchor, 1 - alpha))
            else:
                replica.copy_(anchor)

    @property
    def finite(self) -> bool:
        """Whether this rank's replica is."""
        return all(bool(each.detach().isfinite().all()) for each in self.replicas.values())

    def rebase(self) -> None:
        """Have the anchors where the replicas are, which are the same on all ranks."""
        for name, replica in self.replicas.items():
            self.anchors[name].detach().copy_(replica.detach())

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives; all but what ``compression`` holds is the same on all ranks."""
        return {
            "common": {
                "anchors": {name: each.detach() for name, each in self.anchors.items()},
                "outer": self._outer.state_dict(),
            },
            "compression": self.compression.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``; a collective call.

        Raises:
            ValueError: it is of other parameters, or of another compressor.
        """
        anchors = state["common"]["anchors"]
        if anchors.keys() != self.anchors.keys():
            raise ValueError("the state is of other fragments, or of another model")
        for name, each in anchors.items():
            self.anchors[name].detach().copy_(each)
        momentum = {"state": state["common"]["outer"]["state"]}  # rates are those that this run was given
        self._outer.load_state_dict(self._outer.state_dict() | momentum)
        self.compression.load_state_dict(state["compression"])


def _anchor(replica: Tensor) -> Tensor:
    """Contiguous, as messages are; small steps would be lost in half precision."""
    half = replica.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else replica.dtype
    return replica.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def forget_nonfinite(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers begin anew where their states are not finite, and would make parameters so in every round."""
    for optimizer in optimizers:
        for parameter, kept in list(optimizer.state.items()):
            tensors = [each for each in kept.values() if isinstance(each, Tensor) and each.is_floating_point()]
            if not all(bool(each.isfinite().all()) for each in tensors):
                del optimizer.state[parameter]
