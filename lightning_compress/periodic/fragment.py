"""A part of a model: its anchors, which all ranks have in common, and how they follow what the ranks learn.

local steps -> anchor - replica, of every rank -> Compression (residual, codec, exchange) -> mean
            -> outer optimizer steps the anchors -> commit -> replicas are set from the anchors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_compress.collectives import Collective
from lightning_compress.core import failures
from lightning_compress.engine.compression import Compression
from lightning_compress.periodic.outer import OUTERS, Outer
from lightning_compress.settings.settings import Settings

_CAPS = (25 << 20, 25 << 20)
"""Bytes of a group, as of DistributedDataParallel's buckets."""

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
        settings: Settings,
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
            with failures.explained(f"round {self.compression.step}, averaging {names[0]} and on", self._rank):
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
