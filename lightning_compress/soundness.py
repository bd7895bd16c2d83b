"""Are the gradients of a step finite on all ranks?"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.guards import Guards


class Soundness:
    """What is known of the step under way, on the device; every rank knows the same.

    Args:
        device: where gradients are.
        guards: what is done about it.

    Attributes:
        count: int64 scalar, steps so far that were not sound.
        refused: the optimizers of this step were kept from stepping.
    """

    def __init__(self, device: torch.device, guards: Guards) -> None:
        self._flag = torch.zeros((), device=device)
        self._policy = guards.on_nonfinite
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.refused = False

    @property
    def looks(self) -> bool:
        """Whether something is done about it before an optimizer steps."""
        return self._policy != "pass"

    def begin_step(self) -> None:
        """Nothing is known."""
        self.refused = False
        self._flag.zero_()

    def add(self, flag: Tensor) -> None:
        """Note what a group found: 0.0, or NaN."""
        self._flag.add_(flag)

    def rejected(self, optimizer: Optimizer) -> Tensor:
        """Bool scalar: a step that the optimizer made does not count, since its gradients were not finite."""
        found = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        return self._flag.isnan() if found is None else self._flag.isnan() | (found > 0).to(self._flag.device).squeeze()

    def settle(self) -> Tensor:
        """Count the step if it was not sound, and forget it; returns whether it was not, a bool scalar."""
        rejected = self._flag.isnan()
        self.count.add_(rejected)
        self._flag.zero_()
        return rejected

    def forget(self) -> None:
        """Begin again."""
        self._flag.zero_()

    def before_step(self, optimizer: Optimizer, problem: str) -> None:
        """Keep the optimizer from stepping with gradients that are not finite; waits for the device.

        Args:
            optimizer: is about to step.
            problem: what to say then.

        Raises:
            FloatingPointError: they are not, and the policy is "raise"; on all ranks.
        """
        self.refused = self.refused or bool(self._flag.isnan())
        if not self.refused:
            return
        if self._policy == "raise":
            raise FloatingPointError(f"{problem}; on_nonfinite='skip' leaves such steps out")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # which every optimizer passes over, its state too
