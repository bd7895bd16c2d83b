"""Outer optimizers: what is done with the mean of what the ranks have learned in a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn


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
