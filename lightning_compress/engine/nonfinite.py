"""Are the gradients of a step finite on all ranks?"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.engine.optimizers import skip_step
from lightning_compress.settings.settings import Settings


class FiniteGuard:
    """Whether the current step's gradients are finite, on the device; equal on all ranks.

    Args:
        device: where gradients are.
        settings: what is done about it.

    Attributes:
        count: int64 scalar, steps so far with gradients that were not finite.
        refused: the optimizers of this step were kept from stepping.
    """

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self._flags: list[tuple[Tensor, frozenset[str]]] = []
        self._zero = torch.zeros((), device=device)
        self._policy = settings.on_nonfinite
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.refused = False

    @property
    def looks(self) -> bool:
        """Whether something is done about it before an optimizer steps."""
        return self._policy != "pass"

    def begin_step(self) -> None:
        """Nothing is known."""
        self.refused = False
        self._flags.clear()

    def add(self, flag: Tensor, names: Iterable[str]) -> None:
        """Note what a group of these parameters found: 0.0, or NaN."""
        self._flags.append((flag, frozenset(names)))

    def found(self, names: Collection[str] | None = None) -> Tensor:
        """Bool scalar: a gradient was not finite, of a group that has any of these parameters."""
        flags = [flag for flag, own in self._flags if names is None or not own.isdisjoint(names)]
        return torch.stack([self._zero, *flags]).sum().isnan()

    def rejected(self, optimizer: Optimizer, names: Collection[str]) -> Tensor:
        """Bool scalar: a step that the optimizer of these parameters made does not count: gradients were not finite."""
        found, scaled = self.found(names), getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        return found if scaled is None else found | (scaled > 0).to(found.device).squeeze()

    def note(self) -> None:
        """Count the step if its gradients were not finite."""
        self.count.add_(self.found())

    def forget(self) -> None:
        """Begin again."""
        self._flags.clear()

    def before_step(self, optimizer: Optimizer, problem: str) -> None:
        """Keep the optimizer from stepping with gradients that are not finite; waits for the device.

        Args:
            optimizer: is about to step.
            problem: what to say then.

        Raises:
            FloatingPointError: they are not, and the policy is "raise"; on all ranks.
        """
        self.refused = self.refused or bool(self.found())
        if not self.refused:
            return
        if self._policy == "raise":
            raise FloatingPointError(f"{problem}; on_nonfinite='skip' leaves such steps out")
        skip_step(optimizer)
